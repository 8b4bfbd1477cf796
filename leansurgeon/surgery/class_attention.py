"""Support `--class-attention`: change the heads of the class attention together with those of the blocks. Class
attention comes after the blocks; in it only the class token attends (XCiT, CaiT).

By default a declaration leaves it unchanged: role `other_attention`, axis `cls_q` for its inner width. `following`
returns the same family with the class attention tied to the heads of the blocks.
"""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.architectures.base import Architecture
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UnsupportedModel, UsageError

ROLES = {"q": ("q", "q"), "k": ("k", "kv"), "v": ("v", "kv"), "proj": ("o", "q")}  # layer in timm -> role, axis


def following(arch: Architecture) -> Architecture:
    """Return the family with a class attention that follows the heads of the blocks. Raises `UnsupportedModel` if there
    is none that can change.
    """
    outer = []
    for t in arch.outer:  # each tensor of it gets the role and axes of its counterpart in the blocks
        if t.role == "other_attention" and "cls_q" in t.axes:
            role, axis = ROLES[t.name.split(".")[-2]]
            t = replace(t, role=role, axes=tuple(axis if a == "cls_q" else a for a in t.axes))
        elif t.role == "other_attention" and t.group:  # the projection's bias
            t = replace(t, role="o")
        outer.append(t)
    if tuple(outer) == arch.outer:
        has = any(t.role == "other_attention" for t in (*arch.outer, *arch.block))
        what = "leaves the class attention as it is" if has else "has no class attention"
        raise UnsupportedModel(
            f"--class-attention: {arch.name} {what}; it can follow the heads of XCiT and CaiT.", "Leave the flag out."
        )
    return replace(arch, outer=tuple(outer), shared=tuple(n for n in arch.shared if n != "heads"), class_follows=True)


def follow(source: Source) -> Source:
    """Return the source with its class attention tied to the blocks. Raises `UnsupportedModel` if its family has none,
    `UsageError` if the two already differ.
    """
    arch, now = following(source.architecture), source.shape.stages[-1]
    config = source.flat_config
    for key, name in arch.class_keys.items():
        if config.get(key) not in (None, getattr(now, name)):
            raise UsageError(
                f"--class-attention: {key} is {config[key]} and the blocks have {getattr(now, name)}; "
                "what differs already cannot follow.",
                "Leave the flag out, or start from the original model.",
            )
    names = {t.name: t for t in arch.outer}
    specs = tuple(
        replace(spec, role=t.role, axes=t.axes) if (t := names.get(spec.name)) else spec for spec in source.specs
    )
    return replace(source, architecture=arch, specs=specs)
