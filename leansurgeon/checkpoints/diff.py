"""Compare two models: shape, parameters, config, and every tensor's bytes. Imports no torch.

Tensors are read and compared in chunks, so memory does not grow with the models.

Layers are matched by origin: if surgery.json says that one model was cut from the other (by the SHA-256 of its files),
or both from the same source, layer 4 of B may be layer 9 of A. Otherwise they are matched by number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, prod, sqrt
from typing import Any

import numpy as np

from leansurgeon.architectures.base import TensorSpec
from leansurgeon.checkpoints.digests import sha256
from leansurgeon.checkpoints.reshaped import within_block
from leansurgeon.checkpoints.source import Source
from leansurgeon.checkpoints.weights import FLOATS, RAW, Entry, same_bytes, to_float32
from leansurgeon.reading.jsonfile import Json, JsonObject

PIECE = 1 << 22  # values compared at once


class Absent:
    """Marks a key that one of two configs lacks."""


ABSENT = Absent()


@dataclass(frozen=True)
class Compared:
    """One tensor of both models.

    `state` is `same` (dtype, shape and every bit), `changed`, `other shape`, `only in A` or `only in B`. `change` is
    the relative norm |B - A| / |A| of a changed tensor, None if it is not finite. `layer_a` and `layer_b` count through
    all stages and are None outside the blocks.
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
    layers: tuple[tuple[int, int], ...]  # pairs of layers that were compared
    how: str  # how they were matched
    config: tuple[tuple[str, Any, Any], ...]  # key, value in A, value in B; ABSENT if the key is missing
    tensors: tuple[Compared, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of tensors in each state."""
        return dict(Counter(tensor.state for tensor in self.tensors))

    def as_dict(self) -> JsonObject:
        """Return the comparison as the JSON document that `diff --json` prints."""
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
    """Describe one of the two models for the JSON document."""
    return {
        "name": source.name,
        "kind": source.kind,
        "family": source.architecture.name,
        "shape": source.shape.as_dict(),
        "parameters": source.parameters.as_dict(),
    }


def diff(a: Source, b: Source) -> Diff:
    """Compare two opened sources; presets, which have no weights, only by shape and config."""
    layers, how = match_layers(a, b)
    tensors = []
    if a.weights and b.weights:  # in the order of B, then those that only A has
        match = dict(layers) | {None: None}
        have = {(match[spec.layer], name_within(spec, a)): spec for spec in a.specs if spec.layer in match}
        for spec in b.specs:
            tensors.append(compare_tensor(a, have.pop((spec.layer, name_within(spec, b)), None), b, spec))
        for spec in (*have.values(), *(spec for spec in a.specs if spec.layer not in match)):
            tensors.append(compare_tensor(a, spec, b, None))
    return Diff(a, b, layers, how, tuple(differing(a.config, b.config)), tuple(tensors))


# -- which layer is which --------------------------------------------------------------------------


def match_layers(a: Source, b: Source) -> tuple[tuple[tuple[int, int], ...], str]:
    """Return the matching pairs of layers, and how they were matched."""
    (kept_a, hashes_a), (kept_b, hashes_b) = find_origin(a), find_origin(b)
    if kept_b and is_made_of(a, hashes_b):
        return pair_layers(range(a.shape.depth), kept_b), "B's surgery.json: B was cut from A"
    if kept_a and is_made_of(b, hashes_a):
        return pair_layers(kept_a, range(b.shape.depth)), "A's surgery.json: A was cut from B"
    if kept_a and kept_b and hashes_a and hashes_a == hashes_b:
        return pair_layers(kept_a, kept_b), "both surgery.json: A and B were cut from the same source"
    stages = zip(a.shape.spans, b.shape.spans, strict=False)
    return tuple(layers for one, other in stages for layers in zip(one, other, strict=False)), "by number"


def find_origin(source: Source) -> tuple[Sequence[int], set[str]]:
    """Return which layers of its source a model kept, and the SHA-256 of that source's files, from its surgery.json.

    Both are empty if the record does not say.
    """
    if source.record is None:
        return (), set()
    layers = source.record.plan.layers
    return layers if len(layers) == source.shape.depth else (), set(source.record.source.sha256.values())


def is_made_of(source: Source, hashes: set[str]) -> bool:
    """Return whether the source consists of exactly the files with these SHA-256 digests."""
    return bool(hashes) and len(hashes) == len(source.files) and hashes == {sha256(file) for file in source.files}


def pair_layers(a: Sequence[int], b: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Pair the layers of both models that come from the same layer."""
    return tuple((a.index(origin), j) for j, origin in enumerate(b) if origin in a)


# -- tensors ---------------------------------------------------------------------------------------


def name_within(spec: TensorSpec, source: Source) -> str:
    """Return a tensor's name without its block's or, outside the blocks, without the prefix of the model's class."""
    if spec.layer is not None:
        return within_block(spec, source.architecture)
    prefix = max((p for p in source.architecture.prefixes if spec.name.startswith(p)), key=len, default="")
    return spec.name.removeprefix(prefix)


def compare_tensor(a: Source, spec_a: TensorSpec | None, b: Source, spec_b: TensorSpec | None) -> Compared:
    """Compare one tensor of A with its counterpart in B; either may be missing, but not both."""
    one = spec_a and a.weights.entries[spec_a.name]
    other = spec_b and b.weights.entries[spec_b.name]
    change = None
    if not (one and other):
        state = "only in A" if one else "only in B"
    elif one.shape != other.shape:
        state = "other shape"
    elif same_bytes(one, other):
        state = "same"
    else:
        state, moved, size = "changed", 0.0, 0.0
        for u, v in zip(read_pieces(one), read_pieces(other), strict=True):
            moved, size = moved + float(np.square(v - u).sum()), size + float(np.square(u).sum())
        ratio = sqrt(moved / size) if size else inf if moved else 0.0
        change = ratio if isfinite(ratio) else None
    return Compared(
        name_within(spec_b, b) if spec_b else name_within(spec_a, a),
        spec_a and spec_a.name,
        spec_b and spec_b.name,
        (spec_b or spec_a).role,
        spec_a and spec_a.layer,
        spec_b and spec_b.layer,
        state,
        change,
        one and one.shape,
        other and other.shape,
        one and one.dtype,
        other and other.dtype,
    )


def read_pieces(entry: Entry) -> Iterator[np.ndarray]:
    """Yield a tensor's values as fp64 in chunks; integers and the bits of fp8 count as integers."""
    size = prod(entry.shape)
    with entry.file.open("rb") as file:
        file.seek(entry.start)
        for start in range(0, size, PIECE):
            raw = np.fromfile(file, RAW[entry.dtype], min(PIECE, size - start))
            yield (to_float32(raw, entry.dtype) if entry.dtype in FLOATS[1:] else raw).astype(np.float64)


# -- config ----------------------------------------------------------------------------------------


def differing(a: Json | Absent, b: Json | Absent, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the config keys whose values differ; nested keys are joined with dots."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differing(a.get(key, ABSENT), b.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif a is not b and (a is ABSENT or b is ABSENT or a != b):
        yield path, a, b
