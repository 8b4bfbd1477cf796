"""Small models of families that nobody declared, their cuts by the product and by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from leansurgeon.architectures.infer import inputs
from leansurgeon.architectures.infer.differences import build_small_config
from leansurgeon.architectures.infer.library import Library, class_name, outputs, quietly, whole
from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import Plan, plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out


def small_model(model_type: str, folder: Path, seed: int = 3, **flags: Any) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A random model of a type with these flags, saved in `folder`; and its config."""
    with quietly():
        config = whole({"model_type": model_type, "architectures": [class_name(model_type)]} | flags)
        library = Library.of(config)
        small = build_small_config(library, config)
        model = library.build(small, seed)
        model.save_pretrained(folder)
    return model, small


def shrunk(source: Path, target: Path, keep: str | None = None, **wanted: Any) -> Plan:
    """The product's own cut, in this process, as it was planned."""
    opened = open_source(str(source))
    made = plan(opened, RequestedShape(**wanted), method=Method(keep=keep) if keep else None)
    carry_out(DecidedCut(made), target, check=False)
    return made


def reloaded(folder: Path, like: torch.nn.Module) -> torch.nn.Module:
    with quietly():
        model, info = type(like).from_pretrained(
            folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32
        )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def computed(model: torch.nn.Module, config: Mapping[str, Any], seed: int = 11) -> torch.Tensor:
    return outputs(model, inputs.example(model, config, seed))


def without(model: torch.nn.Module, blocks: str, gone: Sequence[int], config: Mapping[str, Any]) -> torch.Tensor:
    """What a model computes when the blocks `blocks.{i}` of these numbers pass on what they receive."""

    def through(_: torch.nn.Module, args: tuple, kwargs: dict, out: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        return hidden if isinstance(out, torch.Tensor) else (hidden, *out[1:])

    hooks = [model.get_submodule(f"{blocks}.{i}").register_forward_hook(through, with_kwargs=True) for i in gone]
    found = computed(model, config)
    for hook in hooks:
        hook.remove()
    return found


def parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
