"""Facts of a family beyond its tensors: what its models accept, and the scale of their attention scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
POSITIONS = ("max_position_embeddings", "n_positions", "block_size")  # keys for the number of positions


@dataclass(frozen=True)
class Takes:
    """What the models of a family accept, if the common config keys do not say it.

    `special_tokens` are added to the patches of an image (class, distillation, registers); `any_image_size` means that
    positions are interpolated to the image. For text, `skipped_positions` are never used, `only_tokens` is the only
    length that a model accepts (None: any), and `second_text` is the config key of a model that reads two texts.
    """

    special_tokens: Callable[[Config], int] = lambda config: 0
    any_image_size: bool = False
    skipped_positions: Callable[[Config], int] = lambda config: 0
    only_tokens: Callable[[Config], int | None] = lambda config: None
    second_text: str = ""

    def most_tokens(self, config: Config) -> int | None:
        """Return the largest number of text tokens that a model has positions for; None if there is no limit."""
        lengths = [config[key] for key in POSITIONS if isinstance(config.get(key), int) and config[key] > 0]
        return min(lengths) - self.skipped_positions(config) if lengths else None


def scale_by_key(config: Config) -> float | None:
    """Return the factor that a config key sets instead of 1/sqrt(head_dim); None if no key does."""
    if config.get("attention_multiplier") is not None:
        return float(config["attention_multiplier"])
    if config.get("query_pre_attn_scalar") is not None:
        return float(config["query_pre_attn_scalar"] ** -0.5)
    return None
