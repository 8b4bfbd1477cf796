"""What this machine can bear: batches by memory and speed, for recipes that nobody wrote by hand. Numbers of a machine
and not of the moment, so that the same command gives the same recipe when it is typed again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from leansurgeon.checkpoints.source import Source

STEP = {"cpu": 1e12, "gpu": 5e13}  # operations of an optimizer step that are worth waiting for
SPEED = {"cpu": 1e11, "gpu": 2e13}  # operations a second, of a small machine
STEPS = 40  # that a training by the clock should have at least
PATCHES = 197  # tokens of an image, nearly always
TOKENS = {"cpu": (512, 4_096), "gpu": (4_096, 65_536)}  # least and most of a step
SENTENCES = {"cpu": 32, "gpu": 256}
CLASSIFIED = {"cpu": 32, "gpu": 64}
SHARE = 0.5  # of the memory that one step may take


@dataclass(frozen=True)
class Machine:
    """`memory` is all that the GPU, or the machine, has, in bytes."""

    gpu: bool
    memory: int
    bf16: bool

    @property
    def word(self) -> str:
        return "gpu" if self.gpu else "cpu"


def look() -> Machine:
    """This machine: its first GPU, or where it has none its processor."""
    import torch

    from leansurgeon.measure.costs.precision import has_bf16

    if torch.cuda.is_available():
        return Machine(True, torch.cuda.get_device_properties(0).total_memory, torch.cuda.is_bf16_supported())
    return Machine(False, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), has_bf16("cpu"))


def precision(source: Source, here: Machine) -> str:
    """bf16 where the hardware multiplies in it, and on a CPU where matrices are large enough to gain by it."""
    from leansurgeon.measure.costs.precision import NARROW

    wide = max(stage.width for stage in source.shape.stages) >= NARROW
    return "bf16" if here.bf16 and (here.gpu or wide) else "fp32"


def batch(
    kind: str, matrices: int, tokens: int | None, here: Machine, samples: int, seconds: float | None = None
) -> int:
    """Samples of an optimizer step: as many as are worth a step of `STEP` operations (`matrices` parameters are
    multiplied with every token, forward, backward and once more by the teacher), a power of two, and so few that
    an epoch has 8 steps, and `seconds` some `STEPS`.
    """
    a_token = 8 * max(1, matrices)
    worth = STEP[here.word] if seconds is None else min(STEP[here.word], seconds * SPEED[here.word] / STEPS)
    if kind in ("causal-lm", "masked-lm"):
        least, most = TOKENS[here.word]
        least = least if worth == STEP[here.word] else 1
        wanted = min(most, max(least, worth / a_token)) / (tokens or 1)
    elif kind == "features" and tokens:
        wanted = SENTENCES[here.word]
    else:
        wanted = CLASSIFIED[here.word] * (1 if tokens else 2)
    if seconds is not None:
        wanted = min(wanted, seconds * SPEED[here.word] / STEPS / (a_token * (tokens or PATCHES)))
    return power_of_two(min(wanted, max(1, samples // 8)))


def micro(source: Source, kind: str, tokens: int | None, here: Machine, *, taught: bool) -> int:
    """Samples that go through the model at once: what is left beside weights, gradients, moments and the teacher, a
    power of two.
    """
    weights = source.parameters.total * (16 + 4 * taught)
    room = max(0.0, SHARE * here.memory - weights)
    return power_of_two(max(1.0, min(1_024.0, room / sample_bytes(source, kind, tokens, taught=taught))))


def sample_bytes(source: Source, kind: str, tokens: int | None, *, taught: bool) -> int:
    """Bytes of activations of one sample, roughly: some 20 numbers of every width and 4 of every MLP unit for a token
    in a layer, attention weights where no fused kernel saves them, and logits in several fp32 copies.
    """
    flat = source.architecture.flat(source.config)
    count = tokens or image_tokens(flat)
    layers = sum(stage.depth * (20 * stage.width + 4 * stage.mlp_dim) for stage in source.shape.stages)
    scores = sum(stage.depth * stage.heads for stage in source.shape.stages) * count
    words = flat.get("vocab_size") if kind in ("causal-lm", "masked-lm") else 0
    logits = (words or 0) * (8 if taught else 4)
    return 4 * count * (layers + scores + logits)


def image_tokens(flat: dict) -> int:
    """Patches of an image, and a class token."""
    size, patch = flat.get("image_size", flat.get("img_size", 224)), flat.get("patch_size", 16)
    side, step = (value[0] if isinstance(value, list | tuple) else value for value in (size, patch))
    return (int(side) // max(1, int(step))) ** 2 + 1


def power_of_two(value: float) -> int:
    """The largest power of two that is not above `value`, at least 1."""
    return 1 << max(0, int(value).bit_length() - 1)
