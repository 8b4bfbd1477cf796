"""Tiny models in the layouts of checkpoints as they lie on the hub, which `save_pretrained` would not write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SMALL = {"vocab_size": 160, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def saved(model: torch.nn.Module, folder: Path, seed: int = 0, **config: Any) -> Path:
    """A model with random weights everywhere in a folder, some keys of its config changed."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    model.tie_weights()
    model.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def with_tensors(folder: Path, more: Mapping[str, torch.Tensor]) -> Path:
    """The same folder with tensors beside those of the model."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | dict(more), file, {"format": "pt"})
    return folder


def load(folder: Path) -> torch.nn.Module:
    """The model as its plain library loads it: nothing missing, nothing without a place."""
    import transformers

    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, info = cls.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model.eval()


def skipping(model: torch.nn.Module, layers: torch.nn.ModuleList, keep: set[int], **given: torch.Tensor):
    """What a model says when all other layers pass on what they receive: the cut by hand."""

    def through(_: Any, args: tuple, kwargs: dict, out: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    hooks = [x.register_forward_hook(through, with_kwargs=True) for i, x in enumerate(layers) if i not in keep]
    with torch.no_grad():
        said = model(**given)[0]
    for hook in hooks:
        hook.remove()
    return said
