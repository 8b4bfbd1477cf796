"""What one pass over sample data says of the source, before anything is tried."""

from __future__ import annotations

import numpy as np
import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.cli.shrink import sample_data
from leansurgeon.search import evidence
from tests.test_cli_heads import words

WORDS = [f"w{i}" for i in range(50)]


def test_the_samples_of_kappa_are_as_long_as_all(saved, tmp_path):
    """Guard sentences lie by their length; the first 64 would be the shortest."""
    folder, model = saved("bert")
    model.bert.save_pretrained(folder)  # an encoder without a head takes sentences one by one
    words(folder, WORDS)
    rng = np.random.default_rng(0)
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(rng.choice(WORDS, rng.integers(8, 31))) for _ in range(1200)))
    source = open_source(str(folder))
    data = sample_data(source, str(text), None, None, 0)
    lengths = [int(n) for batch in data.guard for n in batch["attention_mask"].sum(1)]
    assert len(lengths) > 2 * evidence.SAMPLES
    found = evidence.gather(source, data, tmp_path / "cache")
    assert found.tokens == pytest.approx(np.mean(lengths), rel=0.1)
    assert abs(np.mean(lengths[: evidence.SAMPLES]) - found.tokens) > 0.2 * found.tokens
