"""Checkpoints in another form than config.json and safetensors, converted into a temporary folder: pickles, and the
published layout of Crammed BERT.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from leansurgeon.architectures.base import Config
from leansurgeon.checkpoints.foreign import companions, unpacked
from leansurgeon.checkpoints.foreign import crammed_bert_layout as layout
from leansurgeon.checkpoints.publish.leftovers import scratch
from leansurgeon.checkpoints.weights import Out, Weights, write
from leansurgeon.errors import UnsupportedModel


def from_pickle(path: Path, allow_pickle: bool, keep: ExitStack) -> tuple[Path, tuple[Path, ...]]:
    """A folder whose weights are a pickle: refused, or read with `weights_only=True` into a temporary safetensors
    copy. Returns the copy and the pickles.
    """
    pickles = sorted([*path.glob("pytorch_model*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
    if not pickles:
        raise UnsupportedModel(
            f"There is no model.safetensors in {path}.", "A folder needs config.json and safetensors weights."
        )
    if not allow_pickle:
        raise UnsupportedModel(
            f"{pickles[0].name} is a pickle, and reading a pickle can run foreign code.",
            "If you trust it, shrink, plan and inspect read it with --allow-pickle (weights_only=True). For other "
            f"commands save it anew:\n{unpacked.saving(path)}",
        )
    from leansurgeon.reading.pickles import read_tensors

    tensors = {name: tensor for file in pickles for name, tensor in read_tensors(file).items()}
    if not tensors:
        raise UnsupportedModel(f"{pickles[0].name} holds no tensors.")
    from safetensors.torch import save_file

    copy = keep.enter_context(scratch())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    companions.copy(path, copy, also=("config.json", "README.md"))
    return copy, tuple(pickles)


def from_crammed_bert(config: Config, weights: Weights, keep: ExitStack) -> Path:
    """The published Crammed BERT, converted into a temporary folder that lives as long as `keep`."""
    new_config, tensors = layout.convert(config, weights.float32, list(weights.entries))
    folder = keep.enter_context(scratch())
    arrays = {name: (value() if callable(value) else value) for name, value in tensors.items()}
    write(folder, [Out(name, "F32", a.shape, make=lambda a=a: a.astype("<f4")) for name, a in arrays.items()])
    (folder / "config.json").write_text(json.dumps(new_config, indent=2))
    return folder
