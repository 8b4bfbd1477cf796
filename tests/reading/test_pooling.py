"""Embeddings are those of sentence-transformers: by every way of pooling, through the commands that speak of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense
from sentence_transformers.base.modules.transformer import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import AutoModel, AutoTokenizer

from leansurgeon.errors import UsageError
from leansurgeon.reading import pooling
from tests.support.command_line import leansurgeon
from tests.support.content import side_of
from tests.support.models import strangers

MODES = (*((mode,) for mode in pooling.FLAGS.values()), ("cls", "weightedmean"))


def embedder(folder, place, modes, *, dense=False, **more):
    """The encoder in `place` with what sentence-transformers puts behind it."""
    torch.manual_seed(5)
    encoder = Transformer(str(place))
    width = encoder.get_embedding_dimension()
    parts = [encoder, Pooling(width, modes, include_prompt=more.pop("include_prompt", True))]
    parts += [Dense(width * len(modes), 16), Normalize()] if dense else []
    SentenceTransformer(modules=parts, device="cpu", **more).save(str(folder))
    return folder


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("modes", MODES, ids="+".join)
def test_states_are_pooled_as_sentence_transformers_pools_them(modes, side):
    states, mask = torch.randn(3, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]])
    mask = mask if side == "right" else mask.flip(1)
    for skipped in (0, 1):
        features = {"token_embeddings": states, "attention_mask": mask, "prompt_length": skipped}
        expected = Pooling(8, list(modes), include_prompt=False)(features)["sentence_embedding"]
        assert torch.allclose(pooling.Pooling(modes, skipped=skipped).pool(states, mask), expected, atol=1e-6)


def test_the_files_of_older_versions_say_the_same(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text(
        json.dumps([{"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])
    )
    config = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert pooling.read_pooling(tmp_path).modes == ("cls", "lasttoken")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return strangers.encoder(tmp_path_factory.mktemp("encoder") / "plain")


PROMPT = "w1 w2 w3 "


def test_judge_and_retrain_say_the_cosine_of_sentence_transformers(encoder, tmp_path):
    """With a prompt that is not pooled and a dense layer behind."""
    prompts = {"include_prompt": False, "prompts": {"q": PROMPT}, "default_prompt_name": "q"}
    source = embedder(tmp_path / "source", encoder, ["mean"], dense=True, **prompts)
    lean = strangers.halved(tmp_path / "lean", source)
    rng, text = np.random.default_rng(0), tmp_path / "text.txt"
    lines = [" ".join(f"w{i}" for i in rng.integers(3, 50, rng.integers(8, 30))) for _ in range(60)]
    text.write_text("\n".join(lines))
    both = [SentenceTransformer(str(folder), device="cpu") for folder in (source, lean)]
    cosines = torch.cosine_similarity(*(model.encode(lines, convert_to_tensor=True) for model in both))
    done = leansurgeon("judge", lean, "--data", text, "--json")
    assert done.returncode == 0, done.stderr
    said = next(iter(json.loads(done.stdout)["judged"].values()))["embeddings"]
    held_out = torch.tensor([side_of(line) == "test" for line in lines])
    assert held_out.sum() == said["samples"] and said["cosine"] == pytest.approx(
        float(cosines[held_out].mean()), abs=1e-5
    )

    done = strangers.healed(lean, text, tmp_path / "run", "--set", "train.duration=1st")
    assert done.returncode == 0, done.stderr
    first = next(row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["type"] == "eval")
    error = float(cosines.std()) / first["samples"] ** 0.5
    assert first["metric"] == pytest.approx(float(cosines.mean()), abs=3 * error)


def test_heads_are_weighed_by_the_embedding_that_is_used(encoder, tmp_path):
    from leansurgeon.checkpoints import model as checkpoints
    from leansurgeon.measure.heads.judge import OutputScorer

    folder = embedder(tmp_path / "source", encoder, ["cls"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = dict(tokenizer(["w1 w2 w3", "w4"], padding=True, return_tensors="pt"))
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        found = OutputScorer(checkpoints.load(folder)).forward(batch)
        states = AutoModel.from_pretrained(folder).eval()(**batch)[0]
    assert torch.allclose(found, torch.nn.functional.normalize(states[:, 0], dim=-1), atol=1e-5)


@pytest.mark.parametrize("modules", [{"0": "x"}, [{"type": "a.Pooling", "path": "1"}]])
@pytest.mark.parametrize("config", [["mean"], {"pooling_mode": 5}])
def test_damaged_files_are_refused_in_a_sentence(modules, config, tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"does not hold a|does not know"):
        pooling.read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text('["x"]')
    assert pooling.read_pooling(tmp_path) == pooling.Pooling()
