"""Heads of any size in libraries that derive head_dim from width // heads.

Finds which modules form an attention and which of their numbers depend on the heads, so that our modelling file
(`models/decoupled_any.py`) can support any number of heads. Such numbers are found by building the model with other
heads: an attribute that changes with the heads counts heads. The projections are the linear maps that an attention
calls; the last one called is the output projection.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.infer.cuts import Trial
from leansurgeon.architectures.infer.differences import Level
from leansurgeon.architectures.infer.finding import Stage
from leansurgeon.architectures.infer.library import (
    REFUSED,
    Library,
    Unbuildable,
    outputs,
    raising,
    with_plain_attention,
)
from leansurgeon.architectures.infer.tiny import Config
from leansurgeon.architectures.infer.words import Places, UnitPlace
from leansurgeon.hooks import Hooks
from leansurgeon.models import decoupled_any
from leansurgeon.shape import Stage as Numbers

MODEL_TYPE, FILE, HEAD_DIM = "leansurgeon_decoupled", "decoupled_any.py", "lean_head_dim"
# Names of attributes that hold the inner width; others of the same value may be the width of the stream.
INNER = ("all_head_size", "inner_dim", "split_size", "total_attn_dim", "attention_inner", "attn_dim", "all_heads_size")


@dataclass(frozen=True)
class LeanLibrary(Library):
    """The library's class behind our modelling file."""

    def settings(self, config: Config) -> Any:
        with raising(REFUSED):
            return with_plain_attention(decoupled_any.LeanConfig.from_dict(self.join_config(config)))

    def load_class(self, settings: Any, **how: Any) -> Any:
        return lean_class(self.cls.__name__).made(settings).from_pretrained(None, config=settings, **how)


def lean_class(name: str) -> Any:
    """Return the class of our modelling file for a class of the library. Raises `Unbuildable`."""
    for lean in vars(decoupled_any).values():
        if isinstance(lean, type) and issubclass(lean, decoupled_any.Lean) and lean.mapping:
            names = getattr(auto, lean.mapping).values()
            if any(name == f or (not isinstance(f, str) and name in f) for f in names):
                return lean
    own = getattr(transformers, name, None)
    if own is not None and own.config_class.model_type not in auto.MODEL_MAPPING_NAMES:  # a part of a model, by itself
        return decoupled_any.LeanModel
    raise Unbuildable(f"the modelling file with a head_dim of its own has no form of {name}")


def attentions(model: nn.Module, other: nn.Module, block: str) -> dict[str, dict[str, tuple[int, int]]]:
    """Return the modules of a block with numbers that depend on the heads, by path, with both values of each number.

    The second value is that in `other`, which has other heads.
    """
    found, twins = {}, dict(other.named_modules())
    for name, module in model.get_submodule(block).named_modules():
        theirs = vars(twins.get(f"{block}.{name}" if name else block, nn.Identity()))
        mine = {key: value for key, value in vars(module).items() if key in theirs and type(value) is int}
        if pairs := {key: (value, theirs[key]) for key, value in mine.items() if theirs[key] != value}:
            found[name] = pairs
    return found


def containers(linear: list[str], owners: list[str]) -> list[list[str]]:
    """Group the linear maps by attention, in order.

    They are those under the module that holds its numbers or, if that has no output projection, under its parent.
    """
    groups = []
    for owner in owners:
        inside = [n for n in linear if n.startswith(owner + ".")]
        around = owner.rpartition(".")[0]
        if around and len(inside) in (1, 3):  # q, k and v alone, or stacked: the output projection is beside them
            beside = [n for n in linear if n.startswith(around + ".")]
            inside = beside if len(beside) > len(inside) else inside
        if len(inside) >= 2 and inside not in groups:
            groups.append(inside)
    return groups


def kept_numbers(now: Numbers) -> dict[str, int]:
    """Return the numbers that an attention stores, by the names of our modelling file."""
    numbers = {"heads": now.heads, "kv_heads": now.kv_heads, "groups": now.heads // now.kv_heads}
    return numbers | {"kv_inner": now.kv_heads * now.head_dim}


def projections(trial: Trial, block: str, maps: list[str], now: Numbers) -> dict[str, list[str]] | None:
    """Return possible words for each linear map of an attention, the likelier first; None if it cannot be widened."""
    sizes = {}
    for name in maps:
        path = f"{block}.{name}"
        shape = tuple(trial.model.get_submodule(path).weight.shape)
        sizes[name] = shape if f"{path}.weight" in trial.turned else shape[::-1]  # inputs, outputs
    *entering, last = maps
    if sizes[last] != (now.inner, now.width):
        return None
    keys = kept_numbers(now)["kv_inner"]
    stacked = ["q+kv+kv", "heads*qkv"] if now.kv_heads == now.heads else ["q+kv+kv"]
    known = {2 * keys: ["kv+kv"], now.inner + 2 * keys: stacked, keys: ["kv"], now.inner: ["q"]}
    words = {name: known.get(sizes[name][1]) for name in entering}
    return words | {last: ["o"]} if all(words.values()) else None


def specs(trial: Trial, stage: Stage, level: Level, now: Numbers) -> Iterator[dict[str, Any]]:
    """Yield ways to widen the attentions of a stage, the likelier first, in the form of our modelling file.

    Raises `Unbuildable` if there is none.
    """
    model, block = trial.model, level.modules.format(i=1)
    plain = now.kv_heads == now.heads
    fewer = now.heads // 2 if plain and now.heads > 1 else now.heads * 2
    change = {key: fewer for key in (stage.heads_key, stage.kv_key if plain else None) if key in trial.config}
    owners = attentions(model, trial.library.build(trial.config | change, None), block)
    calls = []  # the linear maps of a block in the order of their calls
    with Hooks() as hooks:
        for name, module in model.get_submodule(block).named_modules():
            is_matrix = getattr(getattr(module, "weight", None), "ndim", 0) == 2
            if is_matrix and not isinstance(module, nn.Embedding):
                hooks.after(module, lambda *_, name=name: calls.append(name))
        outputs(model, trial.inputs)
    linear = list(dict.fromkeys(calls))
    groups = containers(linear, [o for o in owners if o]) or ([linear] if "" in owners else [])
    words: dict[str, list[str]] = {}
    for maps in groups:
        if (of_maps := projections(trial, block, maps, now)) is None:
            raise Unbuildable("its attention is more than queries, keys, values and an output projection")
        words |= of_maps
    if not words:
        raise Unbuildable("no module of a block keeps a number that follows the heads")
    then = replace(now, heads=fewer, kv_heads=fewer if plain else now.kv_heads, head_dim=now.width // fewer)
    before, after = kept_numbers(now), kept_numbers(then)
    numbers, doubtful = {}, {}  # sure ones; ones that may be the inner width or the width of the stream
    for owner, pairs in owners.items():
        start = f"{owner}." if owner else ""
        for key, pair in pairs.items():
            if kind := next((k for k in before if pair == (before[k], after[k])), None):
                numbers[start + key] = kind
        for key, value in vars(model.get_submodule(f"{block}.{owner}" if owner else block)).items():
            if type(value) is int and value == now.inner:
                doubtful[start + key] = "inner"
    ways = max(map(len, words.values()))  # number of ways to stack queries, keys and values
    for narrow, stack in itertools.product((False, True), range(ways)):
        inner = {key: kind for key, kind in doubtful.items() if not narrow or key.endswith(INNER)}
        yield {
            "blocks": level.modules.removesuffix(".{i}"),
            "heads": stage.heads_key,
            "kv_heads": stage.kv_key,
            "head_dim": HEAD_DIM,
            "numbers": numbers | inner,
            "projections": {name: w[min(stack, len(w) - 1)] for name, w in words.items()},
        }


def find_projection_units(trial: Trial, words: Mapping[str, str], level: Level) -> Places:
    """Return the places of the units of linear maps, given by path within a block.

    Raises `Unbuildable` if the file stores them in another form than memory.
    """
    files = {at: name for name, at in trial.memory.items()}
    held = trial.model.state_dict()
    places = {}
    for i in range(level.depth):
        for path, word in words.items():
            for leaf in ("weight", "bias") if word != "o" else ("weight",):
                memory = f"{level.modules.format(i=i)}.{path}.{leaf}"
                if memory not in held:
                    continue
                name = files.get(memory)
                if name is None or trial.state[name].shape != held[memory].shape:
                    raise Unbuildable("its file holds the projections otherwise than the model does")
                if (placed := trial.locate(name)) is None:
                    raise Unbuildable(f"'{name}' stands outside the blocks")
                axis = 0 if leaf == "bias" else int((word == "o") != (memory in trial.turned))
                place = UnitPlace(placed[1], axis, "q" if word == "o" else word, word == "o")
                places.setdefault(name, []).append(place)
    return places


def lean_config(
    config: Config, cls: str, stages: list[dict[str, Any]], head_dims: Mapping[str, int], section: str = ""
) -> Config:
    """Return the config of one of our models with the same numbers and `head_dims`, given by key.

    For a model of several towers the numbers are in a `section` of it.
    """
    place = config[section] if section else config
    native = {key: place[key] for stage in stages for key in (stage["heads"], stage["kv_heads"]) if key in place}
    spec = {"model_type": config["model_type"], "class": cls, "native": native, "stages": stages}
    if section:
        config, spec = config | {section: place | dict(head_dims)}, spec | {"section": section}
    else:
        config = config | dict(head_dims)
    return config | {"model_type": MODEL_TYPE, "decoupled": spec}


def lean(base: Architecture) -> Architecture:
    """Return the form of an inferred family that our modelling file supports: any number of heads of any size."""
    widening = base.evidence["decoupled"]
    specs = [spec for spec in widening["stages"] if spec]

    def adopt(config: Config) -> Config:
        plain = config | {"model_type": base.model_types[0]}
        return lean_config(plain, widening["class"], specs, head_dims(base, plain), base.section)

    classes = {widening["class"]: widening["lean_class"]}
    return with_head_dims(base, MODEL_TYPE, FILE, adopt, library="leansurgeon", classes=classes)


def head_dims(base: Architecture, config: Config) -> dict[str, int]:
    """Return the head sizes in a config of an inferred family, by the keys that hold them in our form."""
    stages = zip(base.evidence["decoupled"]["stages"], base.shape(config).stages, strict=True)
    return {spec["head_dim"]: stage.head_dim for spec, stage in stages if spec}


def with_head_dims(
    base: Architecture, model_type: str, modelling: str, adopt: Callable[[Config], Config], **more: Any
) -> Architecture:
    """Return an inferred family with a head_dim of its own in every widened stage; `more` are other changed fields."""
    stages = tuple(
        replace(blocks, keys=replace(blocks.keys, head_dim=spec["head_dim"]) if spec else blocks.keys)
        for blocks, spec in zip(base.stages, base.evidence["decoupled"]["stages"], strict=True)
    )
    return replace(
        base,
        name=f"{model_type} {base.name}",
        model_types=(model_type,),
        keys=stages[0].keys,
        stages=stages,
        decoupled=None,
        shared=(),
        modelling=modelling,
        adopt=adopt,
        **more,
    )


def native(config: Config) -> Config:
    """Return the config of the library's own family for a config of ours."""
    spec = config["decoupled"]
    drop = ("decoupled", "auto_map", *(stage["head_dim"] for stage in spec["stages"]))
    plain = {k: v for k, v in config.items() if k not in drop}
    if section := spec.get("section"):
        place = {k: v for k, v in config[section].items() if k not in drop}
        plain[section] = place | spec["native"]
    else:
        plain |= spec["native"]
    return plain | {"model_type": spec["model_type"], "architectures": [spec["class"]]}
