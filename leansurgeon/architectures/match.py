"""Match a file's tensors to a family's declaration: every tensor gets a role, or the file is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping

from leansurgeon.architectures.base import Architecture
from leansurgeon.architectures.tensors import BUFFERS, Config, TensorSpec, layer_number_pattern
from leansurgeon.errors import UnsupportedModel, plural, quote

AHEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # layers for multi-token prediction, after the others


def match(architecture: Architecture, config: Config, names: Mapping[str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    """Give every tensor of a file its role. Raises `UnsupportedModel` if config and weights disagree.

    `names` maps the file's tensor names to their shapes. A tensor outside the blocks that is not declared (a pooler, a
    classifier) gets the role `head`, or is left out if the library's class is known not to read it. An undeclared
    tensor inside a block, or a missing block, is an error.
    """
    shape = architecture.shape(config)
    stages = [architecture.blocks(i) for i in range(len(shape.stages))]
    first, prefixes = stages[0].layer.format(i=0), architecture.prefixes
    prefix = next((p for p in prefixes if any(n.startswith(p + first) for n in names)), None)
    if prefix is None:
        others = [b.layer.format(i=0) for b in stages[1:] if b.keys]
        alone = any(start in name for start in others for name in names)
        raise UnsupportedModel(
            f"The config says {architecture.name}, but no tensor is named like '{prefixes[0] + first}...'.",
            "A decoder without its encoder is not declared."
            if alone
            else "Do config.json and the weights belong together?",
        )
    declared = {spec.name: spec for spec in architecture.tensors(config, shape, prefix)}
    patterns = [layer_number_pattern(prefix + b.layer) for b in stages]
    cls = (config.get("architectures") or [""])[0]
    # Tensors that the model's class does not read.
    unused = tuple(p for ending, starts in architecture.unused.items() if cls.endswith(ending) for p in starts)
    flat = architecture.flat(config)
    ahead = next((flat[key] for key in AHEAD if isinstance(flat.get(key), int)), 0)
    # An inferred declaration lists all that the class reads; a file of the body's class may hold more (its pooler).
    inferred = architecture.evidence and architecture.library != "timm" and prefix == architecture.prefixes[0]
    specs = []
    for name, size in names.items():
        spec = declared.get(name)
        if spec is None:
            number, inside = next(((s, m) for s, p in enumerate(patterns) if (m := p.match(name))), (0, None))
            depth = shape.stages[number].depth
            # Nine digits are enough for a layer number, and Python parses at most 4,300.
            layer = int(inside[1][:9]) if inside else -1
            if depth <= layer < depth + ahead or any(re.search(p, name) for p in architecture.ignored):
                continue
            if layer >= depth:
                raise UnsupportedModel(
                    f"The config says {plural(depth, 'layer')}, but the weights hold {quote(name)}.",
                    "The config does not fit its weights.",
                )
            tied = name in architecture.tied
            if name.endswith(BUFFERS) or name.startswith(unused) or (inferred and not inside and not tied):
                continue
            if inside:
                raise UnsupportedModel(
                    f"'{name}' is not part of the {architecture.name} declaration, so its role is not known.",
                    "Surgery would be a guess; see architectures/families/__init__.py on how to declare it.",
                )
            tied = tied and architecture.fill_config(config).get(architecture.tied_when, True)
            role = "tied" if tied else "embedding" if "embed" in name else "head"
            spec = TensorSpec(name, role, tuple(map(str, size)), tuple(size))
        elif spec.shape != tuple(size) and spec.role != "head":
            raise UnsupportedModel(
                f"'{name}' is {list(size)} in the weights, and the config asks for "
                f"{list(spec.shape)} ({' x '.join(spec.axes)}).",
                "The config does not fit its weights.",
            )
        specs.append(spec)
    _check_complete(declared, {spec.name for spec in specs}, shape.depth)
    return tuple(specs)


def _check_complete(declared: Mapping[str, TensorSpec], have: set[str], depth: int) -> None:
    """Raise `UnsupportedModel` if a declared tensor is missing; heads, buffers and biases may be."""
    optional = ("head", "buffer")
    missing = [n for n, s in declared.items() if n not in have and s.role not in optional and n[-5:] != ".bias"]
    if missing and declared[missing[0]].layer is None:
        raise UnsupportedModel(
            f"The weights lack '{missing[0]}'.",
            "Is the file complete, or is a shard missing? A model without its head is one of its body's class "
            "(architectures in config.json).",
        )
    if missing:
        raise UnsupportedModel(
            f"The weights lack {len(missing)} tensors that {depth} layers need, the first '{missing[0]}'.",
            "The config does not fit its weights, or a shard is missing.",
        )
