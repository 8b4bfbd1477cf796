"""`kappa`, `heads`, `search` and `load`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from leansurgeon.api.cutting import Place
from leansurgeon.api.training import Changes, changes
from leansurgeon.commands import in_memory
from leansurgeon.commands.results import RESULT, Cut, Heads, Kappa, Trained
from leansurgeon.commands.surface import Number, Progress, public, speaker, trusting, word

if TYPE_CHECKING:
    import torch

    from leansurgeon.commands.search import Searched


@public
def kappa(
    model: Place | torch.nn.Module,
    data: in_memory.Data | None = None,
    *,
    columns: str | None = None,
    classes: str | Sequence[str] | None = None,
    samples: int = 256,
    probes: int = 16,
    precision: str = "fp32",
    seed: int = 0,
    tokenizer: object | None = None,
    tower: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = True,
) -> Kappa:
    """Condition numbers of a model's attention blocks on held-out samples, raw and such that no change of basis moves
    them, layer by layer. `data` None is what a run was trained on.

    Raises `errors.UsageError` for a preset or missing data, `errors.UnsupportedModel` for a source that cannot be read.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> found = leansurgeon.kappa(cut, "task:digits", samples=8, probes=0, progress=False)
    >>> len(found.layers)
    2
    """
    from leansurgeon.commands import kappa as command
    from leansurgeon.tasks.classes import naming

    with opened(model, tokenizer, tower, trust_remote_code) as name, naming(classes):
        asked = {"samples": samples, "probes": probes, "precision": precision, "seed": seed, "columns": columns}
        document = command.kappa(name, in_memory.data(data), speaker(progress), **asked, allow_pickle=allow_pickle)
    if in_memory.is_model(model):
        document["name"] = Path(name).name
    return Kappa(document)


@public
def heads(
    model: Place | torch.nn.Module,
    data: in_memory.Data | None = None,
    *,
    columns: str | None = None,
    classes: str | Sequence[str] | None = None,
    samples: int | None = None,
    judge_samples: int | None = None,
    reduction: str = "sample",
    normalize: str = "none",
    ablate: bool = False,
    curve: bool = True,
    steps: int = 10,
    prune: str | float | None = None,
    out: str | os.PathLike[str] | None = None,
    heal: bool = True,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    tokenizer: object | None = None,
    tower: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = True,
) -> Heads:
    """The importance of every head and how many can go; `prune` (`"40%"`, or 0.4) writes the model without so many of
    every layer to `out`.

    Raises what `kappa` raises, and `errors.UsageError` for a share that is no whole head.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> found = leansurgeon.heads(cut, "task:digits", samples=64, judge_samples=64, curve=False, progress=False)
    >>> [layer.shape for layer in found.importance]
    [(4,), (4,)]
    """
    from leansurgeon.commands import heads as command
    from leansurgeon.tasks.classes import naming

    share = f"{100 * prune:g}%" if isinstance(prune, float) else prune
    target = None if out is None else Path(out)
    pruning = command.checked(reduction, normalize, share, target, heal, force, device)
    from leansurgeon.measure.heads.document import Options

    options = Options(reduction, normalize, ablate, curve, steps, judge_samples, seed)
    say = speaker(progress)
    with opened(model, tokenizer, tower, trust_remote_code) as name, naming(classes):
        measured = command.heads(
            name,
            in_memory.data(data),
            options,
            pruning,
            say,
            samples=samples,
            columns=columns,
            allow_pickle=allow_pickle,
        )
    if in_memory.is_model(model):
        measured.document["model"] = Path(name).name
    if measured.pruned is None:
        return Heads(measured.document)
    smaller = measured.pruned
    return Heads(measured.document, Cut(smaller.asked.out, smaller.record, smaller.as_dict(), smaller.told()))


@contextmanager
def opened(model: Place | torch.nn.Module, tokenizer: object | None, tower: str | None, trusted: bool) -> Iterator[str]:
    """The path or name of a model while the block runs, which trusts its code or not and means this tower."""
    from leansurgeon.architectures.towers import meant

    with ExitStack() as stack:
        name = in_memory.folder_of(model, tokenizer, stack)
        stack.enter_context(trusting(trusted))
        stack.enter_context(meant(tower))
        yield name


@public
def search(
    source: Place | torch.nn.Module,
    *,
    params: int | str | None = None,
    memory: str | None = None,
    latency: str | None = None,
    heads: Number | None = None,
    layers: Number | None = None,
    mlp_dim: Number | None = None,
    head_dim: int | str = "auto",
    data: in_memory.Data | None = None,
    columns: str | None = None,
    classes: str | Sequence[str] | None = None,
    samples: int | None = None,
    recipe: str | os.PathLike[str] | None = None,
    set: Changes = (),
    share: float = 0.25,
    seeds: int | Sequence[int] = 0,
    tries: int = 8,
    batch: int | None = None,
    parallel: int | None = None,
    out: str | os.PathLike[str] | None = None,
    workspace: str | os.PathLike[str] = "runs",
    device: str = "auto",
    force: bool = False,
    tokenizer: object | None = None,
    tower: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = True,
) -> Searched:
    """The best heads, layers and MLP under a budget: shapes are counted, then tried, the better half for twice as long.
    `.winner` is the best one, `.command` the `shrink` that makes it; `out` writes it there. The same call goes on with
    a search that was ended.

    Raises `errors.UsageError` where nothing keeps the budget, and what `shrink` and `retrain` raise.

    >>> import leansurgeon
    >>> leansurgeon.search("digits-vit", params="1k")
    Traceback (most recent call last):
    leansurgeon.errors.UsageError: ...
    """
    from leansurgeon.commands import search as command
    from leansurgeon.search.space import Budget, Space
    from leansurgeon.tasks.classes import naming

    budget = Budget.parse(None if params is None else str(params), memory, latency)
    space = Space(word(heads, "heads"), word(layers, "layers"), word(mlp_dim, "mlp_dim"), str(head_dim))
    asked = command.SearchOptions(
        data=in_memory.data(data),
        columns=columns,
        samples=samples,
        recipe=None if recipe is None else os.fspath(recipe),
        sets=changes(set),
        share=share,
        seeds=(seeds,) if isinstance(seeds, int) else tuple(seeds),
        tries=tries,
        batch=batch,
        parallel=parallel,
        out=None if out is None else Path(out),
        workspace=Path(workspace),
        force=force,
        allow_pickle=allow_pickle,
        device=device,
    )
    with opened(source, tokenizer, tower, trust_remote_code) as name, naming(classes):
        begun = command.begin(name, space, budget, asked)
        return command.search(begun, space, budget, asked, speaker(progress))


@public
def load(source: Place, *, allow_pickle: bool = False, trust_remote_code: bool = False) -> torch.nn.Module:
    """The model of a folder, a run, a result, a hub id or `timm/NAME`, in the precision that it is stored in, ready to
    predict; the record of a result is `model.leansurgeon.record`. What needs a modelling file of ours needs no
    `trust_remote_code`.

    Raises `errors.UsageError` for a preset, `errors.UnsupportedModel` for what cannot be read.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> leansurgeon.load(f"{folder}/lean").config.num_hidden_layers
    2
    """
    from leansurgeon.checkpoints import record
    from leansurgeon.commands.load import load as command

    name = in_memory.place(source)
    with trusting(trust_remote_code):
        made = command(name, allow_pickle=allow_pickle)
    folder = Path(name) / "model" if (Path(name) / "model" / "config.json").is_file() else Path(name)
    surgery = record.read_if_whole(folder)
    if surgery is not None:
        setattr(made, RESULT, source if isinstance(source, Cut | Trained) else Cut(folder, surgery, surgery.as_dict()))
    return made
