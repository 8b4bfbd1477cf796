"""Models whose config.json names a head that their files do not hold, or that modules.json leaves unused: nothing of a
head that the library would draw at random is measured, followed, taught or written.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import open_calibration
from tests.cli.answers import document, heals, read, stderr_of, stdout_of, typed, works
from tests.support.models import strangers
from tests.support.models.word_models import words

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61}


def named(folder: Path, cls: str, **more) -> Path:
    """The model in a folder under the name of another class."""
    config = read(folder / "config.json")
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [cls]} | more))
    return folder


def mlm(folder: Path) -> Path:
    """As all-mpnet-base-v2 lies on the hub: a body with its pooler, called ...ForMaskedLM, and modules.json."""
    named(strangers.encoder(folder), "BertForMaskedLM")
    parts = ("Transformer", ""), ("Pooling", "1_Pooling")
    modules = [
        {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (kind, path) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    return folder


def causal(folder: Path) -> Path:
    """As gte-Qwen2 lies on the hub: a body called ...ForCausalLM."""
    torch.manual_seed(2)
    config = transformers.Qwen3Config(
        **SIZES, num_key_value_heads=2, head_dim=8, tie_word_embeddings=False, initializer_range=0.3, pad_token_id=0
    )
    transformers.Qwen3Model(config).save_pretrained(folder)
    words(folder)
    return named(folder, "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return strangers.texts(tmp_path_factory.mktemp("texts") / "texts", lines=40)


def embeddings(folder: Path, batches: list) -> torch.Tensor:
    """(N, D) means of the library's own last states over real tokens."""
    model, found = transformers.AutoModel.from_pretrained(folder).eval(), []
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            states = model(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].float()
        found.append((states * weights).sum(1) / weights.sum(1))
    return torch.cat(found)


@pytest.mark.parametrize("make", [mlm, causal])
def test_an_embedder_is_judged_and_healed_by_its_embeddings(make, texts, own_cache, tmp_path):
    source = make(tmp_path / "source")
    cut = strangers.halved(tmp_path / "cut", source)
    (found,) = document(f"judge {cut} --data {texts}")["judged"].values()
    assert "loss" not in found and -1 <= found["embeddings"]["cosine"] < 0.999
    if make is mlm:
        data = open_calibration(str(texts), open_source(str(source)), cache=tmp_path / "cache")
        own = torch.nn.functional.cosine_similarity(*(embeddings(f, data.heldout) for f in (source, cut)))
        assert found["embeddings"]["cosine"] == pytest.approx(float(own.mean()), abs=1e-4)
    done = heals(cut, texts, tmp_path / "run")
    assert "perplexity" not in done.stdout + done.stderr
    assert "It learns the hidden states and embeddings" in done.stderr
    assert "it is used and measured as" in stderr_of(done)
    healed = tmp_path / "run" / "model"
    with safe_open(cut / "model.safetensors", "pt") as a, safe_open(healed / "model.safetensors", "pt") as b:
        assert set(a.keys()) == set(b.keys())  # no head was drawn and written
    assert make is causal or "pooler.dense.weight" in load_file(cut / "model.safetensors")
    configs = [read(folder / "config.json") for folder in (source, healed)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    for folder in (cut, healed):
        card = (folder / "README.md").read_text()
        assert ("sentence-similarity" if (source / "modules.json").exists() else "feature-extraction") in card
        assert "perplexity" not in card and "is used and measured as" in card


def test_a_cut_follows_embeddings_and_no_random_head(texts, own_cache, tmp_path):
    source = causal(tmp_path / "source")
    how = f"--layers 2 --calibrate {texts} --heal closed --samples 32 -o {tmp_path}/out"
    done = works(f"shrink {source} {how}")
    record = read(tmp_path / "out/surgery.json")
    assert "cosine of embeddings" in done.stdout and "perplexity" not in done.stdout
    assert "embeddings" in record["proof"]["compared"] and "loss" not in record["proof"]["compared"]
    assert not any(c.get("guard_loss") or c.get("guard_divergence") for c in record["decided"]["candidates"])


def test_a_search_ranks_embedders_by_their_embeddings(texts, own_cache, tmp_path):
    """The winner as it was written has the figures that it was chosen by, by the library alone."""
    source, out = mlm(tmp_path / "source"), tmp_path / "winner"
    most = int(0.8 * open_source(str(source)).parameters.total)
    asked = f"--params {most} --tries 2 --samples 16 --workspace {tmp_path}/runs -o {out}"
    done = works(f"search {source} --data {texts} {asked} --json")
    found = json.loads(done.stdout)
    scores = [one for row in found["candidates"] for one in row["scores"].values()]
    assert {one["label"] for one in scores} == {"cosine"} and "perplexity" not in done.stdout + done.stderr
    winner = found["winner"]
    row = next(row for row in found["candidates"] if row["name"] == winner)
    data = open_calibration(str(texts), open_source(str(source)), cache=tmp_path / "cache", samples=16)
    for batches, told in ((data.guard, row["scores"]["1"]), (data.heldout, found["untouched"][winner])):
        both = [embeddings(folder, batches) for folder in (source, out)]
        own = float(torch.nn.functional.cosine_similarity(*both).mean())
        assert own == pytest.approx(told["value"], abs=0.02)


def test_a_classifier_without_its_head_has_no_accuracy_and_gets_a_new_one(own_cache, tmp_path):
    source = named(
        strangers.encoder(tmp_path / "source"), "BertForSequenceClassification", id2label={"0": "good", "1": "bad"}
    )
    table = strangers.reviews(tmp_path / "reviews.csv")
    cut = strangers.halved(tmp_path / "cut", source)
    (found,) = document(f"judge {cut} --data {table}")["judged"].values()
    assert "accuracy" not in found and found["embeddings"]["cosine"] < 0.999
    done = heals(cut, table, tmp_path / "run")
    assert "new" in done.stderr and "It learns from the data alone: its head is new" in done.stderr
    healed = open_source(str(tmp_path / "run/model"))
    assert healed.head == "sequence-classification" and healed.outputs == 2
    assert healed.config["id2label"] == {"0": "good", "1": "bad"}


def test_a_body_gets_heads_of_their_own_and_keeps_the_name_of_its_class(texts, own_cache, tmp_path):
    """A family that nobody declared, whose result is of a class of ours."""
    sizes = {"embedding_size": 32, "max_position_embeddings": 64, "initializer_range": 0.3, **SIZES}
    torch.manual_seed(5)
    source, cut, run = (tmp_path / name for name in ("source", "cut", "run"))
    transformers.ElectraModel(transformers.ElectraConfig(**sizes)).save_pretrained(source)
    words(source, mask="<extra_id_0>")
    named(source, "ElectraForMaskedLM")
    said = stdout_of(typed(f"inspect {source}"))
    assert "its head is not in the files: it is used and measured as ElectraModel" in said
    how = "--heads 6 --keep 0,2 --head-dim keep --uncalibrated --no-proof"
    assert typed(f"shrink {source} {how} -o {cut}").returncode == 0
    done = heals(cut, texts, run)
    assert "perplexity" not in done.stderr, done.stderr
    assert read(run / "model/config.json")["architectures"] == ["LeanForMaskedLM"]


def test_an_image_tower_called_a_classifier_is_refused_by_the_name_of_what_it_lacks(own_cache, tmp_path):
    """Its class has no body to fall back on, and nothing that the library would draw is measured."""
    torch.manual_seed(0)
    vision = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = vision | {"vocab_size": 99, "num_hidden_layers": 1}
    config = transformers.SiglipConfig(
        vision_config=vision | {"image_size": 16, "patch_size": 8}, text_config=text, num_labels=10
    )
    source = tmp_path / "source"
    transformers.SiglipForImageClassification(config).save_pretrained(source)
    strangers.processor(source, 16, 3)
    weights = load_file(source / "model.safetensors")
    assert weights.pop("classifier.weight").shape == (10, 24) and weights.pop("classifier.bias").shape == (10,)
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    data = strangers.pictures(tmp_path / "images", side=16)
    for command in (f"shrink {source} --layers 1 --calibrate {data}", f"retrain {source} --data {data}"):
        done = typed(command, cwd=tmp_path)
        said = stderr_of(done)
        assert done.returncode == 3 and "lack 'classifier." in said and "architectures" in said, said
        assert not (tmp_path / "runs").exists()
