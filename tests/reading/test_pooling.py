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

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import calibration
from leansurgeon.reading import pooling
from tests.support.command_line import leansurgeon
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
CASES = {
    "first token": ((["cls"]), {}),
    "prompt and dense layer": (
        ["mean"],
        {"dense": True, "include_prompt": False, "prompts": {"q": PROMPT}, "default_prompt_name": "q"},
    ),
}


def cosines_of(source, lean, texts):
    both = [
        SentenceTransformer(str(folder), device="cpu").encode(texts, convert_to_tensor=True)
        for folder in (source, lean)
    ]
    return torch.nn.functional.cosine_similarity(*both)


@pytest.mark.parametrize("case", CASES)
def test_judge_and_retrain_say_the_cosine_of_sentence_transformers(encoder, tmp_path, case):
    modes, more = CASES[case]
    source = embedder(tmp_path / "source", encoder, modes, **more)
    lean = strangers.halved(tmp_path / "lean", source)
    rng = np.random.default_rng(0)
    lines = [" ".join(f"w{i}" for i in rng.integers(3, 50, rng.integers(8, 30))) for _ in range(60)]
    text = tmp_path / "text.txt"
    text.write_text("\n".join(lines))
    done = leansurgeon("judge", lean, "--data", text, "--json")
    assert done.returncode == 0, done.stderr
    said = next(iter(json.loads(done.stdout)["judged"].values()))["embeddings"]
    data = calibration.open_calibration(str(text), open_source(str(source)), cache=tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = [
        row[mask.bool()] for b in data.heldout for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]
    judged = [tokenizer.decode(row, skip_special_tokens=True).removeprefix(PROMPT) for row in ids]
    assert set(judged) <= set(lines) and len(judged) == said["samples"]
    assert said["cosine"] == pytest.approx(float(cosines_of(source, lean, judged).mean()), abs=1e-5)

    cosines = cosines_of(source, lean, lines)
    done = strangers.healed(lean, text, tmp_path / "run", "--set", "train.duration=1st")
    assert done.returncode == 0, done.stderr
    first = next(row for row in map(json.loads, (tmp_path / "run" / "metrics.jsonl").open()) if row["type"] == "eval")
    assert first["metric"] == pytest.approx(
        float(cosines.mean()), abs=3 * float(cosines.std()) / first["samples"] ** 0.5
    )


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
    with pytest.raises(UsageError, match=r"does not hold a|not known here"):
        pooling.read_pooling(tmp_path)
    (tmp_path / "modules.json").write_text('["x"]')
    assert pooling.read_pooling(tmp_path) == pooling.Pooling()
