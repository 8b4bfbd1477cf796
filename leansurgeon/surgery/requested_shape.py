"""Resolve command-line options to the shape that a user wants, and a family that can hold it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import isfinite

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.limits import check_allowed
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError
from leansurgeon.shape import Shape, Stage, divisors_near, nearest_divisible
from leansurgeon.surgery.class_attention import following
from leansurgeon.surgery.method import INITS

LARGEST = 10_000_000  # limit for heads, layers and MLP units


@dataclass(frozen=True)
class RequestedShape:
    """What the user requested, as typed. None leaves a number unchanged."""

    heads: str | None = None
    layers: str | None = None
    head_dim: str = "auto"
    mlp_dim: str | None = None
    mlp_ratio: float | str | None = None
    init: str = "transfer"
    class_attention: bool = False  # whether class attention follows the heads of the blocks
    whole_groups: bool = False  # grouped attention changes by whole key/value groups, not by heads within each

    def check(self) -> None:
        """Reject typing mistakes before a source is opened or fetched. Raises `UsageError`."""
        for text, flag in ((self.heads, "--heads"), (self.layers, "--layers"), (self.mlp_dim, "--mlp-dim")):
            for word in (text or "").split(",") if text is not None else []:
                number(word.strip(), None, flag, times=flag == "--heads")
        if self.mlp_ratio is not None:
            ratios_per_stage(self.mlp_ratio, str(self.mlp_ratio).count(",") + 1)
        if self.init not in INITS:
            raise UsageError(f"--init {self.init}: give transfer, fresh or fresh-attention.")


@dataclass(frozen=True)
class Target:
    """The resulting shape, the family that holds it, the chosen head policy, and the reason in one sentence."""

    architecture: Architecture
    shape: Shape
    policy: str
    why: str


def per_stage(text: str | None, old: list[int], flag: str, *, times: bool = False) -> list[int]:
    """Parse `"24"`, `"2x"` or `"16,32,32,32"` into one number per stage."""
    if text is None:
        return old
    words = [w.strip() for w in str(text).split(",")]
    if len(words) == 1:
        words *= len(old)
    if len(words) != len(old):
        present = ",".join(map(str, old))
        raise UsageError(
            f"{flag} {text} names {len(words)} stages, and the model has {len(old)} (now {present}).",
            "Give one number, or one for each stage." if len(old) > 1 else "Give one number.",
        )
    return [number(w, o, flag, times) for w, o in zip(words, old, strict=True)]


def number(word: str, old: int | None, flag: str, times: bool) -> int:
    """Parse one word as a number; `2x` multiplies `old` (None: only the spelling is checked)."""
    try:
        if times and word.lower().endswith("x"):
            value = float(word[:-1]) * (old or 1)
            if not isfinite(value):
                raise ValueError
            if old is None and value > 0:
                return 1
            if value != int(value):
                raise UsageError(f"{flag} {word}: {word[:-1]} x {old} is {value:g}, which is no whole number.")
            value = int(value)
        else:
            value = int(word)
    except ValueError:
        example = "24, 2x or 16,32,32,32" if times else "10 or 4,4,8,2"
        which = flag == "--layers" and re.fullmatch(r"\d+-\d+", word)
        hint = f"It says how many stay; --keep {word} says which (counted from 0)." if which else None
        raise UsageError(f"{flag} {word}: a whole number is needed, such as {example}.", hint) from None
    if value > LARGEST:
        raise UsageError(f"{flag} {word}: more than {LARGEST:,} is no model's size.")
    if value < 1:
        raise UsageError(f"{flag} must be at least 1, and {value} was asked for.")
    return value


def resolve(source: Source, wanted: RequestedShape) -> Target:
    """Resolve and check the requested shape. Raises `UsageError` with the numbers and the nearest possible ones."""
    stages, arch = source.shape.stages, source.architecture
    layers = per_stage(wanted.layers, [s.depth for s in stages], "--layers")
    heads = per_stage(wanted.heads, [s.heads for s in stages], "--heads", times=True)
    if wanted.mlp_dim is not None and wanted.mlp_ratio is not None:
        raise UsageError("mlp_dim and mlp_ratio say the same thing twice; give one of them.")
    mlp = per_stage(wanted.mlp_dim, [s.mlp_dim for s in stages], "--mlp-dim")
    if wanted.mlp_ratio is not None:
        ratios = ratios_per_stage(wanted.mlp_ratio, len(stages))
        if wrong := [ratio for ratio in ratios if ratio <= 0]:
            raise UsageError(f"mlp_ratio must be above 0, and {wrong[0]:g} was asked for.")
        mlp = [round(ratio * s.width) for ratio, s in zip(ratios, stages, strict=True)]
    for new, stage in zip(layers, stages, strict=True):
        if new > stage.depth:
            raise UsageError(
                f"--layers {new} is more than the {stage.depth} layers of {source.name}; shrink only removes layers."
            )
    policy, why = choose_policy(source, wanted.head_dim)
    new_stages = []
    for stage, depth, h, m in zip(stages, layers, heads, mlp, strict=True):
        kv = key_value_heads(stage, h, wanted.whole_groups)
        head_dim = new_head_dim(stage, h, policy, arch)
        new_stages.append(replace(stage, depth=depth, heads=h, head_dim=head_dim, kv_heads=kv, mlp_dim=m))
    shape = Shape(tuple(new_stages))
    keeps = source.weights is not None and wanted.init != "fresh"
    check_allowed(arch.name, arch.refusals(keeps=keeps), source.shape, shape)
    return Target(holder(arch, source.shape, shape), shape, policy, why)


def ratios_per_stage(text: float | str, count: int) -> list[float]:
    """Parse `4`, `"2.5"` or `"2,3,3,3"` into one ratio per stage."""
    words = str(text).split(",")
    if len(words) not in (1, count):
        raise UsageError(f"mlp_ratio {text} names {len(words)} stages, and the model has {count}.")
    try:
        ratios = [float(word) for word in words]
        if not all(isfinite(ratio) for ratio in ratios):
            raise ValueError
    except ValueError:
        raise UsageError(f"mlp_ratio {text}: a number is needed, such as 2, 2.5 or 2,3,3,3.") from None
    return ratios * (count // len(ratios))


def choose_policy(source: Source, asked: str) -> tuple[str, str]:
    """Return keep, split or a number, and a sentence that explains the choice."""
    if asked != "auto":
        if asked not in ("keep", "split") and (not (asked.isascii() and asked.isdecimal()) or int(asked) < 1):
            raise UsageError(f"--head-dim {asked}: give auto, keep, split or a positive whole number.")
        return asked, f"head_dim: {asked}, as asked"
    if source.policy:
        return source.policy, f"head_dim: {source.policy}, the paper's own choice for {source.preset.name}"
    arch = source.architecture
    if arch.stores_head_dim:
        return "keep", f"head_dim: keep, since {arch.library} loads a {arch.name} with a head_dim of its own"
    also = "; --head-dim keep writes a model that needs our modelling file" if arch.decoupled else ""
    if arch.decoupled and (not arch.rebuilds or "heads" in arch.shared):
        return "keep", f"head_dim: keep, since a {arch.name} with other heads needs our modelling file in any case"
    return "split", (
        f"head_dim: split (width // heads), since a {arch.name} of {arch.library} has no head_dim of its own{also}"
    )


def new_head_dim(stage: Stage, heads: int, policy: str, arch: Architecture) -> int:
    """Return head_dim for this number of heads under the policy; raises `UsageError` if it does not divide."""
    if policy == "keep":
        return stage.head_dim
    if policy == "split":
        if heads == stage.heads:
            return stage.head_dim  # nothing to split
        if arch.per_head_divides and stage.width % heads:
            near = divisors_near(stage.width, heads)
            hint = "Or give --head-dim keep." if arch.stores_head_dim or arch.decoupled else None
            raise UsageError(f"{stage.width} is not divisible by {heads} heads; nearest: {near}.", hint)
        if heads > stage.width:
            raise UsageError(f"{heads} heads do not fit a width of {stage.width}.")
        head_dim = stage.width // heads
    else:
        head_dim = int(policy)
    pairs = {"rope": 2, "rope-2d": 4}.get(arch.positions, 1)
    if head_dim % pairs:
        needed = "an even head_dim" if pairs == 2 else f"a head_dim that {pairs} divides"
        raise UsageError(f"Rotary positions need {needed}, and {heads} heads give {head_dim}.")
    return head_dim


def key_value_heads(stage: Stage, heads: int, whole_groups: bool = False) -> int:
    """Return the number of key/value heads. Plain attention: as many as heads. Grouped: as before, so the key/value
    cache does not grow; or with `whole_groups` as many heads per group as before.
    """
    if stage.kv_heads == stage.heads:
        return heads
    if whole_groups and (heads * stage.kv_heads) % stage.heads == 0:
        return heads * stage.kv_heads // stage.heads
    if heads % stage.kv_heads:
        near = nearest_divisible(heads, stage.kv_heads)
        raise UsageError(
            f"{heads} heads cannot share the {stage.kv_heads} key/value heads of this model evenly; nearest: {near}."
        )
    return stage.kv_heads


def holder(arch: Architecture, now: Shape, shape: Shape) -> Architecture:
    """Return the family that can store the shape: the source's own, or its decoupled form."""
    if arch.holds(now, shape):
        return arch
    if arch.decoupled is None:
        stage = next((s for s in shape.stages if s.head_dim != s.width // s.heads), shape.stages[0])
        raise UnsupportedModel(arch.why_not_decoupled(stage), "Use --head-dim split.")
    family = architectures.decoupled_form_of(arch)
    return following(family) if arch.class_follows else family
