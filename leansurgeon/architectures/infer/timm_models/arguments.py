"""Arguments of timm's constructors as a flat config: the numbers of a built model, and a small form of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from leansurgeon.architectures.tensors import Config, is_count
from leansurgeon.models.timm_any import as_lists, create

DEPTHS = ("depth", "depths", "stages", "layers", "serial_depths", "num_blocks", "num_layers")
HEADS = ("num_heads", "heads")
WIDTHS = ("embed_dim", "embed_dims", "dims", "base_dims")
RATIOS = ("mlp_ratio", "mlp_ratios")
INDEX_LISTS = ("global_attn_indexes",)  # layers of a kind, by index
IMAGES = ("img_size", "patch_size", "in_chans", "num_classes")
LEAST, MOST = 2, 5  # layers per stage of a small model
HEAD_DIM = 8


def numbers_of(model_name: str, given: Config) -> Config:
    """Return the arguments that timm passes to a model's class, limited to numbers that surgery or its images need.

    Raises the errors of timm.
    """
    model = build(model_name, given)
    taken = constructor_arguments(type(model), model_name, given)
    names = (*DEPTHS, *HEADS, *WIDTHS, *RATIOS, *INDEX_LISTS, *IMAGES)
    numbers = {name: as_lists(taken[name]) for name in names if name in taken and is_number(taken[name])}
    known = sizes(model)
    for kept in (numbers, {k: v for k, v in numbers.items() if k in (*DEPTHS, *HEADS, *RATIOS)}):
        with suppress(Exception):  # an entry point that sets some of them itself
            if sizes(build(model_name, kept | given)) == known:
                return kept | given
    return dict(given)


def build(model_name: str, args: Config, device: str = "meta") -> nn.Module:
    """Build a timm model with these arguments; one that cannot be built on meta takes memory briefly."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with torch.device(device):
                return create(model_name, args)
        except (RuntimeError, NotImplementedError):
            if device != "meta":
                raise
            return create(model_name, args)


def sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the size of every tensor in a model's file."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def constructor_arguments(cls: type[nn.Module], model_name: str, given: Config) -> Config:
    """Return every argument of a model's class by name, as its entry point passes it."""
    noted = {}
    inherited = "__init__" not in vars(cls)
    init = cls.__init__
    signature = inspect.signature(init)

    def noting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if not noted:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                kind = signature.parameters[name].kind
                noted.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        init(self, *args, **kwargs)

    cls.__init__ = noting
    try:
        build(model_name, given)
    finally:
        if inherited:
            del cls.__init__
        else:
            cls.__init__ = init
    noted = defaults(cls) | noted
    # Some classes take dataclasses instead of plain arguments.
    records = [value for value in noted.values() if is_dataclass(value) and not isinstance(value, type)]
    return {field.name: getattr(record, field.name) for record in records for field in fields(record)} | noted


def defaults(cls: type[nn.Module]) -> Config:
    """Return the default of every argument that has one; a class may pass on keyword arguments to its base."""
    found = {}
    for base_class in reversed(cls.__mro__):
        parameters = inspect.signature(base_class.__init__).parameters.values()
        found |= {each.name: each.default for each in parameters if each.default is not each.empty}
    return found


def is_number(value: Any) -> bool:
    """Return whether a value is a number, or a (nested) list of numbers."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def flatten(args: Config) -> Config:
    """Convert `{"depths": [2, 3]}` to `{"depths.0": 2, "depths.1": 3}`; lists of layer indices stay whole."""
    flat = {}
    for name, value in args.items():
        if isinstance(value, list | tuple) and is_number(value) and name not in INDEX_LISTS:
            flat |= flatten({f"{name}.{i}": v for i, v in enumerate(value)})
        else:
            flat[name] = value
    return flat


def unflatten(flat: Config) -> Config:
    """Invert `flatten`."""
    args = {}
    for key, value in flat.items():
        name, *places = key.split(".")
        if not places:
            args[name] = value
            continue
        here = args.setdefault(name, [])
        for place in places[:-1]:
            while len(here) <= int(place):
                here.append([])
            here = here[int(place)]
        here.append(value)
    return args


def base(key: str) -> str:
    """Return an argument's name without list indices."""
    return key.split(".")[0]


def entry(key: str) -> str:
    """Return the first list index of a key, which is the stage."""
    return key.partition(".")[2].split(".")[0]


def attempts(flat: Config) -> Iterator[tuple[Config, int]]:
    """Yield small forms of a model, the smallest first, with the side of their images.

    Later forms keep the widths or image size that a family requires.
    """
    usual = flat.get("img_size", flat.get("img_size.0"))
    patch = flat.get("patch_size", flat.get("patch_size.0", 16))
    least = 4 * patch if is_count(patch) and patch >= 8 else 64
    for narrow in (True, False):
        for side in dict.fromkeys((min(least, usual or least), usual or 224)):
            yield shrunk(flat, narrow, side), side


def shrunk(flat: Config, narrow: bool, side: int) -> Config:
    """Return a config with fewer layers; `narrow` also reduces the widths to `HEAD_DIM` channels per head."""
    smaller = dict(flat)
    stages = sum(base(key) in DEPTHS for key in flat)
    for key, value in flat.items():
        if base(key) in DEPTHS and is_count(value):
            smaller[key] = min(max(value, LEAST), MOST if stages == 1 else 3)
        elif base(key) == "img_size" and value:
            smaller[key] = side
    for key in INDEX_LISTS:
        if key in flat:
            deep = next(smaller[k] for k in smaller if base(k) in DEPTHS)
            smaller[key] = [i for i in flat[key] if i < deep - 1]
    if narrow:
        if is_count(flat.get("num_heads")):
            smaller["num_heads"] = min(6, flat["num_heads"])
        heads = {entry(k): v for k, v in smaller.items() if base(k) in HEADS}
        for key, value in flat.items():
            at = heads.get(entry(key), heads.get("0", heads.get("")))
            if base(key) in WIDTHS and is_count(value) and at:
                smaller[key] = HEAD_DIM if base(key) == "base_dims" else HEAD_DIM * at
    return smaller
