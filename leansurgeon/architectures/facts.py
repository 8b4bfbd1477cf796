"""What a declaration says of a family beyond its tensors: what its models take, and what multiplies their scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
POSITIONS = ("max_position_embeddings", "n_positions", "block_size")  # keys that say how many there are


@dataclass(frozen=True)
class Takes:
    """What the models of a family take, where the common config keys do not say it.

    `special_tokens` stand beside the patches of an image (class, distillation, registers); `any_image_size` says that
    positions are interpolated to the image. Of text, `skipped_positions` are never used, `only_tokens` is the one
    length that a model takes (None: any), and `second_text` is the config key of a model that reads two texts.
    """

    special_tokens: Callable[[Config], int] = lambda config: 0
    any_image_size: bool = False
    skipped_positions: Callable[[Config], int] = lambda config: 0
    only_tokens: Callable[[Config], int | None] = lambda config: None
    second_text: str = ""

    def most_tokens(self, config: Config) -> int | None:
        """The most tokens of text that a model has positions for; None where there is no such limit."""
        lengths = [config[key] for key in POSITIONS if isinstance(config.get(key), int) and config[key] > 0]
        return min(lengths) - self.skipped_positions(config) if lengths else None


def scale_by_key(config: Config) -> float | None:
    """What a config key puts in the place of 1/sqrt(head_dim) before the scores; None where none does."""
    if config.get("attention_multiplier") is not None:
        return float(config["attention_multiplier"])
    if config.get("query_pre_attn_scalar") is not None:
        return float(config["query_pre_attn_scalar"] ** -0.5)
    return None
