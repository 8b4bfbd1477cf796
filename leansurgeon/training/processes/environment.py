"""Environment variables that would have a training do something else than its recipe says, and that are easily
forgotten: `accelerate launch` and schedulers set some, a shell's profile others.

    set aside   Accelerate reads them, and transformers some of them, while a training is set up. They are taken out of
                this process's environment, so they do nothing.
    in force    torch and the libraries below it read them when they are loaded, so nobody can take them back.

What only says where or how fast (`CUDA_VISIBLE_DEVICES`, `OMP_NUM_THREADS`, the allocator's settings) is left alone.
"""

from __future__ import annotations

import os

from leansurgeon import rank
from leansurgeon.errors import UsageError
from leansurgeon.training.recipe.settings import Train

_ASIDE = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
# Set by `accelerate launch --cpu` and by a wish for one device: they choose where, not what is computed.
_HARMLESS = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_LOG_LEVEL")
_OFF = ("", "no", "false", "0", "none", "strict")  # the last is oneDNN's word for all digits
# What `accelerate launch` always sets, and nobody has wished for.
_DEFAULTS = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1", "ACCELERATE_DYNAMO_MODE": "default"}

# fp32 products with fewer digits than fp32 has, by the kind of device that obeys: "cuda" is NVIDIA's and AMD's, and
# oneDNN works on CPUs and on Intel's GPUs.
_ONEDNN = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
_FEWER_DIGITS = {
    "cuda": ("NVIDIA_TF32_OVERRIDE", "HIPBLASLT_ALLOW_TF32"),
    "cpu": _ONEDNN,
    "xpu": _ONEDNN,
}
_ON_WITH_ANY_WORD = "TORCHDYNAMO_SUPPRESS_ERRORS"  # even 0: torch/_dynamo/config.py takes any text for yes
_OTHER_COMPILE = (
    "TORCHDYNAMO_DISABLE",
    "TORCH_COMPILE_DISABLE",
    _ON_WITH_ANY_WORD,
    "TORCH_COMPILE_OVERRIDE_BACKENDS",
)


def group_size() -> int:
    """How many processes train together, as the environment says. Raises `UsageError` for what cannot be."""
    if trouble := rank.contradiction():
        raise UsageError(trouble, f"For one process: unset {' '.join(rank.said())}. For several: --gpus, or torchrun.")
    return rank.processes()


def set_aside() -> list[str]:
    """Take what Accelerate would obey out of the environment of this process, for good; names of those that said
    something. Not only while Accelerate starts: `ACCELERATE_USE_FSDP` with `FSDP_CPU_RAM_EFFICIENT_LOADING`, which
    `accelerate launch --use_fsdp` sets, lets transformers leave a fresh head without memory on all processes but one.
    """
    taken = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith(_ASIDE) and key not in _HARMLESS}
    return sorted(key for key, value in taken.items() if value.lower() not in _OFF and _DEFAULTS.get(key) != value)


def in_force(train: Train, device: str) -> list[str]:
    """`NAME=value (train.key)` of what overrides this recipe all the same on this kind of device ("cuda", "cpu")."""
    digits = _FEWER_DIGITS.get(device, ()) if train.precision == "fp32" else ()
    watched = dict.fromkeys(digits, "train.precision")
    watched |= {name: "train.compile" for name in _OTHER_COMPILE} if train.compile else {}
    values = {name: os.environ.get(name, "") for name in watched}
    return [f"{name}={value} ({watched[name]})" for name, value in values.items() if not _is_off(name, value)]


def _is_off(name: str, value: str) -> bool:
    return not value if name == _ON_WITH_ANY_WORD else value.lower() in _OFF


def sentence(aside: list[str], forced: list[str]) -> str | None:
    """What a person should know of both lists, in one line; None where there is nothing."""
    parts = [f"Ignored: {', '.join(aside)} in the environment; the recipe decides."] if aside else []
    if forced:
        parts += [
            f"Not the recipe but the environment decides here: {', '.join(forced)}; unset it where it is unwanted."
        ]
    return " ".join(parts) or None
