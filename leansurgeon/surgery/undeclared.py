"""Test one type of the library end to end: save a small random model of it, cut it, reload it with its plain library,
and compare it with a cut made by hand in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.infer import cuts, inputs
from leansurgeon.architectures.infer.differences import Level, build_small_config, levels
from leansurgeon.architectures.infer.library import (
    Library,
    Unbuildable,
    class_name,
    difference,
    outputs,
    quietly,
    whole,
)
from leansurgeon.architectures.limits import move_taps
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.kind import transformers_class
from leansurgeon.checkpoints.publish.durable import scratch
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError
from leansurgeon.reading import jsonfile
from leansurgeon.shape import Shape
from leansurgeon.surgery.family_check import USUAL, FamilyCheck, RandomModel
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out

BROKEN = (LeanSurgeonError, ImportError, RuntimeError, TypeError, ValueError, AttributeError)  # raised by libraries


def check_type(name: str, tower: str | None = None, drawn: RandomModel = USUAL) -> FamilyCheck:
    """Test a type (with flags), or one tower of it. All errors of a library end in the row."""
    model_type, _, said = name.partition("?")  # `gpt2?scale_attn_by_inverse_layer_idx=true`: flags of its config
    pairs = (flag.partition("=") for flag in said.split("&") if flag)
    flags = {key: jsonfile.parse(value, f"{name}: {key}") for key, _, value in pairs}
    with quietly():
        cls = class_name(model_type)
        if cls is None:
            return FamilyCheck(name, why="transformers has no model for it")
        try:
            full = whole({"model_type": model_type, "architectures": [cls]} | flags)
            library = Library.of(full)
            small = build_small_config(library, full)
        except (Unbuildable, *BROKEN) as error:
            return FamilyCheck(name, cls, why=explain_failure(error))
        return in_scratch(name, cls, partial(through_the_product, name, library, small, tower, drawn))


def explain_failure(error: Exception) -> str:
    """Explain why no small model of a type was made."""
    own = isinstance(error, Unbuildable | LeanSurgeonError)
    return " ".join(str(error).split()) if own else "its library refuses its own default config"


def in_scratch(name: str, cls: str, product: Callable[[Path], FamilyCheck]) -> FamilyCheck:
    """Return the row that `product` makes in a temporary folder; all its errors end in the row."""
    row = FamilyCheck(name, cls, built=True)
    with scratch() as place:  # an error here is no finding about a family
        try:
            return product(place)
        except LeanSurgeonError as error:
            refused = dict.fromkeys(("depth", "heads", "mlp_dim"), "")
            return replace(row, refused=refused, why=" ".join(str(error).split()))
        except Exception as error:  # a defect of ours; the table shows it
            why = f"defect: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return replace(row, defect=True, why=why)


def through_the_product(
    name: str, library: Library, small: Config, tower: str | None, drawn: RandomModel, place: Path
) -> FamilyCheck:
    """Cut a small model of the type as a user would, and compare it with a cut by hand."""
    stages, _ = levels(library, small)
    if len(stages) == 1 and not stages[0].lists:
        deeper = cuts.deeper(small, stages[0], drawn.depth)
        with suppress(Unbuildable):
            library.build(deeper)
            small, stages = deeper, levels(library, deeper)[0]
    model = library.build(small, drawn.seed)
    model.save_pretrained(place / "source")
    source = open_source(str(place / "source"), tower=tower)
    arch, shape = source.architecture, source.shape
    if arch.section:
        stages, _ = levels(replace(library, outer=small, section=arch.section), small[arch.section])
    if len(stages) > len(shape.stages):  # some do not survive saving the config, and stay unchanged
        layers = [arch.blocks(i).layer for i in range(len(shape.stages))]
        stages = [next(level for level in stages if level.layer.endswith(layer)) for layer in layers]
    declared = bool(architectures.find_declared(small))
    row = FamilyCheck(name, library.cls.__name__, True, declared, arch.refusals(), bool(arch.decoupled))
    example = partial(inputs.example, model, small, drawn.seed)
    return compare_cuts(row, source, small, model, stages, example, partial(by_plain_library, model))


def compare_cuts(
    row: FamilyCheck,
    source: Source,
    config: Config,
    model: torch.nn.Module,
    stages: Sequence[Level],
    example: Callable[[], Mapping[str, Any]],
    load: Callable[[Path, Architecture], torch.nn.Module],
) -> FamilyCheck:
    """Return the row with what was requested, and the distance between the outputs of the written cut, which `load`
    loads, and of `model` cut by hand, on an `example`. The cut is written next to the source.
    """
    arch, shape, folder = source.architecture, source.shape, source.folder.with_name("cut")
    keep = choose_kept_layers(arch, config, shape) if "depth" not in row.refused else None
    asked = {} if "heads" in row.refused else {"heads": "2x", "head_dim": "keep"}
    if "mlp_dim" not in row.refused:
        keys = [arch.blocks(number).keys or arch.keys for number in range(len(shape.stages))]
        pairs = zip(shape.stages, keys, strict=True)
        more = [stage.mlp_dim + (stage.width if keys.mlp_ratio else 16) for stage, keys in pairs]
        asked["mlp_dim"] = ",".join(map(str, more))
    if not keep and not asked:
        return replace(row, why="nothing may change")
    method = Method(keep=",".join(map(str, keep))) if keep else Method()
    try:
        made = plan(source, RequestedShape(**asked), method=method)
    except UnsupportedModel as error:  # the family's form for more heads cannot change the MLP
        if not {"heads", "mlp_dim"} <= asked.keys():
            raise
        asked = {key: value for key, value in asked.items() if key != "mlp_dim"}
        row = replace(row, refused={**row.refused, "mlp_dim": f"beside heads: {error.message}"})
        made = plan(source, RequestedShape(**asked), method=method)
    carry_out(DecidedCut(made), folder, check=False)
    given = example()
    theirs = outputs(load(folder, made.architecture), given)
    gone = [i for i in range(shape.depth) if keep and i not in keep]
    with ExitStack() as stack:  # dropped blocks pass their input on
        for level, span in zip(stages, shape.spans, strict=False):
            stack.enter_context(cuts.skip_blocks(model, level, [i - span.start for i in gone if i in span]))
        by_hand = outputs(model, given)
    return replace(row, asked=asked | ({"keep": keep} if keep else {}), difference=difference(by_hand, theirs))


def choose_kept_layers(arch: Architecture, small: Config, shape: Shape) -> list[int]:
    """Return all layers except the second and the second to last of each stage; if layers alternate, all except the
    second group; if other parts read from certain layers, all except the first.
    """
    layers, period = [], arch.period
    for number, (stage, span) in enumerate(zip(shape.stages, shape.spans, strict=True)):
        least = arch.stay[number] if arch.stay else 0
        gone = {max(1, least), stage.depth - 2} if stage.depth > 3 else {stage.depth - 1}
        gone = gone if period == 1 else {i for i in range(stage.depth) if i // period == 1 and stage.depth > 2 * period}
        left = [i for i in range(stage.depth) if i not in gone]
        try:
            move_taps(arch.taps, (dict(arch.flat(dict(small))), dict(small)), left, stage.depth)
        except UsageError:
            left = list(range(1, stage.depth))
        layers += [span[i] for i in left]
    return layers


def by_plain_library(model: torch.nn.Module, folder: Path, arch: Architecture) -> torch.nn.Module:
    """Load the result as a user would: with the library's class, or with the modeling file next to it."""
    how = {"output_loading_info": True, "attn_implementation": "eager", "dtype": torch.float32}
    if arch.library == "leansurgeon":
        name = read_config(folder)["architectures"][0]
        loaded, info = transformers_class(arch, name).from_pretrained(folder, **how)
    else:
        loaded, info = type(model).from_pretrained(folder, **how)
    wrong = next((info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]), None)
    if wrong:
        raise LeanSurgeonError(f"The result does not load: {sorted(map(str, wrong))[0]}.")
    return loaded.eval()
