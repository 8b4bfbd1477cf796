"""Load a model folder into memory, whatever class or modelling file it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leansurgeon.checkpoints.family import auto_map
from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError

if TYPE_CHECKING:
    import torch


def load(source: str, *, allow_pickle: bool = False) -> torch.nn.Module:
    """Load the model of a folder, a run, a hub id or `timm/NAME` on the CPU, in its stored precision and in eval mode.

    A modelling file of ours is loaded from this package, and `save_pretrained` writes it beside the weights. Raises
    `UsageError` for a preset, which has no weights, and the errors of `open_source`.
    """
    from leansurgeon.checkpoints.model import load as load_folder

    opened = open_source(source, allow_pickle=allow_pickle)
    if opened.folder is None:
        raise UsageError(
            f"'{source}' is a preset and has no weights.",
            f"`leansurgeon shrink {source} --init fresh -o FOLDER` makes a model of it.",
        )
    loaded = load_folder(opened.folder, "features", as_stored=True)  # everything that its files hold
    model = loaded.model.eval()
    if loaded.architecture.library != "timm" and type(model).__module__.startswith("leansurgeon.models."):
        # `save_pretrained` then writes our modelling file beside the weights, as in results; those for timm are never
        # written.
        known = auto_map(f"{type(model).__module__.rpartition('.')[2]}.py", model.config.model_type)
        auto = next((key for key, name in known.items() if name.endswith(f".{type(model).__name__}")), "AutoModel")
        model.config.auto_map = known  # a result of an earlier version may name another file
        type(model).register_for_auto_class(auto)
        type(model.config).register_for_auto_class()
    return model
