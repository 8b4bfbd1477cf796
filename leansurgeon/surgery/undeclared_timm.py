"""Test one model of timm end to end: save a small random one of that name with timm, cut it, reload it with
`timm.create_model`, and compare it with a cut made by hand in memory.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file
from timm.models._hub import save_config_for_hf

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.infer.differences import levels
from leansurgeon.architectures.infer.library import quietly
from leansurgeon.architectures.infer.timm_models import arguments
from leansurgeon.architectures.infer.timm_models.declared import TimmLibrary, args_of, first_small
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.model import entry_module
from leansurgeon.checkpoints.source import open_source
from leansurgeon.surgery.family_check import PREFIX, USUAL, FamilyCheck, RandomModel
from leansurgeon.surgery.undeclared import compare_cuts, explain_failure, in_scratch


def check_timm_name(name: str, tower: None = None, drawn: RandomModel = USUAL) -> FamilyCheck:
    """Test a name (`timm/NAME`). All errors of timm end in the row."""
    entry = name.removeprefix(PREFIX)
    with quietly():
        try:
            flat = {"model_type": entry} | arguments.flatten(arguments.numbers_of(entry, {}))
            library, small = first_small(TimmLibrary.of(flat), flat)
        except Exception as error:  # timm raises all kinds of errors
            return FamilyCheck(name, why=explain_failure(error))
        return in_scratch(name, library.cls.__name__, partial(through_the_product, name, library, small, drawn.seed))


def through_the_product(name: str, library: TimmLibrary, small: Config, seed: int, scratch: Path) -> FamilyCheck:
    """Cut a small model of this name as a user would, and compare it with a cut by hand."""
    model = library.build(small, seed)
    save(model, scratch / "source", args_of(small))
    source = open_source(str(scratch / "source"))
    arch, expected = source.architecture, len(source.shape.stages)
    declared = architectures.find_declared(source.config) is not None
    row = FamilyCheck(name, library.cls.__name__, True, declared, arch.refusals(), bool(arch.decoupled))
    stages, _ = levels(library, small)
    if len(stages) != expected:
        return replace(row, why=f"{len(stages)} lists of blocks are found, and its declaration has {expected}")
    return compare_cuts(row, source, {}, model, stages, partial(library.example, model, small, seed), load_result)


def save(model: torch.nn.Module, folder: Path, args: Config) -> None:
    """Write a folder as `timm.models.save_for_hf` does, but store shared tensors under each name, as in published
    files.
    """
    folder.mkdir()
    state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    save_config_for_hf(model, folder / "config.json", model_args=args)


def load_result(folder: Path, _: Architecture) -> torch.nn.Module:
    """Load the result as a user would; registers our entry point first if it is one."""
    if (entry := read_config(folder)["architecture"]).startswith("leansurgeon_"):
        importlib.import_module(entry_module(entry))
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
