"""Two models side by side: shape, parameters, config, and every tensor's bytes. No torch; pieces of tensors are read
and compared one after the other, so memory does not grow with the models.

Layers are matched by where they come from: when surgery.json says that one model was cut from the other (by the SHA-256
of its files), or both from the same source, layer 4 of B may be layer 9 of A. Otherwise they are matched by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import isfinite, prod, sqrt
from typing import Any

import numpy as np

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.digests import sha256
from leansurgeon.checkpoints.reshaped import within_block
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import RAW, Entry, to_float32
from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.shape import Shape

PIECE = 1 << 22  # values that are compared at once
FLOATING = ("F64", "F32", "F16", "BF16")


class Absent:
    """In place of the value of a key that one of two configs lacks."""


ABSENT = Absent()


@dataclass(frozen=True)
class Compared:
    """One tensor of both models. `state` is `same` (dtype, sizes and every bit), `changed` (`change` is the relative
    norm |B - A| / |A|, None where it is no finite number), `other shape`, `only in A` or `only in B`. `layer_a` and
    `layer_b` count through all stages; None outside the blocks.
    """

    name: str
    name_a: str | None
    name_b: str | None
    role: str
    layer_a: int | None
    layer_b: int | None
    state: str
    change: float | None = None
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    dtype_a: str | None = None
    dtype_b: str | None = None


@dataclass(frozen=True)
class Diff:
    a: Source
    b: Source
    layers: tuple[tuple[int, int], ...]  # pairs of layers that are compared
    how: str  # why these
    config: tuple[tuple[str, Any, Any], ...]  # key, value in A, value in B; ABSENT where there is none
    tensors: tuple[Compared, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of tensors in each state."""
        return dict(Counter(tensor.state for tensor in self.tensors))

    def as_dict(self) -> JsonObject:
        """The comparison as the JSON document that `diff --json` prints."""
        return {
            "a": side(self.a),
            "b": side(self.b),
            "layers": [list(pair) for pair in self.layers],
            "layers_matched": self.how,
            "config": [
                {"key": key} | {x: value for x, value in (("a", a), ("b", b)) if value is not ABSENT}
                for key, a, b in self.config
            ],
            "counts": self.counts,
            "tensors": [{k: v for k, v in asdict(t).items() if v is not None} for t in self.tensors],
        }


def side(source: Source) -> JsonObject:
    """One of the two models, as the JSON document describes it."""
    return {
        "name": source.name,
        "kind": source.kind,
        "family": source.architecture.name,
        "shape": source.shape.as_dict(),
        "parameters": source.parameters.as_dict(),
    }


def diff(a: Source, b: Source) -> Diff:
    """Compare two opened sources; those without weights (presets) only by shape and config."""
    layers, how = matched(a, b)
    tensors = tuple(compared(a, b, dict(layers))) if a.weights and b.weights else ()
    return Diff(a, b, layers, how, tuple(differing(a.config, b.config)), tensors)


# -- which layer is which --------------------------------------------------------------------------


def matched(a: Source, b: Source) -> tuple[tuple[tuple[int, int], ...], str]:
    """Pairs of layers, and what says so."""
    all_a, all_b = (tuple(range(s.shape.depth)) for s in (a, b))
    kept_a, kept_b = origins(a), origins(b)
    if kept_b and cut_from(b, a):
        return pairs(all_a, kept_b), "B's surgery.json: B was cut from A"
    if kept_a and cut_from(a, b):
        return pairs(kept_a, all_b), "A's surgery.json: A was cut from B"
    if kept_a and kept_b and hashes(a) and hashes(a) == hashes(b):
        return pairs(kept_a, kept_b), "both surgery.json: A and B were cut from the same source"
    return by_number(a.shape, b.shape), "by number"


def origins(source: Source) -> tuple[int, ...] | None:
    """The layers of its own source that a model's layers come from, by its surgery.json."""
    layers = source.record.plan.layers if source.record else ()
    return layers if layers and len(layers) == source.shape.depth else None


def hashes(source: Source) -> set[str]:
    """SHA-256 of the files that surgery.json names as the source."""
    return set(source.record.source.sha256.values()) if source.record else set()


def cut_from(result: Source, source: Source) -> bool:
    """Whether `result` records the SHA-256 of just the files that `source` has."""
    recorded = hashes(result)
    return bool(recorded) and len(recorded) == len(source.files) and recorded == {sha256(f) for f in source.files}


def pairs(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Layers of both that come from the same layer."""
    return tuple((a.index(origin), j) for j, origin in enumerate(b) if origin in a)


def by_number(a: Shape, b: Shape) -> tuple[tuple[int, int], ...]:
    """Layer i of every stage with layer i of the same stage."""
    stages = zip(a.spans, b.spans, strict=False)
    return tuple(layers for one, other in stages for layers in zip(one, other, strict=False))


# -- tensors ---------------------------------------------------------------------------------------


def compared(a: Source, b: Source, layers: dict[int, int]) -> Iterator[Compared]:
    """Every tensor of both, in the order of B, then what only A has."""
    have = {key: spec for spec in a.specs if (key := place(spec, a, layers)) is not None}
    lost = [spec for spec in a.specs if place(spec, a, layers) is None]
    stay = {i: i for i in range(b.shape.depth)}
    for spec in b.specs:
        key = place(spec, b, stay)
        yield compare(a, have.pop(key, None), b, spec, bare(spec, b))
    for spec in [*have.values(), *lost]:
        yield compare(a, spec, b, None, bare(spec, a))


def place(spec: TensorSpec, source: Source, layers: dict[int, int]) -> tuple[int | None, str] | None:
    """What tells a tensor in both models: its layer as B counts, and its name within the block or behind the prefix of
    the class. None in a layer that B does not have.
    """
    if spec.layer is None:
        return None, bare(spec, source)
    return (layers[spec.layer], bare(spec, source)) if spec.layer in layers else None


def bare(spec: TensorSpec, source: Source) -> str:
    """A tensor's name without that of its block, or without the prefix of the model's class."""
    if spec.layer is not None:
        return within_block(spec, source.architecture)
    prefix = max((p for p in source.architecture.prefixes if spec.name.startswith(p)), key=len, default="")
    return spec.name.removeprefix(prefix)


def compare(a: Source, spec_a: TensorSpec | None, b: Source, spec_b: TensorSpec | None, name: str) -> Compared:
    """One tensor of A beside its counterpart in B; either may be absent, not both."""
    one = a.weights.entries[spec_a.name] if spec_a else None
    other = b.weights.entries[spec_b.name] if spec_b else None
    state, change = "only in B" if one is None else "only in A", None
    if one is not None and other is not None:
        state, change = values(one, other)
    return Compared(
        name,
        spec_a and spec_a.name,
        spec_b and spec_b.name,
        (spec_b or spec_a).role,
        spec_a.layer if spec_a else None,
        spec_b.layer if spec_b else None,
        state,
        change,
        one and one.shape,
        other and other.shape,
        one and one.dtype,
        other and other.dtype,
    )


def values(a: Entry, b: Entry) -> tuple[str, float | None]:
    """The state of two tensors that stand at the same place, and the relative norm of the change."""
    if a.shape != b.shape:
        return "other shape", None
    if a.dtype == b.dtype and all(same_bits(x, y) for x, y in zip(pieces(a), pieces(b), strict=True)):
        return "same", None
    return "changed", relative(a, b)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays of one shape and dtype are equal byte for byte, NaN included."""
    return np.array_equal(x.view(np.uint8), y.view(np.uint8))


def relative(a: Entry, b: Entry) -> float | None:
    """||B - A|| / ||A|| of two tensors of one shape, read piece by piece."""
    moved, size = 0.0, 0.0
    for x, y in zip(pieces(a), pieces(b), strict=True):
        u, v = wide(x, a.dtype), wide(y, b.dtype)
        moved, size = moved + float(np.square(v - u).sum()), size + float(np.square(u).sum())
    return ratio(moved, size)


def ratio(moved: float, size: float) -> float | None:
    """Root of `moved / size` (sums of squares); None where it is not finite."""
    share = sqrt(moved / size) if size and moved >= 0 else 0.0 if not moved else float("inf")
    return share if isfinite(share) else None


def wide(raw: np.ndarray, dtype: str) -> np.ndarray:
    """Values as fp64; integers and fp8 bits count as whole numbers."""
    return (to_float32(raw, dtype) if dtype in FLOATING and dtype != "F64" else raw).astype(np.float64)


def pieces(entry: Entry) -> Iterator[np.ndarray]:
    """The bits of a tensor, some at a time."""
    left = prod(entry.shape)
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        while left:
            piece = np.fromfile(file, RAW[entry.dtype], min(PIECE, left))
            left -= len(piece)
            yield piece
            if not len(piece):
                return


# -- config ----------------------------------------------------------------------------------------


def differing(a: Json | Absent, b: Json | Absent, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Config keys whose values differ, nested ones with dots."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differing(a.get(key, ABSENT), b.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif a is not b and (a is ABSENT or b is ABSENT or a != b):
        yield path, a, b
