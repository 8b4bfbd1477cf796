"""sentence-transformers: what it does behind the encoder (pooling, a dense layer, normalising) survives the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.clients.cells import kinds
from tests.clients.conftest import shrunk
from tests.support.models import strangers
from tests.support.models.word_models import WORDS

pytestmark = pytest.mark.clients
SENTENCES = [" ".join(WORDS[i : i + 3 + i % 5]) for i in range(12)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """An encoder that takes the first token's state, through a dense layer, to unit length: nothing is the default."""
    from sentence_transformers import SentenceTransformer, models

    place = tmp_path_factory.mktemp("sentences")
    encoder = models.Transformer(str(strangers.encoder(place / "bert")))
    torch.manual_seed(0)
    parts = [encoder, models.Pooling(32, pooling_mode="cls"), models.Dense(32, 16), models.Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(place / "source"))
    return place / "source"


@kinds("sentence-transformers")
def test_encode_with_the_pooling_of_the_source(kind, source, tmp_path):
    from safetensors.torch import load_file
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    own = kind.endswith("-own")
    out = shrunk(source, tmp_path / "lean", kind)
    found = SentenceTransformer(str(out), device="cpu", trust_remote_code=own).encode(SENTENCES)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModel.from_pretrained(out, trust_remote_code=own, dtype=torch.float32).eval()
    (dense,) = out.glob("*_Dense/model.safetensors")
    weights = load_file(dense)
    with torch.no_grad():
        first = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 0] for text in SENTENCES]
        mapped = torch.tanh(torch.stack(first) @ weights["linear.weight"].T + weights["linear.bias"])
        wanted = torch.nn.functional.normalize(mapped, dim=-1).numpy()
    assert found.shape == (12, 16) and np.allclose(found, wanted, atol=1e-4)
    before = SentenceTransformer(str(source), device="cpu").encode(SENTENCES)
    assert not np.allclose(found, before, atol=1e-3)  # it is the cut one
