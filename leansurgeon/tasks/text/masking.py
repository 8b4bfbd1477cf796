"""What a masked language model does not see: tokens chosen, hidden and listed (Devlin et al., 2019).

Pure functions on arrays; chance comes in as an argument. Shape letters: B samples, T tokens, N scored tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from leansurgeon.tasks.base import IGNORED

MASKED, REPLACED = 0.8, 0.1  # shares of the chosen tokens; the rest stays as it is, and is to be predicted too


class Hidden(NamedTuple):
    """`input_ids` and `labels` (B, T) int64, and where something is to be predicted: `places` (N,) int64, counted over
    the flattened batch, filled up as `padded_places` says.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    places: np.ndarray


def hide(
    tokens_BT: np.ndarray, draws_BT: np.ndarray, share: float, mask_id: int, special: np.ndarray, vocab_size: int
) -> Hidden:
    """Choose tokens with probability `share`, never those whose ids are true in `special` (vocab_size,).

    One draw (uint32) says for its token whether it is chosen; rescaled, what becomes of it, and rescaled again, which
    token stands there instead: 32 bits are enough for all three.
    """
    chosen_N = np.flatnonzero(draws_BT < np.uint32(min(share * 2.0**32, 2**32 - 1)))
    told_N = tokens_BT.reshape(-1)[chosen_N]
    allowed_N = ~special[told_N]
    chosen_N, told_N = chosen_N[allowed_N], told_N[allowed_N]
    fate_N = draws_BT.reshape(-1)[chosen_N] / (share * 2.0**32)
    shown_N = told_N.astype(np.int64)
    shown_N[fate_N < MASKED] = mask_id
    other = np.flatnonzero(fate_N >= 1 - REPLACED)
    any_token = (fate_N[other] - (1 - REPLACED)) / REPLACED * vocab_size
    shown_N[other] = np.minimum(any_token.astype(np.int64), vocab_size - 1)
    input_ids, labels = tokens_BT.astype(np.int64), np.full(tokens_BT.shape, IGNORED, dtype=np.int64)
    input_ids.reshape(-1)[chosen_N] = shown_N
    labels.reshape(-1)[chosen_N] = told_N
    return Hidden(input_ids, labels, padded_places(chosen_N, labels, share))


def padded_places(chosen_N: np.ndarray, labels_BT: np.ndarray, share: float) -> np.ndarray:
    """`chosen_N` filled up with a place that is not scored, to a length that hardly ever changes between batches.

    A compiled model is compiled again for every new length. This one is five standard deviations above the mean of the
    binomial distribution, in whole eights; where more were chosen, the next eight.
    """
    tokens = labels_BT.size
    usual = tokens * share + 5 * math.sqrt(tokens * share * (1 - share))
    length = min(tokens, -(-max(math.ceil(usual), len(chosen_N)) // 8) * 8)
    if len(chosen_N) == length:
        return chosen_N
    unscored = int(np.argmax(labels_BT.reshape(-1) == IGNORED))
    return np.concatenate((chosen_N, np.full(length - len(chosen_N), unscored, dtype=np.int64)))
