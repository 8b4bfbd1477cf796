"""Load: load a model folder into memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from leansurgeon.commands.command import Command
from leansurgeon.progress import Say
from leansurgeon.request import Access, Opt

if TYPE_CHECKING:
    import torch


class LoadRequest(Access):
    """What to load."""

    source: Annotated[str, Opt("Folder, run, result, hub id or timm/NAME.", positional=True, model=True)]


def load_result(request: LoadRequest, say: Say) -> torch.nn.Module:
    """Load the model of a folder, a run, a result, a hub id or `timm/NAME`, in its stored precision, ready to predict.

    The record of a result is `model.leansurgeon.record`. Models with a modelling file of ours need no
    `trust_remote_code`.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> leansurgeon.load(f"{folder}/lean").config.num_hidden_layers
    2

    Raises `UsageError` for a preset, `UnsupportedModel` for a model that cannot be read.
    """
    from leansurgeon.checkpoints import record
    from leansurgeon.checkpoints.loading import load
    from leansurgeon.commands.in_memory import RESULT, Cut

    name = request.source
    made = load(name, allow_pickle=request.allow_pickle)
    folder = Path(name) / "model" if (Path(name) / "model" / "config.json").is_file() else Path(name)
    surgery = record.read_if_whole(folder)
    if surgery is not None:
        setattr(made, RESULT, Cut(folder, surgery, surgery.as_dict()))
    return made


COMMAND = Command("load", LoadRequest, load_result, ())
