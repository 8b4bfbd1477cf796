"""Search: the best (heads, layers, MLP) of a source under a budget, by heals or by trainings."""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from leansurgeon.architectures.presets import PRESETS
from leansurgeon.checkpoints import digests
from leansurgeon.checkpoints.publish.output import check_apart, held
from leansurgeon.checkpoints.source import Source, ask_tower, open_source
from leansurgeon.commands.command import Command
from leansurgeon.commands.options import (
    DataRequest,
    DeviceRequest,
    Seeds,
    check_folder_name,
    spell_changes,
    spell_path,
)
from leansurgeon.commands.samples import sample_data, trained_on
from leansurgeon.errors import UsageError, short
from leansurgeon.measure.costs.memory import OPTIMIZERS, Setting
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.measure.data.task_spec import spell_task
from leansurgeon.progress import Say
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.request import Access, Number, Opt
from leansurgeon.search import findings
from leansurgeon.search.outcome import Outcome
from leansurgeon.search.outcome import search as find
from leansurgeon.search.space import Budget, Candidate, Shapes, Space, enumerate_shapes
from leansurgeon.search.trainings import Trainings
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.shrink import carry_out, decide
from leansurgeon.tasks.classes import spell_names
from leansurgeon.training.recipe.reading import load, load_training
from leansurgeon.training.recipe.schema import ExperimentRecipe, TrainingRecipe
from leansurgeon.training.runs.folder import write_json
from leansurgeon.words import wrap

DOCUMENT = "search.json"  # what --json prints, in the folder of the search


class SearchRequest(DataRequest, DeviceRequest, Access):
    """A source, the budget, the shapes that are tried, and how."""

    source: Annotated[
        str, Opt("Preset, folder, run, hub id or timm/NAME.", complete="sources", positional=True, model=True)
    ]
    params: Annotated[Number | None, Opt("Most parameters: 60M or 152394.", "Shape", cli=str)] = None
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
    recipe: Annotated[
        str | None,
        BeforeValidator(spell_path),
        Opt(
            "Train candidates by this recipe; default: heal them, or the preset's recipe.",
            "Data",
            ("--recipe", "-r"),
            complete="recipes",
            cli=str,
        ),
    ] = None
    set: Annotated[
        tuple[str, ...],
        BeforeValidator(spell_changes),
        Opt("Change one key of the recipe. Repeatable.", "Data", cli=list[str], metavar="A.B=C"),
    ] = ()
    share: Annotated[float, Opt("Share of the recipe's length that the last round trains.")] = 0.25
    seeds: Annotated[Seeds, Opt("Seeds of every training, whose scores are averaged; a heal has one.", cli=str)] = (0,)
    tries: Annotated[int, Field(ge=1), Opt("Candidates of the first round; each later one has half of them.")] = 8
    batch: Annotated[
        int | None, Field(ge=1), Opt("Samples of a step for --memory; default: the recipe's, else 32.")
    ] = None
    parallel: Annotated[
        int | None, Field(ge=1), Opt("Trainings side by side; default: one per core, or one on a GPU.")
    ] = None
    out: Annotated[Path | None, Opt("Write the winner to this folder.", "Output", ("--out", "-o"))] = None
    write: Annotated[bool, Opt("Write the winner into the search's folder.", "Output")] = False
    plots: Annotated[
        Path | None, AfterValidator(check_folder_name), Opt("Draw SVG, PNG and PDF into this folder.", "Output")
    ] = None
    workspace: Annotated[Path, Opt("Where searches, models and runs live.", "Output")] = Path("runs")
    dry_run: Annotated[bool, Opt("List the shapes that fit and try none.", "Output")] = False
    force: Annotated[bool, Opt("Forget what an earlier call of this search found.", "Output")] = False

    @property
    def space(self) -> Space:
        """The shapes that are looked at."""
        return Space(self.heads, self.layers, self.mlp_dim, self.head_dim)

    @property
    def budget(self) -> Budget:
        """What a shape may cost."""
        return Budget.parse(self.params, self.memory, self.latency)


@dataclass(frozen=True)
class Listed:
    """The shapes that fit, of a dry run."""

    source: Source
    shapes: Shapes

    def _ranked(self) -> tuple[Any, list[Candidate]]:
        from leansurgeon.search import cheap

        scores = cheap.scores(self.source, self.shapes.candidates, None)
        return scores, cheap.order(self.shapes.candidates, scores)

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        shapes = self.shapes
        document: JsonObject = {"schema_version": 1, "dry_run": True, "source": self.source.name}
        document["space"] = {"shapes": shapes.looked_at, "too_large": shapes.too_large, "refused": shapes.refused}
        ranked = self._ranked()[1]
        candidates = [{"name": c.name, "parameters": c.parameters, "shape": c.shape.as_dict()} for c in ranked]
        return document | {"candidates": candidates}

    def __str__(self) -> str:
        scores, ranked = self._ranked()
        name, size = short(self.source.name, 60), self.source.parameters.total
        lines = [*wrap(f"{name}, {size:,} parameters. {findings.describe_space(self.shapes)}"), ""]
        more = len(ranked) - 20
        end = f"\n{f'... and {more} more. ' if more > 0 else ''}Dry run: nothing was tried."
        return "\n".join([*lines, findings.make_candidates_table(ranked, scores), end])


@dataclass(frozen=True)
class Opened:
    """A source with the shapes that it can be searched for; `training` is None where candidates are healed."""

    name: str  # as it was typed
    source: Source
    training: TrainingRecipe | None
    changes: JsonObject | None
    shapes: Shapes


@dataclass(frozen=True)
class Searched:
    """What a search came to: `command` makes the winner, `folder` holds the search, `written` the winner, if it was to
    be written.
    """

    outcome: Outcome
    command: str
    folder: Path
    mode: str  # training | heal
    written: Path | None = None
    recipe: str | None = None  # that was named
    plots: tuple[str, ...] = ()  # files with charts

    @property
    def winner(self) -> Candidate:
        """The best shape."""
        return self.outcome.winner

    def as_dict(self) -> JsonObject:
        """What --json prints."""
        extra: JsonObject = {"folder": str(self.folder), "mode": self.mode}
        if self.written:
            extra["written"] = str(self.written)
        if self.plots:
            extra["plots"] = list(self.plots)
        return findings.make_document(self.outcome, self.command, extra)

    def __str__(self) -> str:
        training, shown = self.mode == "training", findings.make_table(self.outcome)
        unit = "the recipe's length times --share" if training else "the sample data"
        kept = " kept: influence kept at best." if " kept " in shown else ""
        lines = [shown, "", *wrap(f"* Pareto front. Columns 1 and below: shares of {unit}.{kept}")]
        for sentence in findings.describe(self.outcome):
            lines += wrap(sentence, "  ")
        lines += ["", "Carry it out:", f"  {self.command}"]
        if training:
            lines.append(f"  leansurgeon retrain{f' --recipe {shlex.quote(self.recipe)}' if self.recipe else ''}")
        lines += [f"Written to {self.written}."] if self.written else []
        return "\n".join([*lines, f"The search is in {self.folder}."])


def search(request: SearchRequest, say: Say) -> Searched | Listed:
    """Find the best (heads, layers, MLP) of SOURCE under a budget by successive halving. Rerun to resume.

    In Python `.winner` is the best shape and `.command` the `shrink` that makes it.

    >>> import leansurgeon
    >>> leansurgeon.search("digits-vit", params="1k")
    Traceback (most recent call last):
    leansurgeon.errors.UsageError: ...

    Raises `UsageError` where nothing keeps the budget, and what `shrink` and `retrain` raise.
    """
    with digests.early(None if request.dry_run else request.source):
        begun = begin(request)
        if request.dry_run:
            return Listed(begun.source, begun.shapes)
        return try_shapes(begun, request, say)


def begin(asked: SearchRequest) -> Opened:
    """Open the source and list the shapes that fit. Raises `UsageError` for what excludes each other."""
    space, budget = asked.space, asked.budget
    if not 0 < asked.share <= 1:
        raise UsageError(f"--share {asked.share:g}: a share of the recipe's length is needed, above 0 and at most 1.")
    changes = config_changes(asked.recipe, asked.source)
    opened = open_source(asked.source, allow_pickle=asked.allow_pickle, config_changes=changes)
    ask_tower(opened, None)
    training = recipe_of(opened, asked.recipe, asked.set)
    if training and asked.data:
        raise UsageError("A recipe names its own data, and --data is for heals.", "Leave one of them out.")
    if training and asked.device != "auto":
        raise UsageError(f"--device {asked.device} is for heals, and a recipe trains.", "Leave one of them out.")
    if not training and len(asked.seeds) > 1:
        seeds = ",".join(map(str, asked.seeds))
        raise UsageError(f"--seeds {seeds}: a heal has one seed.", "Give one, or train with --recipe.")
    init = "transfer" if opened.learned else "fresh"
    shapes = enumerate_shapes(opened, space, budget, init=init, calibrated=opened.learned)
    return Opened(asked.source, opened, training, changes, shapes)


def try_shapes(begun: Opened, asked: SearchRequest, say: Say) -> Searched:
    """Try the shapes, the better half for twice as long, and write the winner where that is asked for."""
    opened, training = begun.source, begun.training
    say(findings.describe_space(begun.shapes))
    sample = samples_of(begun, asked, say)
    setting = setting_of(training, sample, asked.batch)
    folder = folder_of(begun, asked, setting, sample, say)
    target, force = asked.out or (folder / "winner" if asked.write else None), asked.force or asked.out is None
    with ExitStack() as stack:
        if target:
            stack.enter_context(held(target, force=force))
            check_apart(target, opened.folder)
        outcome = tried(begun, asked.budget, sample, setting, folder, asked, say)
        if target:
            say(f"Writing the winner to {target} ...")
            write_winner(opened, outcome.winner, sample, asked, target, force=force, say=say)
    command, mode = shrink_command(begun, outcome.winner, asked), "training" if training else "heal"
    searched = Searched(outcome, command, folder, mode, target, asked.recipe)
    if asked.plots:
        from leansurgeon.search import plots

        drawn = tuple(str(file) for file in plots.draw(outcome, asked.plots))
        searched = replace(searched, plots=drawn)
    write_json(folder / DOCUMENT, searched.as_dict())
    return searched


def tried(
    begun: Opened, budget: Budget, sample: Calibration, setting: Setting, folder: Path, asked: SearchRequest, say: Say
) -> Outcome:
    """The search itself, by heals or by trainings."""
    from leansurgeon.search.evidence import gather

    opened, seeds = begun.source, asked.seeds
    evidence = gather(opened, sample, cache_folder(), seeds[0], say)
    if evidence.says:
        say(evidence.says)
    if begun.training:
        length = Fraction(asked.share).limit_denominator(1000)
        bench: Any = Trainings(opened, begun.training, folder, seeds, length, asked.parallel, begun.changes, say)
    else:
        from leansurgeon.measure.device import chosen
        from leansurgeon.search.heals import Heals

        bench = Heals(opened, sample, folder / "heals", seeds[0], say, chosen(asked.device))
    return find(opened, begun.shapes, budget, evidence, bench, folder, setting=setting, tries=asked.tries, say=say)


# -- what is asked for ----------------------------------------------------------------------------


def recipe_of(opened: Source, name: str | None, sets: Sequence[str]) -> TrainingRecipe | None:
    """The recipe to train by; None where candidates are healed. Raises `UsageError` where there must be one."""
    bound = opened.preset.recipe if opened.preset and not opened.learned else None
    if name is None and opened.learned:
        if sets:
            raise UsageError("--set changes a recipe, and none is named.", "Add --recipe NAME.")
        return None
    if (name or bound) is None:
        raise UsageError(
            f"Nothing of {opened.name} is learned yet, so candidates must be trained.", "Add --recipe NAME."
        )
    return load_training(name or bound, list(sets), transferred=opened.learned)


def config_changes(recipe: str | None, source: str) -> JsonObject | None:
    """What an experiment changes in the config of its source, where that is this preset."""
    name = recipe or (PRESETS[source].recipe if source in PRESETS else None)
    loaded = load(name) if name and source in PRESETS else None
    same = isinstance(loaded, ExperimentRecipe) and loaded.source == source
    return (loaded.source_config or None) if same else None


def samples_of(begun: Opened, asked: SearchRequest, say: Say) -> Calibration:
    """The sample data of heals; of trainings what their task gives."""
    training = begun.training
    task = training.task if training else None if asked.data else trained_on(begun.name)
    if not (task or asked.data):
        raise UsageError(
            "A search heals candidates on sample data, and there is none.", "Add --data FILES, or train with --recipe."
        )
    from leansurgeon.measure.device import chosen

    given = begun.source, asked.data, task, asked.samples, asked.seeds[0], say
    return sample_data(*given, flag="--data", device=chosen(asked.device), columns=asked.columns)


def setting_of(training: TrainingRecipe | None, sample: Calibration, batch: int | None) -> Setting:
    """How a model is trained when its memory is predicted."""
    first = sample.fit[0]
    tokens = first["input_ids"].shape[-1] if "input_ids" in first else None
    if training is None:
        return Setting(batch or 32, tokens)
    train = training.train
    name = train.optim.name if train.optim.name in OPTIMIZERS else "adamw"
    size = batch or min(train.batch, train.micro_batch or train.batch)
    return Setting(size, tokens, train.precision, optimizer=name, checkpointing=train.activation_checkpointing)


def folder_of(begun: Opened, asked: SearchRequest, setting: Setting, sample: Calibration, say: Say) -> Path:
    """The folder of this search; everything that decides its results is in the name."""
    space, budget = asked.space, asked.budget
    settings = [begun.shapes.candidates, budget, space, asked.tries, str(Fraction(asked.share)), asked.seeds]
    settings += [setting, sample.digest, begun.training.model_dump(mode="json") if begun.training else None]
    folder = place_of(asked.workspace, begun.source, settings)
    if asked.force:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        say(f"Going on with the search in {folder} (--force starts it again).")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def place_of(workspace: Path, opened: Source, settings: list[Any]) -> Path:
    """Where a search with these settings lies."""
    from leansurgeon.search.evidence import VERSION, identity

    digest = hashlib.sha256(f"{VERSION} {identity(opened)} {settings!r}".encode()).hexdigest()[:8]
    return workspace / "search" / f"{opened.slug}-{digest}"


# -- what comes out -------------------------------------------------------------------------------


def shrink_command(begun: Opened, winner: Candidate, asked: SearchRequest) -> str:
    """The `shrink` that makes the winner."""
    wanted, opened, training = winner.wanted, begun.source, begun.training
    flags = {
        "--heads": wanted.heads,
        "--layers": wanted.layers,
        "--mlp-dim": wanted.mlp_dim,
        "--head-dim": None if wanted.head_dim == "auto" else wanted.head_dim,
        "--init": "fresh" if wanted.init == "fresh" and opened.weights is not None else None,
        "--calibrate": asked.data,
        "--columns": asked.columns,
        "--classes": spell_names(),
        "--samples": asked.samples,
        "--seed": asked.seeds[0] or None,
    }
    if training and opened.learned and trained_on(begun.name) is None:
        flags["--calibrate"] = spell_task(training.task.name, training.task.options)
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["leansurgeon", "shrink", begun.name, *words])


def write_winner(
    opened: Source, winner: Candidate, sample: Calibration, asked: SearchRequest, target: Path, *, force: bool, say: Say
) -> None:
    """What `shrink_command` would do, with the sample data at hand."""
    from leansurgeon.measure.device import chosen

    used = sample if opened.learned else None
    steps = plan(opened, winner.wanted, asked.seeds[0], calibrated=used is not None)
    device = chosen(asked.device) if used is not None else "cpu"
    carry_out(decide(steps, used, say, device=device), target, force=force, say=say)


COMMAND = Command("search", SearchRequest, search, ("leansurgeon search my-model --params 100M --data texts/",))
