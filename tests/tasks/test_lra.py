"""LRA text, retrieval and image, and CIFAR-10, from made-up files in their published forms."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch

from leansurgeon import tasks
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.models.nystromformer_lra import NystromformerLraConfig, NystromformerLraForSequenceClassification
from leansurgeon.tasks.long_range import lra
from tests.tasks.prepared import everything, prepare

# -- IMDb ------------------------------------------------------------------------------------------

REVIEWS = {
    split: [(f"{split} {i} <br /> caf\u00e9 " + "word " * (7 * i), i % 2) for i in range(count)]
    for split, count in (("train", 12), ("test", 9))
}


def write_reviews(root) -> str:
    (root / "plain_text").mkdir(parents=True)
    for split, rows in REVIEWS.items():
        # In the order of the published files, first all of one class.
        in_order = sorted(enumerate(rows), key=lambda row: (row[1][1], f"{row[0]}_"))
        columns = {"text": [text for _, (text, _) in in_order], "label": [label for _, (_, label) in in_order]}
        datasets.Dataset.from_dict(columns).to_parquet(root / "plain_text" / f"{split}-00000-of-00001.parquet")
    return str(root)


def test_reviews_are_bytes(tmp_path):
    data = write_reviews(tmp_path / "data")
    task = prepare(tmp_path / "cache", "lra-text", data=data, max_length=200)
    for split, name in (("train", "train"), ("eval", "test")):
        batch = everything(task, split)
        assert torch.equal(batch["attention_mask"] == 1, batch["input_ids"] > 0)
        texts = [bytes((ids[ids > 0] - 1).tolist()) for ids in batch["input_ids"]]
        found = zip(texts, batch["labels"].tolist(), strict=True)
        assert sorted(found) == sorted((text.encode()[:200], label) for text, label in REVIEWS[name])
    some = prepare(tmp_path / "cache", "lra-text", data=data, train_samples=6, pad="max")
    assert everything(some)["input_ids"].shape == (6, 4096) and set(everything(some)["labels"].tolist()) == {0, 1}
    with pytest.raises(UsageError, match=r"'lra-text'.*\b9\b.*eval_samples.*\b10\b"):
        prepare(tmp_path / "cache", "lra-text", data=data, eval_samples=10)


# -- AAN -------------------------------------------------------------------------------------------


def write_pairs(root) -> tuple[str, dict[str, list]]:
    made = {}
    (root / "tsv_data").mkdir(parents=True)
    for split, count in (("train", 8), ("eval", 5), ("test", 3)):
        made[split] = [(i % 2, f'first "{i} \u00fc' * i, f"second {split}\\n {i}") for i in range(1, count + 1)]
        lines = [f"{float(label)}\tP{i}\tQ{i}\t{one}\t{two}\n" for i, (label, one, two) in enumerate(made[split])]
        (root / "tsv_data" / f"new_aan_pairs.{split}.tsv").write_text("".join(lines), encoding="utf-8")
    return str(root), made


def test_pairs_are_two_inputs_of_the_dual_model(tmp_path):
    data, made = write_pairs(tmp_path / "lra_release")
    task = prepare(tmp_path / "cache", "lra-retrieval", data=data)
    for split, rows in made.items():
        batch = everything(task, split)
        assert batch["labels"].tolist() == [label for label, _, _ in rows]
        for suffix, column in (("", 1), ("_2", 2)):
            ids = batch[f"input_ids{suffix}"]
            assert [bytes((row[row > 0] - 1).tolist()).decode() for row in ids] == [row[column] for row in rows]
    config = NystromformerLraConfig(
        vocab_size=512, hidden_size=16, num_hidden_layers=1, max_position_embeddings=4096, dual_input=True, num_labels=2
    )
    batch = everything(task, "eval")
    logits = NystromformerLraForSequenceClassification(config).eval()(**batch).logits
    assert task.score(logits, batch).metric_count == 5


def test_bad_pairs_are_one_sentence(tmp_path):
    with pytest.raises(UsageError, match=r"AAN.*new_aan_pairs\.train\.tsv.*lra_release\.gz"):
        prepare(tmp_path / "cache", "lra-retrieval", data=str(tmp_path / "nowhere"))
    data, _ = write_pairs(tmp_path / "data")
    path = tmp_path / "data" / "tsv_data" / "new_aan_pairs.eval.tsv"
    for content, message in (
        ("1.0\ta\tb\tc\n", "line 1: 4 fields where 5"),
        ("2.0\ta\tb\tc\td\n", r"label b'2\.0'"),
        ("0.7\ta\tb\tc\td\n", r"label b'0\.7'"),
        ("1e999\ta\tb\tc\td\n", r"label b'1e999'"),
    ):
        path.write_text(content)
        with pytest.raises(UsageError, match=message):
            prepare(tmp_path / "cache", "lra-retrieval", data=data)


# -- CIFAR-10 --------------------------------------------------------------------------------------


NAMES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}


def cifar_images(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, 32, 32, 3) and labels."""
    images, labels = [], []
    for name in NAMES[split]:
        rng = np.random.default_rng(len(name) + int(name[-1]) if name[-1].isdigit() else 0)
        images.append(rng.integers(0, 256, (20, 3072), dtype=np.uint8))
        labels.append(rng.integers(0, 10, 20, dtype=np.uint8))
    return np.concatenate(images).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), np.concatenate(labels)


def write_cifar(root) -> str:
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    for split in ("train", "test"):
        images, labels = cifar_images(split)
        table = datasets.Dataset.from_dict({"img": list(images), "label": labels.tolist()}, features=features)
        table.to_parquet(root / "plain_text" / f"{split}-00000-of-00001.parquet")
    return str(root)


def test_cifar_is_read(tmp_path):
    data = write_cifar(tmp_path / "data")
    task = prepare(tmp_path / "cache", "cifar10", data=data, augment=False)
    batch = everything(task)
    pixels = batch["pixel_values"].permute(0, 2, 3, 1) * torch.tensor([0.2470, 0.2435, 0.2616])
    pixels = (pixels + torch.tensor([0.4914, 0.4822, 0.4465])) * 255
    images, labels = cifar_images("train")
    assert np.allclose(pixels.numpy(), images, atol=1e-3) and batch["labels"].tolist() == labels.tolist()
    moved = prepare(tmp_path / "cache", "cifar10", data=data)
    assert not torch.equal(everything(moved)["pixel_values"], batch["pixel_values"])
    assert torch.equal(everything(moved, "eval")["pixel_values"], everything(task, "eval")["pixel_values"])


def test_grey_pixels_are_those_of_tensorflow(tmp_path):
    # tf.image.rgb_to_grayscale of TensorFlow 2 on these pixels, worked out by its formula in exact numbers:
    # floor(255.5 * (0.2989 R + 0.5870 G + 0.1140 B) / 255).
    pixels = [(255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 255, 0), (0, 0, 255), (17, 130, 201)]
    found = lra.grey(np.array(pixels, dtype=np.uint8)[:, None, None])[:, 0, 0]
    assert found.tolist() == [255, 0, 76, 149, 29, 104]

    data = write_cifar(tmp_path / "data")
    task = prepare(tmp_path / "cache", "lra-image", data=data)
    parts = [everything(task, split)["input_ids"] for split in ("train", "eval", "test")]
    assert [len(part) for part in parts] == [90, 10, 20]
    images = np.concatenate([cifar_images(split)[0] for split in ("train", "test")])
    grey = lra.grey(images).reshape(120, 1024).astype(np.int64)
    assert torch.equal(torch.cat(parts), torch.from_numpy(grey))
    hidden = everything(task)  # id 0, black, as in every task of the authors' code
    assert torch.equal(hidden["attention_mask"] == 1, hidden["input_ids"] > 0)
    shown = prepare(tmp_path / "cache", "lra-image", data=data, mask_black=False)
    assert set(everything(shown)) == {"input_ids", "labels"}


@pytest.mark.parametrize("bad", ["size", "label"])
def test_other_images_are_one_sentence(tmp_path, bad):
    for split in ("train", "test"):
        pixels = np.zeros((1, 28 if bad == "size" else 32, 32, 3), dtype=np.uint8)
        columns = {"img": list(pixels), "label": [10 if bad == "label" else 3]}
        features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
        datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / f"{split}.parquet")
    with pytest.raises(UsageError, match=r"train\.parquet.* (32 x 28 pixels|labelled 10)\b.*CIFAR-10"):
        prepare(tmp_path / "cache", "cifar10", data=str(tmp_path))


def test_what_is_not_there_is_one_sentence(tmp_path):
    for name, words in (("cifar10", "uoft-cs/cifar10"), ("lra-text", "stanfordnlp/imdb")):
        with pytest.raises(LeanSurgeonError, match=f"{words}, split train, .*Offline") as caught:
            prepare(tmp_path, name)
        assert "parquet files" in caught.value.hint
        with pytest.raises(UsageError, match=r"(CIFAR-10|reviews)\b.*nowhere\b"):
            prepare(tmp_path, name, data=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("suffix", "bad", "words"),
    [
        ("parquet", {"text": "fine", "label": 7}, r"\brow 2: .*\blabel 7\b.*\b0 or 1\b"),
        ("jsonl", {"text": "fine", "label": "pos"}, r"\brow 2: .*\blabel 'pos'.*\b0 or 1\b"),
        ("parquet", {"text": "fine", "label": None}, r"\brow 2: .*\blabel None\b.*\b0 or 1\b"),
        ("jsonl", {"text": None, "label": 1}, r"\brow 2: .*\btext\b.*\bNone\b"),
    ],
    ids=["above", "word", "no-label", "no-text"],
)
def test_bad_reviews_are_one_sentence(tmp_path, suffix, bad, words):
    rows = [{"text": "good", "label": type(bad["label"] or 0)(1)}, bad]  # a parquet column has one type
    for split in ("train", "test"):
        table = datasets.Dataset.from_list(rows)
        (table.to_json if suffix == "jsonl" else table.to_parquet)(tmp_path / f"{split}.{suffix}")
    with pytest.raises(UsageError, match=words):
        prepare(tmp_path / "cache", "lra-text", data=str(tmp_path))


def test_all_files_of_a_part_are_read(tmp_path):
    for split, number in (("train", 0), ("train", 1), ("test", 0)):
        rows = [{"text": f"{split} {number} {i}", "label": i % 2} for i in range(4)]
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / f"{split}-0000{number}-of-00002.parquet")
    task = prepare(tmp_path / "cache", "lra-text", data=str(tmp_path))
    assert (task.size("train"), task.size("eval")) == (8, 4)


def test_no_reviews_are_one_sentence(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("")
    for data, words in ((tmp_path, r"\breviews\b.*'train'"), (tmp_path / "train.jsonl", "no train and test tables")):
        with pytest.raises(UsageError, match=words):
            prepare(tmp_path / "cache", "lra-text", data=str(data))


@pytest.mark.parametrize("name", ["lra-text", "lra-retrieval", "lra-image", "listops", "pathfinder"])
def test_a_model_with_too_few_positions_is_refused_before_any_data_is_made(name, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    task = tasks.make(name, {"data": str(tmp_path)} if name.startswith("lra-") else {})
    with pytest.raises(UsageError, match=r"seq_len.*\b512\b"):
        task.prepare(tmp_path / "cache", tmp_path / "model", workers=1, say=lambda line: None)
    assert not (tmp_path / "cache").exists()
