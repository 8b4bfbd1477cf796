"""Parts of a declaration: tensors with roles and axes, the sizes that follow from a config, what models accept.

`families/__init__.py` explains how to write them, `base.py` what they mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from leansurgeon.errors import UnsupportedModel
from leansurgeon.shape import ParameterCount, Stage

Config = dict[str, Any]
POSITIONS = ("max_position_embeddings", "n_positions", "block_size")  # keys for the number of positions

QK_NORMS = ("qk_norm", "qk_norm_all")  # over the entries of a head; over the channels of all heads
PARTS = {
    "embedding": "embeddings",
    **dict.fromkeys(("q", "k", "v", "qk", "qkv", "vkq", "o", *QK_NORMS, "other_attention"), "attention"),
    **dict.fromkeys(("head_param", "head_mix"), "attention"),
    **dict.fromkeys(("up", "gate", "down", "other_mlp"), "mlp"),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor template.

    `when` names a config key that must be true (with `!`, false; or `key=16`) for the tensor to exist. `only` limits it
    to the "first" layer of a stage, or to the "others". `new` is the value of new entries that the library does not
    draw at random. In a block with several attentions or MLPs, `group` says which one the tensor belongs to: each has
    its own heads and units.
    """

    name: str
    role: str
    axes: tuple[str, ...]
    when: str = ""
    only: str = ""
    new: float | None = None
    group: int = 0
    layers: tuple[int, ...] | None = None  # the layers of a stage that have it, if kinds of layers alternate

    def in_layer(self, index: int) -> bool:
        """Return whether layer `index` of a stage has this tensor."""
        if self.layers is not None:
            return index in self.layers
        return self.only != ("first" if index else "others")


@dataclass(frozen=True)
class Keys:
    """The config key of each number of the shape.

    `mlp_ratio` is set if the library stores a ratio instead of a width, `one_ratio` if it is one number for all stages.
    `width_grows` is the growth of the width from stage to stage if the config holds only the first. `depth_like` is the
    key that applies if a config omits the depth.
    """

    depth: str
    heads: str  # empty if the library has no number of heads
    width: str
    mlp_dim: str | None = None
    mlp_ratio: str | None = None
    head_dim: str | None = None
    kv_heads: str | None = None
    mlp_default: int = 4
    one_ratio: bool = False
    width_grows: int = 1
    whole_ratio: bool = False  # the library accepts integers only
    depth_like: str | None = None


@dataclass(frozen=True)
class Blocks:
    """The blocks of one stage: prefix of their tensor names, tensors, and paths of the built output projections.

    The prefix has `{i}` for the layer and `{s}` for the stage. `keys` is set if the stage has config keys of its own (a
    decoder beside an encoder); `when` is the switch of a stage that some models of the family lack.
    """

    layer: str
    block: tuple[Tensor, ...]
    projection: tuple[str, ...]
    keys: Keys | None = None
    when: str = ""

    def in_step(self, group: int) -> bool:
        """Return whether all layers must keep the same heads.

        That is the case if head h of every layer reads one column of a table in the first layer (T5's relative
        positions).
        """
        return any(t.only == "first" and t.role == "head_param" and t.group == group for t in self.block)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one model: its full name, role, axes and sizes.

    `layer` counts through all stages and is None outside the blocks; `index` counts within the stage.
    """

    name: str
    role: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    layer: int | None = None
    stage: int = 0
    index: int = 0
    new: float | None = None
    group: int = 0

    @property
    def part(self) -> str:
        """The part of the model that it is counted in."""
        return PARTS.get(self.role, "rest")

    @property
    def size(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    @property
    def counted(self) -> bool:
        """Whether it is a parameter of its own."""
        return self.role not in ("tied", "buffer")


def count_parameters(specs: Iterable[TensorSpec]) -> ParameterCount:
    """Count parameters by part of the model; tied tensors and buffers are not counted."""
    parts = dict.fromkeys(("embeddings", "attention", "mlp", "rest"), 0)
    for spec in specs:
        if spec.counted:
            parts[spec.part] += spec.size
    return ParameterCount(**parts)


def exists(when: str, config: Config) -> bool:
    """Return whether the config enables a tensor (a stage, a variant of a family); `when` as in `Tensor`."""
    if not when:
        return True
    key, equals, value = when.partition("=")
    if equals:
        return str(config.get(key)) == value
    return bool(config.get(when.lstrip("!"))) != when.startswith("!")


def stage_sizes(stage: Stage) -> dict[str, int]:
    """Return the size of every axis that follows from the shape of a stage."""
    return {
        **{"width": stage.width, "mlp": stage.mlp_dim, "heads": stage.heads, "head_dim": stage.head_dim},
        **{"q": stage.inner, "kv": stage.kv_heads * stage.head_dim, "qkv": 3 * stage.head_dim},
    }


def axis_size(axis: str, dims: Mapping[str, int]) -> int:
    """Return the size of one axis: the sum of its stacked parts, each a product of factors."""
    return sum(prod(int(f) if f.isdigit() else dims[f] for f in part.split("*")) for part in axis.split("+"))


def sizes_of(axes: Iterable[str], dims: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of a tensor's axes. Raises `UnsupportedModel` for one that the config does not give."""
    try:
        return tuple(axis_size(axis, dims) for axis in axes)
    except KeyError as error:
        raise UnsupportedModel(
            f"The config does not say the size of '{error.args[0]}'.", "Is config.json complete?"
        ) from None


def layer_number_pattern(layer: str) -> re.Pattern[str]:
    """Return a regular expression for the layer prefix of a tensor name, with the layer number as first group."""
    return re.compile(re.escape(layer).replace(r"\{i\}", r"(\d+)"))


# Constants that older libraries saved with the weights; today they are computed, so they are left out.
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "rotary_emb.inv_freq",
    "position_ids",
    "embeddings.token_type_ids",
)


def read_key(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a config key, None if there is none.

    `depths.2` is an entry of a list (`depth.0.1` of a list in a list), and `=64` is the number 64, for a number that
    the library does not store.
    """
    if key.startswith("="):
        return int(key[1:])
    if key in config:
        return config[key]
    name, *places = key.split(".")
    value = config.get(name)
    for place in map(int, places):
        if not isinstance(value, list | tuple) or place >= len(value):
            return None
        value = value[place]
    return value


def write_key(config: Config, key: str, value: Any) -> None:
    """Set what `read_key` reads. Lists are replaced by changed copies; `=64` sets nothing."""
    name, *places = key.split(".")
    if key in config or not places:
        config |= {} if key.startswith("=") else {key: value}
        return

    def with_entry(entry: Any, rest: Sequence[int]) -> Any:
        return [with_entry(v, rest[1:]) if i == rest[0] else v for i, v in enumerate(entry)] if rest else value

    config[name] = with_entry(config[name], [int(place) for place in places])


def is_count(value: object) -> bool:
    """Return whether a value is a positive integer (True is not)."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def like(old: Any, new: Any) -> Any:
    """Return a number in the type of the old one: libraries may require 5.0 where 4.0 stood."""
    return float(new) if isinstance(old, float) and isinstance(new, int) else new


def exact_ratio(mlp_dim: int, width: int) -> float | int:
    """Return a ratio r with int(width * r) == mlp_dim; rounding is checked, because libraries truncate."""
    if mlp_dim % width == 0:
        return mlp_dim // width
    ratio = mlp_dim / width
    return ratio if int(width * ratio) == mlp_dim else (mlp_dim + 0.5) / width


# -- facts of a family beyond its tensors ---------------------------------------------------------------


@dataclass(frozen=True)
class Takes:
    """What the models of a family accept, if the common config keys do not say it.

    `special_tokens` are added to the patches of an image (class, distillation, registers); `any_image_size` means that
    positions are interpolated to the image. For text, `skipped_positions` are never used, `only_tokens` is the only
    length that a model accepts (None: any), and `second_text` is the config key of a model that reads two texts.
    """

    special_tokens: Callable[[Config], int] = lambda config: 0
    any_image_size: bool = False
    skipped_positions: Callable[[Config], int] = lambda config: 0
    only_tokens: Callable[[Config], int | None] = lambda config: None
    second_text: str = ""

    def most_tokens(self, config: Config) -> int | None:
        """Return the largest number of text tokens that a model has positions for; None if there is no limit."""
        lengths = [config[key] for key in POSITIONS if isinstance(config.get(key), int) and config[key] > 0]
        return min(lengths) - self.skipped_positions(config) if lengths else None


def scale_by_key(config: Config) -> float | None:
    """Return the factor that a config key sets instead of 1/sqrt(head_dim); None if no key does."""
    if config.get("attention_multiplier") is not None:
        return float(config["attention_multiplier"])
    if config.get("query_pre_attn_scalar") is not None:
        return float(config["query_pre_attn_scalar"] ** -0.5)
    return None
