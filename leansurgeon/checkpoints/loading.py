"""A model folder as a model in memory, whatever class or modelling file it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leansurgeon.checkpoints.family import auto_map
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    import torch


def load(source: str, *, allow_pickle: bool = False) -> torch.nn.Module:
    """The model of a folder, a run, a hub id or `timm/NAME` in the precision that it is stored in, on the CPU, ready to
    predict. A modelling file of ours comes from this package; what `save_pretrained` writes carries it along.

    Raises `UsageError` for a preset, which has no weights, and what opening raises.
    """
    from leansurgeon.checkpoints.model import load as load_folder

    opened = open_source(source, allow_pickle=allow_pickle)
    if opened.folder is None:
        raise UsageError(
            f"'{source}' is a preset and has no weights.",
            f"`leansurgeon shrink {source} --init fresh -o FOLDER` makes a model of it.",
        )
    loaded = load_folder(opened.folder, "features", as_stored=True)  # all that its files hold
    model = loaded.model.eval()
    if loaded.architecture.library != "timm" and type(model).__module__.startswith("leansurgeon.models."):
        # `save_pretrained` writes our modelling file beside the weights, as results have it; those for timm never do.
        known = auto_map(f"{type(model).__module__.rpartition('.')[2]}.py", model.config.model_type)
        auto = next((key for key, name in known.items() if name.endswith(f".{type(model).__name__}")), "AutoModel")
        model.config.auto_map = known  # a result of an earlier version may name another file
        type(model).register_for_auto_class(auto)
        type(model.config).register_for_auto_class()
    return model
