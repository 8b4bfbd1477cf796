"""`leansurgeon search`: the best (heads, layers, MLP) of a source under a budget."""

from __future__ import annotations

import hashlib
import json
import shlex
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leansurgeon.cli.common import AllowPickle, TrustRemoteCode, hold, say, seed_list
from leansurgeon.errors import UsageError, short
from leansurgeon.measure.data.task_spec import spell_task
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.training.runs.sample_data import sample_data, trained_on
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.source import Source
    from leansurgeon.measure.costs.memory import Setting
    from leansurgeon.measure.data.calibration import Calibration
    from leansurgeon.search import Outcome
    from leansurgeon.search.space import Budget, Candidate, Found
    from leansurgeon.training.recipe.schema import TrainingRecipe


def search(
    source: Annotated[str, typer.Argument(help="Preset, folder, run, hub id or timm/NAME.", show_default=False)],
    params: Annotated[str | None, typer.Option(help="Most parameters: 60M or 152394.", show_default=False)] = None,
    memory: Annotated[
        str | None, typer.Option(help="Most memory while training, predicted: 16GB or 16GiB.", show_default=False)
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(help="Longest forward pass of one sample, measured on this machine: 5ms.", show_default=False),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(help="Heads to try: 12,16,24 or factors; default 1x,4/3x,3/2x,2x,3x.", show_default=False),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to try: 6-12; default from all down to a quarter.", show_default=False)
    ] = None,
    mlp_dim: Annotated[
        str | None,
        typer.Option(help="MLP widths to try: 1536,3072 or factors; default 1x,3/4x,1/2x.", show_default=False),
    ] = None,
    head_dim: Annotated[str, typer.Option(help="keep, split, a number or auto, as in shrink.")] = "auto",
    data: Annotated[
        str | None,
        typer.Option(
            help="Sample data for heals: text files, a folder of images, or task:NAME,key=value. "
            "Default: the data that a run was trained on.",
            show_default=False,
        ),
    ] = None,
    calibration_samples: Annotated[
        int | None, typer.Option(min=2, help="Samples that the last rung fits on.", show_default=False)
    ] = None,
    fit: Annotated[int, typer.Option(min=0, help="Local fitting steps for every layer on the last rung.")] = 0,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe",
            "-r",
            help="Train candidates by this recipe; default: heal them, or the preset's recipe.",
            show_default=False,
        ),
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Change one key of the recipe. Repeatable.", show_default=False),
    ] = None,
    share: Annotated[float, typer.Option(help="Share of the recipe's length that the last rung trains.")] = 0.25,
    seeds: Annotated[
        str, typer.Option(help="Seeds of every training, whose scores are averaged; a heal has one.")
    ] = "0",
    tries: Annotated[
        int, typer.Option(min=1, help="Candidates of the first rung; each later one has half of them.")
    ] = 8,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a step for --memory; default: the recipe's, else 32.", show_default=False),
    ] = None,
    parallel: Annotated[
        int | None, typer.Option(min=1, help="Trainings side by side; default: one per core, or one on a GPU.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the winner to this folder.", show_default=False)
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the winner into the search's folder.")] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Draw SVG, PNG and PDF into this folder.", show_default=False)
    ] = None,
    workspace: Annotated[Path, typer.Option(help="Where searches, models and runs live.")] = Path("runs"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the shapes that fit and try none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Forget what an earlier call of this search found.")] = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Find the best (heads, layers, MLP) of SOURCE under a budget: count, then try, the better half for twice as long.

    The same command goes on with a search that was ended.
    """
    from leansurgeon.checkpoints import digests
    from leansurgeon.checkpoints.publish.output import check_apart
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.charts.render import check as check_plots
    from leansurgeon.search import Budget, Space, cheap, enumerate_shapes
    from leansurgeon.search import plots as drawing
    from leansurgeon.search.table import candidates_table, space_line

    budget = Budget.parse(params, memory, latency)
    space = Space(heads, layers, mlp_dim, head_dim)
    if not 0 < share <= 1:
        raise UsageError(f"--share {share:g}: a share of the recipe's length is needed, above 0 and at most 1.")
    numbers = tuple(seed_list(seeds))
    if plots:
        check_plots(plots)
    if not dry_run:
        digests.begin(source)
    changes = config_changes(recipe, source)
    opened = open_source(source, allow_pickle=allow_pickle, config_changes=changes)
    training = recipe_of(opened, recipe, sets)
    if training and data:
        raise UsageError("A recipe names its own data, and --data is for heals.", "Leave one of them out.")
    if not training and len(numbers) > 1:
        raise UsageError(f"--seeds {seeds}: a heal has one seed.", "Give one, or train with --recipe.")
    init = "transfer" if opened.learned else "fresh"
    found = enumerate_shapes(opened, space, budget, init=init, calibrated=opened.learned)
    if dry_run:
        cheaply = cheap.scores(opened, found.candidates, None)
        ranked = cheap.order(found.candidates, cheaply)
        if as_json:
            print(json.dumps(dry_document(opened, found, ranked)))
            return
        name, size = short(opened.name, 60), opened.parameters.total
        print("\n".join([*wrap(f"{name}, {size:,} parameters. {space_line(found)}"), ""]))
        print(candidates_table(ranked, cheaply))
        more = len(ranked) - 20
        print(f"\n{f'... and {more} more. ' if more > 0 else ''}Dry run: nothing was tried.")
        return
    say(space_line(found))
    sample = samples_of(opened, source, training, data, calibration_samples, numbers[0])
    setting = setting_of(training, sample, batch)
    settings = [found.candidates, budget, space, tries, str(Fraction(share)), numbers, fit, setting, sample.digest]
    settings.append(training.model_dump(mode="json") if training else None)
    folder = folder_of(workspace, opened, settings, force=force)
    target = out or (folder / "winner" if write else None)
    if target:
        hold(target, force=force or out is None)
        check_apart(target, opened.folder)
    outcome = run(
        opened, found, budget, sample, training, folder, numbers, share, fit, parallel, changes, setting, tries
    )
    command = shrink_command(source, opened, outcome.winner, data, calibration_samples, numbers[0], fit, training)
    extra: dict[str, Any] = {"folder": str(folder), "mode": "training" if training else "heal"}
    if plots:
        extra["plots"] = [str(file) for file in drawing.draw(outcome, plots)]
    if target:
        write_winner(opened, outcome.winner, sample, numbers[0], fit, target, force=force or out is None)
        extra["written"] = str(target)
    show(outcome, command, extra, training, recipe, folder, as_json=as_json)


def run(
    opened: Source, found: Found, budget: Budget, sample: Calibration, training: TrainingRecipe | None, folder: Path,
    seeds: tuple[int, ...], share: float, fit: int, parallel: int | None, changes: dict[str, Any] | None,
    setting: Setting, tries: int,
) -> Outcome:  # fmt: skip
    """The search itself, by heals or by trainings."""
    from leansurgeon import search as room
    from leansurgeon.search.evidence import gather
    from leansurgeon.training.runs.folder import cache_dir

    evidence = gather(opened, sample, cache_dir(), seeds[0], say)
    if evidence.says:
        say(evidence.says)
    if training:
        from leansurgeon.search.trainings import Trainings

        length = Fraction(share).limit_denominator(1000)
        bench: Any = Trainings(opened, training, folder, seeds, length, parallel, changes, say)
    else:
        from leansurgeon.search.heals import Heals

        bench = Heals(opened, sample, folder / "heals", seeds[0], fit, say)
    return room.search(opened, found, budget, evidence, bench, folder, setting=setting, tries=tries, say=say)


def show(
    outcome: Outcome, command: str, extra: dict[str, Any], training: TrainingRecipe | None, recipe: str | None,
    folder: Path, *, as_json: bool,
) -> None:  # fmt: skip
    """The outcome as text or as one JSON document, which also lies in the search's folder."""
    from leansurgeon.search import table, verdict
    from leansurgeon.training.runs.folder import write_json

    document = verdict.document(outcome, command, extra)
    write_json(folder / "search.json", document)
    if as_json:
        print(json.dumps(document))
        return
    shown = table.table(outcome)
    unit = "the recipe's length times --share" if training else "the sample data"
    kept = " kept: influence kept at best." if " kept " in shown else ""
    print("\n".join([shown, "", *wrap(f"* Pareto front. Columns 1 and below: shares of {unit}.{kept}")]))
    for sentence in table.sentences(outcome):
        print("\n".join(wrap(sentence, "  ")))
    print(f"\nCarry it out:\n  {command}")
    if training:
        print(f"  leansurgeon retrain{f' --recipe {shlex.quote(recipe)}' if recipe else ''}")
    if "written" in extra:
        print(f"Written to {extra['written']}.")
    print(f"The search is in {folder}.")


# -- what is asked for ----------------------------------------------------------------------------


def recipe_of(opened: Source, name: str | None, sets: list[str] | None) -> TrainingRecipe | None:
    """The recipe to train by; None where candidates are healed. Raises `UsageError` where there must be one."""
    from leansurgeon.training.recipe.reading import load_training

    bound = opened.preset.recipe if opened.preset and not opened.learned else None
    if name is None and opened.learned:
        if sets:
            raise UsageError("--set changes a recipe, and none is named.", "Add --recipe NAME.")
        return None
    if (name or bound) is None:
        raise UsageError(
            f"Nothing of {opened.name} is learned yet, so candidates must be trained.", "Add --recipe NAME."
        )
    return load_training(name or bound, list(sets or []), transferred=opened.learned)


def config_changes(recipe: str | None, source: str) -> JsonObject | None:
    """What an experiment changes in the config of its source, where that is this preset."""
    from leansurgeon.architectures.presets import PRESETS
    from leansurgeon.training.recipe.reading import load
    from leansurgeon.training.recipe.schema import ExperimentRecipe

    name = recipe or (PRESETS[source].recipe if source in PRESETS else None)
    loaded = load(name) if name and source in PRESETS else None
    same = isinstance(loaded, ExperimentRecipe) and loaded.source == source
    return (loaded.source_config or None) if same else None


def samples_of(
    opened: Source, source: str, training: TrainingRecipe | None, data: str | None, samples: int | None, seed: int
) -> Calibration:
    """The sample data of heals; of trainings what their task gives."""
    task = training.task if training else None if data else trained_on(source)
    if not (task or data):
        raise UsageError(
            "A search heals candidates on sample data, and there is none.", "Add --data FILES, or train with --recipe."
        )
    return sample_data(opened, data, task, samples, seed, say)


def setting_of(training: TrainingRecipe | None, sample: Calibration, batch: int | None) -> Setting:
    """How a model is trained when its memory is predicted."""
    from leansurgeon.measure.costs.memory import OPTIMIZERS, Setting

    first = sample.fit[0]
    tokens = first["input_ids"].shape[-1] if "input_ids" in first else None
    if training is None:
        return Setting(batch or 32, tokens)
    train = training.train
    name = train.optim.name if train.optim.name in OPTIMIZERS else "adamw"
    size = batch or min(train.batch, train.micro_batch or train.batch)
    return Setting(size, tokens, train.precision, optimizer=name, checkpointing=train.activation_checkpointing)


def folder_of(workspace: Path, opened: Source, settings: list[Any], *, force: bool) -> Path:
    """The folder of this search; everything that decides its results is in the name."""
    import shutil

    from leansurgeon.search.evidence import VERSION, identity

    digest = hashlib.sha256(f"{VERSION} {identity(opened)} {settings!r}".encode()).hexdigest()[:8]
    folder = workspace / "search" / f"{opened.slug}-{digest}"
    if force:
        shutil.rmtree(folder, ignore_errors=True)
    elif folder.exists():
        say(f"Going on with the search in {folder} (--force starts it again).")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- what comes out -------------------------------------------------------------------------------


def shrink_command(
    source: str, opened: Source, winner: Candidate, data: str | None, samples: int | None, seed: int, fit: int,
    training: TrainingRecipe | None,
) -> str:  # fmt: skip
    """The `shrink` that makes the winner."""
    wanted = winner.wanted
    flags = {
        "--heads": wanted.heads,
        "--layers": wanted.layers,
        "--mlp-dim": wanted.mlp_dim,
        "--head-dim": None if wanted.head_dim == "auto" else wanted.head_dim,
        "--init": "fresh" if wanted.init == "fresh" and opened.weights is not None else None,
        "--calibrate": data,
        "--calibration-samples": samples,
        "--fit": (fit or None) if not training else None,
        "--seed": seed or None,
    }
    if training and opened.learned and trained_on(source) is None:
        flags["--calibrate"] = spell_task(training.task.name, training.task.options)
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["leansurgeon", "shrink", source, *words])


def write_winner(
    opened: Source, winner: Candidate, sample: Calibration, seed: int, fit: int, target: Path, *, force: bool
) -> None:
    """What `shrink_command` would do, with the sample data at hand."""
    from leansurgeon.surgery.plan.method import Method
    from leansurgeon.surgery.plan.planning import plan
    from leansurgeon.surgery.shrink import carry_out, decide

    say(f"Writing the winner to {target} ...")
    used = sample if opened.learned else None
    method = Method(fit=fit if opened.learned else 0)
    decided = decide(plan(opened, winner.wanted, seed, method, calibrated=used is not None), used, say)
    carry_out(decided, target, force=force, say=say)


def dry_document(opened: Source, found: Found, ranked: list[Candidate]) -> JsonObject:
    """The JSON document of a search without training: the space and its best candidates."""
    shapes = [{"name": c.name, "parameters": c.parameters, "shape": c.shape.as_dict()} for c in ranked]
    counts = {"shapes": found.looked_at, "too_large": found.too_large, "refused": found.refused}
    return {"schema_version": 1, "dry_run": True, "source": opened.name, "space": counts, "candidates": shapes}
