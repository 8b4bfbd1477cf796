"""Search: find the best (heads, layers, MLP) of a source under a budget, by healing or by training candidates."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from leansurgeon.architectures.presets import PRESETS
from leansurgeon.checkpoints import digests
from leansurgeon.checkpoints.publish.output import check_apart, hold_output
from leansurgeon.checkpoints.source import Source, ask_tower, open_source
from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import DataRequest, RecipeRequest, Seed, Workspace
from leansurgeon.commands.samples import sample_data, task_of_run
from leansurgeon.commands.shrink import ShrinkRequest
from leansurgeon.errors import UsageError, short
from leansurgeon.measure.costs.memory import OPTIMIZERS, Setting
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.choose_task import spell_task
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.request import Access, Names, Number, Opt, SourceName, command_line
from leansurgeon.search import cheap, findings
from leansurgeon.search.outcome import SearchOutcome
from leansurgeon.search.outcome import search as find
from leansurgeon.search.space import Budget, Candidate, Shapes, Space, enumerate_shapes
from leansurgeon.search.trainings import Trainings
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.shrink import carry_out, decide
from leansurgeon.tasks.classes import spell_names
from leansurgeon.training.recipe.reading import load, load_training
from leansurgeon.training.recipe.schema import ExperimentRecipe, TrainingRecipe
from leansurgeon.training.runs.folder import write_json
from leansurgeon.words import wrap

DOCUMENT = "search.json"  # what --json prints, in the folder of the search


class SearchRequest(DataRequest, RecipeRequest, Access):
    """A source, the budget, the shapes to try, and how."""

    source: SourceName
    params: Annotated[Number | None, Opt("Most parameters: -30%, 70% or 60M.", "Shape", cli=str)] = None
    memory: Annotated[str | None, Opt("Most memory while training, predicted: 16GB or 16GiB.", "Shape")] = None
    latency: Annotated[
        str | None, Opt("Longest forward pass of one sample, measured on this machine: 5ms.", "Shape")
    ] = None
    heads: Annotated[
        Number | None, Opt("Heads to try: 12,16,24 or factors; default 1x,4/3x,3/2x,2x,3x.", "Shape", cli=str)
    ] = None
    layers: Annotated[
        Number | None, Opt("Layers to try: 6-12; default from all down to a quarter.", "Shape", cli=str)
    ] = None
    mlp_dim: Annotated[
        Number | None, Opt("MLP widths to try: 1536,3072 or factors; default 1x,3/4x,1/2x.", "Shape", cli=str)
    ] = None
    head_dim: Annotated[Number, Opt("keep, split, a number or auto, as in shrink.", "Shape", cli=str)] = "auto"
    samples: Annotated[int | None, Field(ge=2), Opt("Samples that the last round fits on.", "Data")] = None
    seed: Seed = 0
    tries: Annotated[int, Field(ge=1), Opt("Candidates of the first round; each later one has half of them.")] = 8
    out: Annotated[Path | None, Opt("Write the winner to this folder.", "Output", ("--out", "-o"))] = None
    workspace: Workspace = Path("runs")
    dry_run: Annotated[bool, Opt("List the shapes that fit and try none.", "Output")] = False
    force: Annotated[bool, Opt("Discard the results of an earlier call of this search.", "Output")] = False


@dataclass(frozen=True)
class SearchResult(Answer):
    """The result of a search: `command` makes the winner, `folder` holds the search, `written` is the winner's folder
    if requested.
    """

    outcome: SearchOutcome = field(repr=False, kw_only=True)
    command: str = field(kw_only=True)
    folder: Path = field(kw_only=True)
    written: Path | None = field(kw_only=True)

    @property
    def winner(self) -> Candidate:
        """The best shape."""
        return self.outcome.winner


def search(request: SearchRequest, say: Say) -> SearchResult | Answer:
    """Find the best (heads, layers, MLP) of SOURCE under a budget by successive halving. Rerun to resume.

    Candidates are healed on sample data; of a preset, or by --recipe, they are trained for a quarter of its length.

    In Python `.winner` is the best shape and `.command` the `shrink` that makes it.

    >>> import leansurgeon
    >>> leansurgeon.search("digits-vit", params="1k")
    Traceback (most recent call last):
    leansurgeon.errors.UsageError: ...

    Raises `UsageError` if no shape fits the budget, and what `shrink` and `retrain` raise.
    """
    space = Space(request.heads, request.layers, request.mlp_dim, request.head_dim)
    with digests.early(None if request.dry_run else request.source):
        changes = config_changes(request.recipe, request.source)
        opened = open_source(request.source, allow_pickle=request.allow_pickle, config_changes=changes)
        ask_tower(opened, None)
        budget = Budget.parse(request.params, request.memory, request.latency, opened.parameters.total)
        training = recipe_of(opened, request.recipe, request.set)
        if training and request.data:
            raise UsageError("A recipe names its own data; --data is for healing candidates.", "Leave one of them out.")
        init = "transfer" if opened.learned else "fresh"
        shapes = enumerate_shapes(opened, space, budget, init=init, calibrated=opened.learned)
        if request.dry_run:
            ranked = cheap.order(shapes.candidates, cheap.scores(opened, shapes.candidates, None))
            return list_shapes(opened, shapes, ranked)
        say(findings.describe_space(shapes))
        from leansurgeon.measure.device import choose_device

        device = choose_device("auto")
        task = training.task if training else None if request.data else task_of_run(request.source)
        if not (task or request.data):
            raise UsageError(
                "A search heals candidates on sample data, and there is none.",
                "Add --data FILES, or train with --recipe.",
            )
        given = opened, request.data, task, request.samples, request.seed, say
        sample = sample_data(*given, flag="--data", device=device, columns=request.columns)
        setting = setting_of(training, sample)
        # The folder's name depends on everything that affects the results.
        deciding = [shapes.candidates, budget, space, request.tries, request.seed, setting, sample.digest]
        deciding.append(training.model_dump(mode="json") if training else None)
        folder = place_of(request.workspace, opened, deciding)
        if request.force:
            shutil.rmtree(folder, ignore_errors=True)
        elif folder.exists():
            say(f"Resuming the search in {folder} (--force starts it again).")
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            if request.out:
                stack.enter_context(hold_output(request.out, force=request.force))
                check_apart(request.out, opened.folder)
            from leansurgeon.search.evidence import gather

            evidence = gather(opened, sample, request.seed, say)
            if evidence.says:
                say(evidence.says)
            if training:
                bench = Trainings(opened, training, folder, request.seed, changes, say)
            else:
                from leansurgeon.search.heals import HealTrial

                bench = HealTrial(opened, sample, folder / "heals", request.seed, say, device)
            outcome = find(
                opened, shapes, budget, evidence, bench, folder, setting=setting, tries=request.tries, say=say
            )
            command = shrink_command(opened, training, outcome.winner, request)
            if request.out:
                say(f"Writing the winner to {request.out} ...")
                used = sample if opened.learned else None
                steps = plan(opened, outcome.winner.wanted, request.seed, calibrated=used is not None)
                how = {"force": request.force, "call": command}
                carry_out(decide(steps, used, say, device=device if used else "cpu"), request.out, **how, say=say)
    extra = {"folder": str(folder), "mode": "training" if training else "heal"}
    extra |= {"written": str(request.out)} if request.out else {}
    document, shown = findings.make_document(outcome, command, extra), findings.make_table(outcome)
    write_json(folder / DOCUMENT, document)
    unit = "a quarter of the recipe's length" if training else "the sample data"
    lines = [shown, "", *wrap(f"* Pareto front. Columns 1 and below: shares of {unit}.")]
    for sentence in findings.describe(outcome):
        lines += wrap(sentence, "  ")
    lines += ["", "Carry it out:", f"  {command}"]
    if training:
        lines.append(f"  leansurgeon retrain{f' --recipe {shlex.quote(request.recipe)}' if request.recipe else ''}")
    lines += [f"Written to {request.out}."] if request.out else []
    text = "\n".join([*lines, f"The search is in {folder}."])
    return SearchResult(document, text, outcome=outcome, command=command, folder=folder, written=request.out)


def list_shapes(source: Source, shapes: Shapes, ranked: list[Candidate]) -> Answer:
    """Return the shapes that fit, for a dry run, in the order of their cheap scores."""
    document = {"schema_version": 1, "dry_run": True, "source": source.name}
    document["space"] = {"shapes": shapes.looked_at, "too_large": shapes.too_large, "refused": shapes.refused}
    document["candidates"] = [{"name": c.name, "parameters": c.parameters, "shape": c.shape.as_dict()} for c in ranked]
    name, size = short(source.name, 60), source.parameters.total
    lines = [*wrap(f"{name}, {size:,} parameters. {findings.describe_space(shapes)}"), ""]
    rows = [
        findings.shape_cells(c, cheap.CheapScores(c.parameters)) | {"head_dim": c.shape.column("head_dim")}
        for c in ranked[:20]
    ]
    more = len(ranked) - 20
    end = f"\n{f'... and {more} more. ' if more > 0 else ''}Dry run: nothing was tried."
    return Answer(document, "\n".join([*lines, findings.draw_cells(rows), end]))


def recipe_of(opened: Source, name: str | None, sets: Sequence[str]) -> TrainingRecipe | None:
    """Return the recipe to train with; None if candidates are healed. Raises `UsageError` if a recipe is required."""
    bound = opened.preset.recipe if opened.preset and not opened.learned else None
    if name is None and opened.learned:
        if sets:
            raise UsageError("--set changes a recipe, and none is named.", "Add --recipe NAME.")
        return None
    if (name or bound) is None:
        raise UsageError(f"{opened.name} is untrained, so candidates must be trained.", "Add --recipe NAME.")
    return load_training(name or bound, list(sets), transferred=opened.learned)


def config_changes(recipe: str | None, source: str) -> JsonObject | None:
    """Return what the experiment of this preset changes in its source's config, if any."""
    name = recipe or (PRESETS[source].recipe if source in PRESETS else None)
    loaded = load(name) if name and source in PRESETS else None
    same = isinstance(loaded, ExperimentRecipe) and loaded.source == source
    return (loaded.source_config or None) if same else None


def setting_of(training: TrainingRecipe | None, sample: Calibration) -> Setting:
    """Return the training setting for predicting a model's memory."""
    first = sample.fit[0]
    tokens = first["input_ids"].shape[-1] if "input_ids" in first else None
    if training is None:
        return Setting(32, tokens)
    train = training.train
    name = train.optim.name if train.optim.name in OPTIMIZERS else "adamw"
    size = min(train.batch, train.micro_batch or train.batch)
    return Setting(size, tokens, train.precision, optimizer=name, checkpointing=train.activation_checkpointing)


def place_of(workspace: Path, opened: Source, settings: list[Any]) -> Path:
    """Return the folder of a search with these settings."""
    from leansurgeon.search.evidence import VERSION, identity

    digest = hashlib.sha256(f"{VERSION} {identity(opened)} {settings!r}".encode()).hexdigest()[:8]
    return workspace / "search" / f"{opened.slug}-{digest}"


def shrink_command(opened: Source, training: TrainingRecipe | None, winner: Candidate, request: SearchRequest) -> str:
    """Return the `shrink` command that makes the winner."""
    wanted, data = winner.wanted, request.data
    if training and opened.learned and task_of_run(request.source) is None:
        data = spell_task(training.task.name, training.task.options)
    fresh = wanted.init == "fresh" and opened.weights is not None  # a preset starts fresh anyway
    asked = ShrinkRequest(
        source=request.source,
        **{key: getattr(wanted, key) for key in ("heads", "layers", "mlp_dim", "head_dim")},
        **({"init": "fresh"} if fresh else {}),
        data=Names([data] if data else []),
        columns=request.columns,
        classes=spell_names(),
        samples=request.samples,
        seed=request.seed,
        **{key: getattr(request, key) for key in ("tower", "skip_damaged", "allow_pickle", "trust_remote_code")},
    )
    return command_line("shrink", asked)


COMMAND = Command("search", SearchRequest, search, ("leansurgeon search my-model --params 100M --data texts/",))
