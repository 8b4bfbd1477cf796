"""`--class-attention`: the heads of the class attention change with those of the blocks."""

from __future__ import annotations

from dataclasses import replace

from leansurgeon.architectures.class_attention import following
from leansurgeon.checkpoints.source import Source
from leansurgeon.errors import UsageError


def follow(source: Source) -> Source:
    """The source read so that its class attention is changed with the blocks. Raises `UnsupportedModel` where its
    family has none, `UsageError` where the two have parted already.
    """
    arch, now = following(source.architecture), source.shape.stages[-1]
    config = arch.flat(source.config)
    for key, name in arch.class_keys.items():
        if config.get(key) not in (None, getattr(now, name)):
            raise UsageError(
                f"--class-attention: {key} is {config[key]} and the blocks have {getattr(now, name)}; "
                "what differs already cannot follow.",
                "Leave the flag out, or start from the original model.",
            )
    names = {t.name: t for t in arch.outer}
    specs = tuple(
        replace(spec, role=t.role, axes=tuple(t.axes.split())) if (t := names.get(spec.name)) else spec
        for spec in source.specs
    )
    return replace(source, architecture=arch, specs=specs)
