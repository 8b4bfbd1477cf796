"""Pool the hidden states of a sample to its embedding, as the sentence-transformers files next to a model specify; by
default the mean over real tokens. The proof by reloading runs this file by itself, so `Pooling` imports nothing of
leansurgeon.

Shape letters: B samples, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# Keys of 1_Pooling/config.json before version 5.4 of sentence-transformers, in the order of concatenation.
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True)
class Pooling:
    """How to pool: `modes` as named by sentence-transformers; `dense` layers after it, each a file and its activation;
    and how many prompt tokens at the beginning are `skipped`.
    """

    modes: tuple[str, ...] = ("mean",)
    dense: tuple[tuple[str, str], ...] = ()
    skipped: int = 0

    def pool(self, states: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Pool (B, T, D) to (B, D), where the mask is true at real tokens (None: all); timm's (B, H, W, D) by the mean
        over positions; (B, D) stays unchanged.
        """
        import torch

        if states.dim() == 2:
            return states
        if states.dim() > 3:
            return states.flatten(1, -2).mean(1)
        if mask_BT is None or mask_BT.shape != states.shape[:2]:
            mask_BT = torch.ones(states.shape[:2], device=states.device)
        real_BT = mask_BT.bool()
        place_BT = real_BT.int().cumsum(1)
        counted_BT = real_BT & (place_BT > self.skipped) if self.skipped else real_BT
        embedding = torch.cat([pool_states(states, counted_BT, place_BT, mode) for mode in self.modes], dim=-1)
        for file, activation in self.dense:
            weight, bias = (part if part is None else part.to(embedding) for part in linear(file))
            embedding = getattr(torch.nn, activation)()(torch.nn.functional.linear(embedding, weight, bias))
        return embedding


def pool_states(states: Tensor, real_BT: Tensor, place_BT: Tensor, mode: str) -> Tensor:
    """Pool to (B, D) by one mode; `place_BT` counts real tokens from 1."""
    if mode in ("cls", "lasttoken"):
        ends_B = real_BT.int().argmax(1) if mode == "cls" else place_BT.argmax(1)
        return states[range(len(states)), ends_B]
    weights = real_BT.to(states.dtype)[..., None]
    if mode == "max":
        return states.masked_fill(weights == 0, float("-inf")).amax(1)
    if mode == "weightedmean":
        weights = weights * place_BT.to(states.dtype)[..., None]
    count = weights.sum(1).clamp(min=1)
    return (states * weights).sum(1) / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)


@lru_cache(maxsize=8)
def linear(file: str) -> tuple[Tensor, Tensor | None]:
    """Load weight and bias of a dense layer."""
    from safetensors.torch import load_file

    tensors = load_file(file)
    return tensors["linear.weight"], tensors.get("linear.bias")


def read_pooling(folder: Path | None) -> Pooling:
    """Read the pooling that modules.json in a model's folder specifies. Raises `UsageError` for an unknown mode."""
    from leansurgeon.errors import UsageError
    from leansurgeon.reading.files import is_name
    from leansurgeon.reading.values import objects

    modes, dense, skipped = ("mean",), (), 0
    for module in objects(read_setting(folder, "modules.json", list)) if folder else ():
        kind, place = str(module.get("type")).rpartition(".")[2], str(module.get("path", ""))
        if kind not in ("Pooling", "Dense") or not is_name(place):
            continue
        config = read_setting(folder, f"{place}/config.json")
        if kind == "Pooling":
            named = config.get("pooling_mode") or tuple(mode for key, mode in FLAGS.items() if config.get(key))
            modes = tuple(named) or modes if isinstance(named, list | tuple) else (named,)
            if unknown := [mode for mode in modes if mode not in FLAGS.values()]:
                raise UsageError(
                    f"{folder / place}/config.json pools by '{unknown[0]}', which leansurgeon does not know."
                )
            if config.get("include_prompt") is False and (prompt := default_prompt(folder)):
                from transformers import AutoTokenizer

                # start tokens are skipped, too, but no end token
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
                ids = tokenizer(prompt)["input_ids"]
                skipped = len(ids) - (ids[-1] in (tokenizer.sep_token_id, tokenizer.eos_token_id))
        elif kind == "Dense" and (file := folder / place / "model.safetensors").is_file():
            activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
            if activation not in ACTIVATIONS:
                raise UsageError(f"{folder / place}/config.json has the activation '{activation}', unknown here.")
            dense += ((str(file), activation),)
    return Pooling(modes, dense, skipped)


def default_prompt(folder: Path | None) -> str:
    """Return the prompt that sentence-transformers prepends to every text by default; empty if there is none."""
    config = read_setting(folder, "config_sentence_transformers.json") if folder else {}
    prompts = config.get("prompts")
    return str(prompts.get(config.get("default_prompt_name")) or "") if isinstance(prompts, dict) else ""


def read_setting(folder: Path, name: str, kind: type = dict) -> Any:
    """Read a JSON file of sentence-transformers; empty if it does not exist. Raises `UsageError` if it does not hold
    an object (or what `kind` says).
    """
    from leansurgeon.errors import UsageError
    from leansurgeon.reading import jsonfile

    found = jsonfile.read(folder / name) if (folder / name).is_file() else kind()
    if not isinstance(found, kind):
        raise UsageError(f"{folder / name} does not hold {'a list' if kind is list else 'an object'}.")
    return found
