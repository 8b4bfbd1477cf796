"""What one pass over sample data says of the source, before anything is tried."""

from __future__ import annotations

import numpy as np
import pytest

from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands import search
from leansurgeon.commands.samples import sample_data
from leansurgeon.search import evidence
from tests.support.models.word_models import sentence_encoder


def test_the_samples_of_kappa_are_as_long_as_all(saved, tmp_path):
    """Guard sentences lie by their length; the first 64 would be the shortest."""
    folder, text = sentence_encoder(saved, tmp_path, 1200)
    source = open_source(str(folder))
    data = sample_data(source, str(text), None, None, 0, print)
    lengths = [int(n) for batch in data.guard for n in batch["attention_mask"].sum(1)]
    assert len(lengths) > 2 * evidence.SAMPLES
    found = evidence.gather(source, data)
    assert found.tokens == pytest.approx(np.mean(lengths), rel=0.1)
    assert abs(np.mean(lengths[: evidence.SAMPLES]) - found.tokens) > 0.2 * found.tokens


def test_a_search_of_an_older_choice_of_samples_is_not_gone_on_with(saved, tmp_path, monkeypatch):
    folder, _ = sentence_encoder(saved, tmp_path, 20)
    source = open_source(str(folder))
    now = search.place_of(tmp_path, source, [1])
    assert search.place_of(tmp_path, source, [1]) == now
    monkeypatch.setattr(evidence, "VERSION", evidence.VERSION - 1)
    assert search.place_of(tmp_path, source, [1]) != now
