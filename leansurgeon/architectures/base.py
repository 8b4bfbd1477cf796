"""A model family as data: the role of every tensor, and the config key of every number.

A family is one `Architecture`: a list of tensor templates, each with a *role* and *axes*. Everything else follows from
it: parameter counts without torch, the check of a config against its weights, and surgery, which only needs to know
how each axis changes.

A template gives the name in the library's state dict, the role and the axes. `families/` holds templates as lines of
text and explains how to add a family:

    embeddings.cls_token  embedding  1,1,width

Axes, one word per dimension, `+` between parts that are stacked along it:

    width  embedding dimension      q   heads * head_dim       kv  kv_heads * head_dim      mlp  feed-forward width
    heads, head_dim                 any key of `sizes` (vocab, positions, ...), or a plain integer
    heads*81  81 entries per head, ordered by head; heads*qkv  q, k and v of each head in turn (GPT-NeoX)

A family with several stages (pyramids such as DaViT) has lists in its config where others have numbers. Either all
stages are alike and `{s}` in `layer` is the stage number, or `stages` holds one `Blocks` each. Outside the blocks the
axes `width0`, `width1`, ... are the widths of the stages, and `width` is that of the last one. An encoder and a decoder
are two stages as well, whose `Blocks` name config keys of their own (T5, BART).

Roles: `q k v qkv o` attention, `up gate down` feed-forward, `head_param` other per-head parameters, `qk_norm` (over the
entries of a head), `qk_norm_all` (over the channels of all heads, so the number of heads must stay), `norm`,
`embedding`, `head` (task head, pooler), `tied` (a second copy of a tensor), `buffer` (saved, but not a parameter). `qk`
is q and k stacked; `vkq` is a stack whose first part acts as values, whatever the library calls it; `head_mix` mixes
heads (rows are outputs); `other_attention` and `other_mlp` are parts that surgery leaves alone (class attention). Names
are those of the tensors in the file (transformers renames some of them while loading).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leansurgeon.architectures.foreign import UNFIT, rules_of
from leansurgeon.architectures.limits import ALL_HEADS, follow_layers, move_taps, of_layers
from leansurgeon.architectures.tensors import (
    Blocks,
    Config,
    Keys,
    Takes,
    Tensor,
    TensorSpec,
    count_parameters,
    exact_ratio,
    exists,
    is_count,
    like,
    read_key,
    scale_by_key,
    sizes_of,
    stage_sizes,
    write_key,
)
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import ParameterCount, Shape, Stage, divisors_near, nearest_divisible


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The declaration of one model family.

    `head_dim` None in `keys` means that the library derives it from width // heads; `keep` then needs another family
    that can store it, named by `decoupled`. `projection` is the path of the output projection in the *built* model,
    with `{i}` for the layer (a tuple if a block has several).
    """

    name: str
    library: str  # transformers, timm, or leansurgeon (our modelling file travels with the checkpoint)
    model_types: tuple[str, ...]
    when: str = ""  # config key that selects this variant among families of one type (`!`: if false)
    keys: Keys
    layer: str = ""
    block: tuple[Tensor, ...] = ()
    outer: tuple[Tensor, ...]
    projection: str | tuple[str, ...] = ""
    stages: tuple[Blocks, ...] = ()  # replaces layer, block and projection if stages differ
    # Position of the norms: "pre" attention and MLP; "post", after the residual sum; "behind" each part, before the sum
    # (OLMo2); "around" each part, both before and after it (Gemma 2 and 3, GLM-4).
    norm: str
    causal: bool = False  # tokens attend only to earlier ones, whatever the head
    positions: str = "learned"  # learned, rope, rope-2d (head_dim is a multiple of four), relative or none
    skipped_positions: int = 0  # as in `Takes`, for undeclared families
    rotates_when: str = ""  # config key that turns rotary positions on, if `positions` does not say so
    prefixes: tuple[str, ...] = ("",)
    sizes: Mapping[str, str | Callable[[Config], int]] = field(default_factory=dict)
    may_be_zero: tuple[str, ...] = ("num_classes",)  # config keys of `sizes`; 0 in timm's models without a classifier
    # Standard deviation of new weights: a config key, a number, a rule, or a rule per role ("" for the others).
    init_std: str | float | Callable[[Config], float] | Mapping[str, Callable[[Config], float]] = "initializer_range"
    decoupled: str | None = None
    # Tensors outside the blocks that published files hold and a class does not read: class ending -> prefixes.
    unused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # name patterns that the library skips (multi-token prediction)
    renames: Mapping[str, str] = field(default_factory=dict)  # old name endings -> today's endings
    depends_on_index: tuple[str, ...] = ()  # config keys that make a layer's computation depend on its index
    tied: tuple[str, ...] = ()  # copies of the embedding in old files; not counted twice
    tied_when: str = "tie_word_embeddings"  # config key or switch that says so
    masked_head: tuple[str, ...] = ()  # modules of a ForMaskedLM that turn the last hidden states into logits
    ties_new: bool = False  # new models always tie output and embedding, whatever the config says
    modelling: str | None = None  # file in models/ that travels with the checkpoint
    code: Path | None = None  # a checkpoint whose own modelling file replaces it, as the user allowed
    classes: Mapping[str, str] = field(default_factory=dict)  # class of the source family -> class of this one
    # Config keys that a file may omit although `when` or `sizes` reads them; names for `when` derived from several
    # keys.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    per_layer: tuple[str, ...] = ()  # config lists with one entry per layer, reduced to the kept layers
    forget: tuple[str, ...] = ()  # config keys that the library derives from the depth; not written
    heads_divide_width: bool = False  # the library requires width % heads == 0 although it stores head_dim
    per_head_divides: bool = True  # False: the library floors width / heads (Tiny-Stories GPT)
    # Numbers that the library's constructor also passes to parts that surgery leaves alone (class attention). If they
    # change, the result belongs to the `decoupled` family; it always does if the library cannot rebuild from its
    # config.
    shared: tuple[str, ...] = ()
    class_keys: Mapping[str, str] = field(default_factory=dict)  # config keys of class attention -> field of the shape
    unknown: tuple[str, ...] = ()  # config flags that the form with its own head_dim does not support
    class_follows: bool = False  # whether class attention has the blocks' heads (`surgery.class_attention`)
    rebuilds: bool = True
    period: int = 1  # length of a cycle of alternating layers (shifted windows): whole cycles are dropped
    adopt: Callable[[Config], Config] | None = None  # converts a config of the source's family to this one
    timm: Any = None  # how to read timm's models of this family: `timm_models.TimmModels`
    takes: Takes = field(default_factory=Takes)
    # Factor of q . k before the softmax; None for the library's 1/sqrt(head_dim).
    score_scale: Callable[[Config], float | None] = scale_by_key
    # Whether every block is full attention between all tokens and an MLP on each, so that FLOPs follow from its
    # tensors.
    plain: bool = True
    # Why its heads are not independent, or cannot have another size; worded to follow the family's name.
    heads_entangled: str = ""
    heads_unsplittable: str = ""
    # The pairs that may be expressed in another basis of each head, unless roles say otherwise.
    bases: str = "qkvo"
    # Numbers of the shape that must not change (`depth`, `heads`, `mlp_dim`), and why ("its slopes depend on them").
    refused: Mapping[str, str] = field(default_factory=dict)
    # For undeclared families (`infer/`): `uneven` layers of several kinds, so a result has exactly the tensors of the
    # layers it keeps; config keys that count the first layers of a kind or list layers by index; and what was proven.
    uneven: bool = False
    counters: tuple[str, ...] = ()
    index_lists: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    section: str = ""  # part of the config that describes this tower
    taps: tuple[str, ...] = ()  # config keys (own or the whole model's) for the layers whose outputs are read elsewhere
    stay: tuple[int, ...] = ()  # number of first layers per stage that must stay, because others address them
    stay_last: tuple[int, ...] = ()  # number of last layers that must stay, which the library treats differently

    # -- reading ---------------------------------------------------------------------------------

    def flat(self, config: Config) -> Config:
        """Return the keys of the model itself (timm keeps them in `model_args`)."""
        place = self.section or ("model_args" if self.library == "timm" else "")
        return config.setdefault(place, {}) if place else config

    @property
    def stores_head_dim(self) -> bool:
        return self.keys.head_dim is not None

    def fill_config(self, config: Config) -> Config:
        """Return the config's keys with the defaults of those that a file may omit, and the `switches`."""
        c = {**self.defaults, **self.flat(config)}
        with rules_of(self.name):
            return c | {key: rule(c) for key, rule in self.switches.items()}

    def refusals(self, *, keeps: bool = True) -> dict[str, str]:
        """Return what must not change, and why: the `refused` numbers, and what the roles of tensors imply.

        The latter applies only if the result `keeps` what the model has learned.
        """
        tensors = [*self.block, *(tensor for stage in self.stages for tensor in stage.block)]
        over_all = keeps and any(tensor.role == "qk_norm_all" for tensor in tensors)
        return ({"heads": ALL_HEADS} if over_all else {}) | dict(self.refused)

    def lists(self, config: Config) -> Config:
        """Return the values of the `per_layer` keys, by the family's rule if a file omits one."""
        c, rules = self.flat(config), self.defaults
        with rules_of(self.name):
            return {key: c.get(key) or (rules[key](c) if callable(rules.get(key)) else None) for key in self.per_layer}

    def blocks(self, stage: int = 0) -> Blocks:
        """Return the blocks of a stage, with its number filled in."""
        if self.stages:
            return self.stages[stage]
        paths = (self.projection,) if isinstance(self.projection, str) else self.projection
        layer, *paths = (path.replace("{s}", str(stage)) for path in (self.layer, *paths))
        return Blocks(layer, self.block, tuple(paths))

    def shape(self, config: Config) -> Shape:
        """Return the shape that a config describes, with one stage unless its depth is a list."""
        c = self.flat(config)
        apart = self._keys_apart(config)
        for keys in apart or (self.keys,):
            depth = keys.depth_like if read_key(c, keys.depth) is None and keys.depth_like else keys.depth
            needed = (keys.width, keys.heads or keys.width, depth)
            missing = next((key for key in needed if key not in c and read_key(c, key) is None), None)
            if missing:
                said = f"The config of this {self.name} model has no '{missing}'."
                raise UnsupportedModel(said, "Is config.json complete?")
        if apart:
            return Shape(tuple(read_stage(c, keys) for keys in apart))
        several = isinstance(c[self.keys.depth], list | tuple)
        count = len(c[self.keys.depth]) if several else 1
        if not count or (self.stages and count != len(self.stages)):
            raise UnsupportedModel(f"The config names {count} stages, and {self.name} has {len(self.stages) or 1}.")
        return Shape(tuple(read_stage(c, self.keys, s, count if several else None) for s in range(count)))

    def _keys_apart(self, config: Config) -> tuple[Keys, ...]:
        """Return the keys of every stage of this model if stages have their own keys, else an empty tuple."""
        apart = [blocks for blocks in self.stages if blocks.keys]
        filled = self.fill_config(config) if apart else {}
        return tuple(blocks.keys for blocks in apart if exists(blocks.when, filled))

    # -- writing ---------------------------------------------------------------------------------

    def with_shape(self, config: Config, shape: Shape, layers: Sequence[int] | None = None) -> Config:
        """Return a copy of a config of this family that describes `shape`, with these `layers` of the source."""
        config = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
        c, apart = self.flat(config), self._keys_apart(config)
        before = self.shape(config)
        depth = before.stages[0].depth
        several = isinstance(c.get(self.keys.depth), list | tuple)
        lists = self.lists(config)  # written in full, even if left to a rule, which would be wrong for the kept layers
        for stage in shape.stages:
            if self.keys.head_dim:
                if self.heads_divide_width and stage.width % stage.heads:
                    near = divisors_near(stage.width, stage.heads)
                    raise UsageError(
                        f"{stage.width} is not divisible by {stage.heads} heads, and transformers refuses such a "
                        f"{self.name} config; nearest: {near}."
                    )
            elif not self._natural(stage):
                raise UsageError(self.why_not_decoupled(stage))
        parts = [(self.keys, shape, several)]
        if apart:
            parts = [(keys, Shape((stage,)), False) for keys, stage in zip(apart, shape.stages, strict=True)]
        written = {}
        for keys, part, lists_stages in parts:
            for key, value in self._numbers(keys, part, lists_stages).items():
                if written.setdefault(key, value) != value:
                    every = "all stages" if len(apart) > 2 else "encoder and decoder"
                    said = f"{self.name} has one {key} for {every}; it cannot hold {written[key]} and {value}."
                    raise UsageError(said, "Give numbers that fit one.")
        for key, value in written.items():
            write_key(c, key, like(read_key(c, key), value))
        if self.class_follows:
            c.update({key: getattr(shape.stages[-1], name) for key, name in self.class_keys.items()})
        if not self.keys.head_dim and "heads" not in self.refused:
            c.pop("head_dim", None)  # the library's attention ignores it, but some rotary embeddings read it
        for key, values in lists.items():
            if values:
                spans = [*zip(before.spans, shape.stages, strict=True), (range(before.depth), shape)]
                span, now = next((pair for pair in spans if len(values) == len(pair[0])), spans[-1])
                here = range(now.depth) if layers is None else [i - span.start for i in layers if i in span]
                c[key] = of_layers(key, values, here)
        if layers is not None:
            c.update(follow_layers(c, self.counters, self.index_lists, list(layers), depth))
        move_taps(self.taps, (c, config), layers, shape.stages[0].depth if layers is None else depth)
        for key in self.forget:
            c.pop(key, None)
        return config

    def _numbers(self, keys: Keys, shape: Shape, several: bool) -> Config:
        """Return the values under `keys` for this shape: numbers, or lists if the config stores `several` stages so."""
        config = {}
        for name in ("depth", "heads", "head_dim", "kv_heads", "mlp_dim"):
            if key := getattr(keys, name):
                numbers = [getattr(stage, name) for stage in shape.stages]
                config[key] = numbers if several else numbers[0]
        if keys.mlp_dim:
            return config
        if keys.mlp_ratio and (keys.one_ratio or not several):
            config[keys.mlp_ratio] = self._one_ratio(shape)
        elif keys.mlp_ratio:
            config[keys.mlp_ratio] = [exact_ratio(stage.mlp_dim, stage.width) for stage in shape.stages]
        elif stage := next((s for s in shape.stages if s.mlp_dim != int(s.width * keys.mlp_default)), None):
            raise UsageError(
                f"{self.name} fixes the MLP at {keys.mlp_default} x width; its config cannot hold {stage.mlp_dim}."
            )
        return config

    def _natural(self, stage: Stage) -> bool:
        """Return whether the library itself would derive this head_dim."""
        divides = not self.per_head_divides or stage.width % stage.heads == 0
        return divides and stage.head_dim == stage.width // stage.heads

    def _one_ratio(self, shape: Shape) -> float | int:
        first = shape.stages[0]
        ratio = exact_ratio(first.mlp_dim, first.width)
        if self.keys.whole_ratio and not isinstance(ratio, int):
            near = nearest_divisible(first.mlp_dim, first.width)
            raise UsageError(
                f"{self.name} has an MLP of a whole number of widths, and {first.mlp_dim} is none of "
                f"{first.width}; nearest: {near}."
            )
        if any(int(stage.width * ratio) != stage.mlp_dim for stage in shape.stages):
            dims = ", ".join(str(stage.mlp_dim) for stage in shape.stages)
            raise UsageError(f"{self.name} has one MLP ratio for all stages; it cannot hold {dims}.")
        return ratio

    def holds(self, now: Shape, shape: Shape) -> bool:
        """Return whether a model of shape `now` can become one of `shape` within this family."""
        if not self.rebuilds:
            return False
        pairs = list(zip(now.stages, shape.stages, strict=True))
        if any(getattr(a, name) != getattr(b, name) for name in self.shared for a, b in pairs):
            return False
        if self.keys.one_ratio:
            try:
                self._one_ratio(shape)
            except UsageError:
                return False
        return self.stores_head_dim or all(self._natural(stage) for stage in shape.stages)

    def why_not_decoupled(self, stage: Stage) -> str:
        near = divisors_near(stage.width, stage.heads)
        if stage.width % stage.heads:
            return (
                f"{stage.width} is not divisible by {stage.heads} heads, and {self.name} has no head_dim of its own; "
                f"nearest: {near}."
            )
        natural = stage.width // stage.heads
        return f"{self.name} derives head_dim from width // heads = {natural}; it cannot hold {stage.head_dim}."

    def std(self, config: Config, role: str = "") -> float | None:
        """Return the standard deviation of new weights by the library's rule; None if the config does not give it."""
        rule = self.init_std
        if isinstance(rule, Mapping):
            rule = rule.get(role) or rule[""]
        with rules_of(self.name):
            return rule if isinstance(rule, float) else rule(config) if callable(rule) else config.get(rule)

    def dims(self, config: Config, shape: Shape, stage: int = -1) -> dict[str, int]:
        """Return the size of every axis name in a stage."""
        c, at = self.fill_config(config), shape.stages[stage]
        dims = stage_sizes(at) | {f"width{s}": other.width for s, other in enumerate(shape.stages)}
        for name, source in self.sizes.items():
            try:
                value = source(c) if callable(source) else c.get(source)
            except UNFIT:
                raise UnsupportedModel(f"The config's numbers do not give the size of '{name}'.") from None
            key = name if callable(source) else source
            if isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1]:  # the sides of a patch
                value = value[0]
            if isinstance(value, list | tuple):
                if len(value) != len(shape.stages):
                    raise UnsupportedModel(f"The config says {key} = {value!r} for {len(shape.stages)} stages.")
                value = value[stage]
            if value is not None and not is_count(value) and not (value == 0 and source in self.may_be_zero):
                raise UnsupportedModel(f"The config says {key} = {value!r}, which is not a positive whole number.")
            dims |= {} if value is None else {name: value}
        return dims

    def tensors(self, config: Config, shape: Shape | None = None, prefix: str | None = None) -> Iterator[TensorSpec]:
        """Yield every declared tensor of a model with this config, with shapes as in the file, e.g. `(q, width)`."""
        shape = shape or self.shape(config)
        prefix = self.prefixes[0] if prefix is None else prefix
        dims, c = self.dims(config, shape), self.fill_config(config)
        for t in self.outer:
            if exists(t.when, c):
                # A leading "/" marks a tensor outside the base model (task heads), which never has the prefix.
                name = t.name[1:] if t.name.startswith("/") else prefix + t.name
                yield TensorSpec(name, t.role, t.axes, sizes_of(t.axes, dims), group=t.group)
        layer = 0
        for s, stage in enumerate(shape.stages):
            blocks, dims = self.blocks(s), self.dims(config, shape, s)
            present = [(t, sizes_of(t.axes, dims)) for t in blocks.block if exists(t.when, c)]
            for i in range(stage.depth):
                start = prefix + blocks.layer.format(i=i)
                for t, sizes in present:
                    if t.in_layer(i):
                        yield TensorSpec(start + t.name, t.role, t.axes, sizes, layer, s, i, t.new, t.group)
                layer += 1

    def count(self, config: Config, shape: Shape | None = None) -> ParameterCount:
        """Count parameters by part from the declaration alone, without torch."""
        return count_parameters(self.tensors(config, shape))


def read_stage(c: Config, keys: Keys, s: int = 0, count: int | None = None) -> Stage:
    """Read stage `s` from these keys of a config; `count` is the number of stages, None if it holds plain numbers.

    Raises `UnsupportedModel`.
    """

    def value(key: str | None) -> Any:
        entry = read_key(c, key) if key else None
        if not isinstance(entry, list | tuple):
            return entry
        if len(entry) != count:
            raise UnsupportedModel(f"The config says {key} = {entry!r} for {count or 1} stages.")
        return entry[s]

    width, heads = value(keys.width), value(keys.heads) if keys.heads else 1
    depth = value(keys.depth_like if c.get(keys.depth) is None and keys.depth_like else keys.depth)
    some = [(key, value(key)) for key in (keys.head_dim, keys.kv_heads, keys.mlp_dim) if value(key) is not None]
    for key, number in ((keys.width, width), (keys.heads, heads), (keys.depth, depth), *some):
        if not is_count(number):
            raise UnsupportedModel(f"The config says {key} = {number!r}, which is not a positive whole number.")
    width *= keys.width_grows**s
    if not isinstance(ratio := value(keys.mlp_ratio), int | float | None):
        raise UnsupportedModel(f"The config says {keys.mlp_ratio} = {ratio!r}, which is not a number.")
    return Stage(
        depth,
        heads,
        head_dim=value(keys.head_dim) or width // heads,
        kv_heads=value(keys.kv_heads) or heads,
        mlp_dim=value(keys.mlp_dim) or int(width * (keys.mlp_default if ratio is None else ratio)),
        width=width,
    )
