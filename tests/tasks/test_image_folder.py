"""Images from folders, webdataset shards, parquet and the hub: the same samples whatever they lie in."""

from __future__ import annotations

import io
import json
import pickle
import random
import shutil
import subprocess
import tarfile

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from sklearn.metrics import top_k_accuracy_score
from timm.data import create_transform

from leansurgeon import tasks
from leansurgeon.errors import LeanSurgeonError, UsageError
from leansurgeon.tasks import base, chance
from tests.support.content import number_of_image
from tests.tasks.prepared import everything, prepare


def prepared(cache, name="folder", **options):
    return prepare(cache, name, **{"image_size": 16, "hold_out": False} | options)


COUNTS = {"train": 12, "val": 7}
RANDAUG = {"auto_augment": "rand-m9-mstd0.5", "random_erase": 0.5}


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def samples(split: str) -> list[tuple[bytes, int]]:
    rng = np.random.default_rng(len(split))
    sizes = [(24 + i % 5, 20 + i % 3, 3) for i in range(COUNTS[split])]
    return [(png(rng.integers(0, 256, size, dtype=np.uint8)), i % 3) for i, size in enumerate(sizes)]


def write(root, kind: str) -> str:
    """The same images as class folders, shards or parquet files; returns the task's `data`."""
    root.mkdir(exist_ok=True)
    for split in COUNTS:
        rows = sorted(samples(split), key=lambda row: row[1])  # the order in which folders are read
        if kind == "folder":
            for i, (content, label) in enumerate(rows):
                path = root / split / f"n0{label}" / f"{i:03d}.PNG"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        elif kind == "tar":
            half = len(rows) // 2
            for shard, numbers in enumerate((range(half), range(half, len(rows)))):
                with tarfile.open(root / f"set-{split}-{shard:04d}.tar", "w") as tar:
                    for i in numbers:
                        content, label = rows[i]
                        name = f"{split}/sample-{i:06d}"
                        add(tar, f"{name}.png", content)
                        if i % 2:
                            add(tar, f"{name}.json", json.dumps({"label": label}).encode())
                        else:
                            add(tar, f"{name}.cls", str(label).encode())
        else:
            features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abc"))})
            columns = {"image": [{"bytes": c, "path": None} for c, _ in rows], "label": [n for _, n in rows]}
            name = "validation" if split == "val" else split
            datasets.Dataset.from_dict(columns, features=features).to_parquet(root / f"{name}-00000-of-00001.parquet")
    return str(root)


@pytest.mark.parametrize("kind", ["folder", "tar", "parquet"])
def test_images_are_those_of_the_files_as_timm_prepares_them(tmp_path, kind):
    task = prepared(tmp_path / "cache", data=write(tmp_path / "data", kind), crop_pct=0.9)
    assert (task.size("train"), task.size("eval")) == (12, 7)
    batch = everything(task, "eval")
    rows = sorted(samples("val"), key=lambda row: row[1])
    assert batch["labels"].tolist() == [label for _, label in rows]
    reference = create_transform((3, 16, 16), crop_pct=0.9, interpolation="bicubic")
    for (content, _), pixels in zip(rows, batch["pixel_values"], strict=True):
        assert torch.equal(reference(Image.open(io.BytesIO(content))), pixels)
    assert task.model_overrides() == {"num_labels": 3, "image_size": 16, "num_channels": 3}
    assert not list((tmp_path / "cache").glob("*/*images.bin")) or kind == "parquet"
    assert torch.equal(everything(task, "eval", seed=5, epoch=3)["pixel_values"], batch["pixel_values"])


def test_a_sample_is_a_function_of_seed_epoch_and_index(tmp_path):
    task = prepared(tmp_path / "cache", data=write(tmp_path / "data", "folder"), **RANDAUG)
    whole = everything(task, "train")["pixel_values"]
    part = task.batch("train", np.array([4, 9, 0, 1]), seed=0, epoch=0)["pixel_values"]
    assert torch.equal(part, whole[[4, 9, 0, 1]])
    # Whatever the global generators were doing, and with a task that another process would have.
    random.seed(99), np.random.seed(98), torch.manual_seed(97)
    again = pickle.loads(pickle.dumps(task))
    assert torch.equal(everything(again, "train")["pixel_values"], whole)
    assert not torch.equal(everything(task, "train", epoch=1)["pixel_values"], whole)
    assert not torch.equal(everything(task, "train", seed=1)["pixel_values"], whole)


def test_the_global_generators_are_left_as_they_were():
    def draw():
        return random.random(), np.random.rand(), float(torch.rand(()))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    inside = [draw() for _ in chance.seed_each(0, 0, np.array([3, 7, 3]))]
    assert inside[0] == inside[2] != inside[1] and draw() == expected
    with pytest.raises(KeyError):
        for _ in chance.seed_each(0, 0, np.array([3, 7])):
            raise KeyError
    assert next(iter(chance.seed_each(0, 0, np.array([7])))) == 0  # the lock is free again


def test_one_folder_of_classes_is_split_by_what_its_images_show(tmp_path):
    """As PNG or as BMP, in another order of files, and with half of them twice: each picture stands on one side."""
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (20, 16, 3), dtype=np.uint8) for _ in range(120)]
    sides = []
    for suffix, order in (("png", 1), ("bmp", -1)):
        for number, picture in enumerate(pictures[::order]):
            folder = tmp_path / suffix / f"n{int(picture[0, 0, 0]) % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(picture).save(folder / f"{number:03}.{suffix}")
            if suffix == "bmp" and number % 2:
                Image.fromarray(picture).save(folder / f"again{number:03}.png")
        task = prepared(tmp_path / "cache", data=str(tmp_path / suffix), hold_out=True, augment=False)
        shown = {split: everything(task, split)["pixel_values"].numpy() for split in task.splits}
        sides.append({split: {pixels.tobytes() for pixels in images} for split, images in shown.items()})
    assert sides[0] == sides[1]
    shares = [number_of_image(picture) / 2**64 for picture in pictures]
    assert len(sides[0]["test"]) == sum(share < 0.1 for share in shares)
    assert len(sides[0]["eval"]) == sum(0.1 <= share < 0.2 for share in shares)
    assert len(sides[0]["train"]) == sum(share >= 0.2 for share in shares)
    assert "60 images that repeat others stay on one side" in task.held_out


def test_fewer_samples_are_of_all_classes(tmp_path):
    data = write(tmp_path / "data", "folder")
    task = prepared(tmp_path / "cache", data=data, train_samples=9, eval_samples=5)
    assert (task.size("train"), task.size("eval")) == (9, 5)
    assert len(set(everything(task, "train")["labels"].tolist())) == 3
    with pytest.raises(UsageError, match=r"\b12\b.*train_samples.*\b13\b"):
        prepared(tmp_path / "cache", data=data, train_samples=13)
    with pytest.raises(IndexError):
        task.batch("eval", np.array([5]), seed=0, epoch=0)


def test_images_without_classes_can_be_read_but_not_scored(tmp_path):
    write(tmp_path / "data", "folder")
    task = prepared(tmp_path / "cache", data=str(tmp_path / "data" / "train" / "n01"), channels=1, hold_out=True)
    batch = everything(task, "train")
    assert batch["pixel_values"].shape == (2, 1, 16, 16) and set(batch["labels"].tolist()) == {-100}
    assert "num_labels" not in task.model_overrides()


def test_top_five_is_that_of_scikit_learn_and_adds_up():
    task = tasks.make("imagenet", {"data": "x"})
    logits, labels = torch.randn(53, 12), torch.randint(12, (53,))
    labels[50:] = -100  # they fill up the last batch
    scores = [task.score(logits[rows], {"labels": labels[rows]}) for rows in (slice(0, 20), slice(20, 53))]
    sums = [float(a + b) for a, b in zip(scores[0][:4], scores[1][:4], strict=True)]
    found = task.metric_value(tasks.Sums(*sums, scores[0].extra + scores[1].extra))
    for k, name in ((1, "accuracy"), (5, "top5")):
        expected = top_k_accuracy_score(labels[:50].numpy(), logits[:50].numpy(), k=k, labels=np.arange(12))
        assert found[name] == pytest.approx(expected)
    few = base.classification_score(torch.randn(4, 3), torch.tensor([0, 1, 2, -100]), top=5)
    assert few.extra.tolist() == [3.0]


def test_soft_labels_and_smoothing_are_torchs():
    logits, labels = torch.randn(9, 6), torch.randint(6, (9,))
    soft = 0.3 * torch.nn.functional.one_hot(labels, 6) + 0.7 * torch.nn.functional.one_hot(labels.flip(0), 6)
    for given, smoothing in ((labels, 0.1), (soft, 0.0), (soft, 0.1)):
        score = base.classification_score(logits, given, smoothing)
        expected = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(logits, given)
        assert float(score.loss_sum / score.loss_count) == pytest.approx(float(expected), rel=1e-5)
        none = torch.zeros(2, 6) if given.dim() == 2 else torch.full((2,), -100)
        wider = base.classification_score(torch.cat([logits, torch.randn(2, 6)]), torch.cat([given, none]), smoothing)
        assert all(torch.allclose(a, b) for a, b in zip(score[:4], wider[:4], strict=True))
    assert base.classification_score(logits, soft).metric_sum == (logits.argmax(1) == labels.flip(0)).sum()
    half = base.classification_score(logits.bfloat16().requires_grad_(), labels)
    assert half.loss_sum.dtype == torch.float32 and half.loss_sum.requires_grad and not half.metric_sum.requires_grad
    tokens, targets = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    smooth, plain = base.token_score(tokens, targets, 0.1), base.token_score(tokens, targets)
    assert smooth.metric_sum == plain.metric_sum == plain.loss_sum != smooth.loss_sum


def test_a_hub_set_is_read_as_its_parquet_files_are(tmp_path, monkeypatch):
    root = write(tmp_path / "data", "parquet")
    local = datasets.load_dataset(root, cache_dir=str(tmp_path / "hf"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: local[split])
    hub, mine = (prepared(tmp_path / "cache", data=data) for data in ("hub:someone/pictures", root))
    assert torch.equal(everything(hub, "eval")["pixel_values"], everything(mine, "eval")["pixel_values"])
    assert hub.data_classes == mine.data_classes == ["a", "b", "c"]


def test_bad_sets_are_one_sentence(tmp_path):
    data, shards, tables = tmp_path / "data", tmp_path / "shards", tmp_path / "tables"
    write(data, "folder")
    (data / "val" / "n09").mkdir()
    (data / "val" / "n09" / "a.png").write_bytes(samples("train")[0][0])
    write(shards, "tar")
    with tarfile.open(shards / "set-train-0002.tar", "w") as tar:
        add(tar, "a/lonely.png", b"")
    tables.mkdir()
    parquet.write_table(pa.table({"picture": [b"x"], "label": [0]}), tables / "train.parquet")
    for options, message in (
        ({"data": data}, r"\bval\b.*'n09'"),
        ({"data": shards}, r"set-train-0002\.tar"),
        ({"data": tables}, r"'image'.*picture"),
        ({"data": write(tmp_path / "again", "folder"), "classes": 2}, r"\b3\b.*\b2\b"),
        ({"data": "x", "channels": 1, "mean": [0.5, 0.5, 0.5]}, r"\b3\b.*\b1\b"),
        ({"data": tmp_path / "nowhere"}, r"train/CLASS"),
    ):
        with pytest.raises(UsageError, match=message):
            prepared(tmp_path / "cache", **options | {"data": str(options["data"])})
    (shards / "set-train-0002.tar").write_bytes(b"x" * 600)
    with pytest.raises(UsageError, match=r"set-train-0002\.tar\b.*\btar file\b"):
        prepared(tmp_path / "cache", data=str(shards))
    with pytest.raises(LeanSurgeonError, match=r"timm/mini-imagenet"):
        prepared(tmp_path, data="hub:timm/mini-imagenet")
    assert not list((tmp_path / "cache").glob(".partial*"))


def test_imagenet_as_it_is_downloaded_is_told_what_to_do(tmp_path):
    """Validation images beside each other, as its archive unpacks, and an archive for each class of training images."""
    train, val = tmp_path / "imagenet" / "train", tmp_path / "imagenet" / "val"
    data = write(tmp_path / "imagenet", "folder")
    for path in [*val.glob("*/*")]:
        path.rename(val / f"ILSVRC2012_val_0000{path.stem}{path.parent.name[-1]}.JPEG")
    for folder in [path for path in val.iterdir() if path.is_dir()]:
        folder.rmdir()
    with pytest.raises(UsageError, match=r"val holds 7 images beside each other, and no folders of classes") as flat:
        prepared(tmp_path / "cache", "imagenet", data=data)
    assert f"folders named as those in {train}" in flat.value.hint and "task.eval_data" in flat.value.hint

    classes = sorted(train.iterdir())
    for folder in classes:
        with tarfile.open(train / f"{folder.name}.tar", "w") as tar:
            for image in sorted(folder.iterdir()):
                tar.add(image, f"{folder.name}_{image.name}")
        shutil.rmtree(folder)
    with pytest.raises(UsageError, match=rf"train/{classes[0].name}\.tar: the sample .* has no class") as packed:
        prepared(tmp_path / "cache", "imagenet", data=data)
    advice = packed.value.hint[packed.value.hint.index("cd ") :]
    subprocess.run(["sh", "-c", advice], check=True)
    for path in [*val.iterdir()]:
        (val / f"n0{path.stem[-1]}").mkdir(exist_ok=True)
        path.rename(val / f"n0{path.stem[-1]}" / path.name)
    task = prepared(tmp_path / "cache", "imagenet", data=data)
    assert (task.size("train"), task.size("eval")) == (12, 7) and task.data_classes == [c.name for c in classes]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean": [123, 117, 104]}, r"\bmean\b.*\b0\.\.1\b"),
        ({"std": [0, 0, 0]}, r"\bstd\b.*\b0\b"),
        ({"std": [58, 57, 57]}, "std .* at most 1"),
    ],
    ids=["mean-255", "std-0", "std-255"],
)
def test_options_that_no_image_can_have(options, words):
    with pytest.raises(UsageError, match=words):
        tasks.make("folder", {"data": "x", **options})


def test_an_augmentation_that_timm_does_not_know(tmp_path):
    data = write(tmp_path / "data", "folder")
    for text in ("rubbish", "rand-x9"):
        with pytest.raises(UsageError, match=rf"\btimm\b.*\bauto_augment '{text}'"):
            prepared(tmp_path / "cache", data=data, auto_augment=text)
    assert prepared(tmp_path / "cache", data=data, auto_augment="rubbish", augment=False).size("train") == 12


def test_images_that_come_later_are_seen_however_deep(tmp_path):
    data = write(tmp_path / "data", "folder")
    deep = tmp_path / "data" / "train" / "n00" / "more" / "still"
    deep.mkdir(parents=True)
    assert prepared(tmp_path / "cache", data=data).size("train") == 12
    (deep / "late.png").write_bytes(samples("train")[0][0])
    assert prepared(tmp_path / "cache", data=data).size("train") == 13


def test_classes_are_two_or_more_and_an_empty_or_hidden_folder_is_none(tmp_path):
    write(tmp_path / "data", "folder")
    (tmp_path / "one").mkdir()
    (tmp_path / "data" / "train" / "n00").rename(tmp_path / "one" / "n00")
    with pytest.raises(UsageError, match=r"\bone\b.*\bone class\b"):
        prepared(tmp_path / "cache", data=str(tmp_path / "one"))
    shutil.rmtree(tmp_path / "data" / "val" / "n00")
    for name in ("n00", ".ipynb_checkpoints", "__MACOSX"):
        (tmp_path / "data" / "train" / name).mkdir()
    (tmp_path / "data" / "train" / "__MACOSX" / "a.png").write_bytes(samples("train")[0][0])
    assert prepared(tmp_path / "cache", data=str(tmp_path / "data")).data_classes == ["n01", "n02"]


def test_shards_say_classes_by_name(tmp_path):
    """Bare words, as JSON and under "label": classes of the training shards, by their names, also where the others lack
    one.
    """
    said = {"train": ["cat", '"dog"', "cat", '{"label": "sea lion"}'], "val": ["sea lion", "dog"]}
    for split, labels in said.items():
        (tmp_path / split).mkdir()
        with tarfile.open(tmp_path / split / "0.tar", "w") as tar:
            for i, label in enumerate(labels):
                add(tar, f"{i:04d}.png", png(np.full((20, 20, 3), 40 * i + len(split), dtype=np.uint8)))
                add(tar, f"{i:04d}.{'json' if label.startswith('{') else 'cls'}", f"{label}\n".encode())
    task = prepared(tmp_path / "cache", data=str(tmp_path))
    assert task.data_classes == ["cat", "dog", "sea lion"]
    assert everything(task, "train")["labels"].tolist() == [0, 1, 0, 2]
    assert everything(task, "eval")["labels"].tolist() == [2, 1]


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def test_an_unreadable_image_of_a_shard_is_named(tmp_path):
    task = prepared(tmp_path / "cache", data=write(tmp_path / "data", "tar"))
    path = tmp_path / "data" / "set-val-0000.tar"
    content = bytearray(path.read_bytes())
    content[512 + 20 : 512 + 400] = bytes(380)
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"\bimage\b.*set-val-0000\.tar \(byte 512\).*\bformat\b.*\bPNG\b"):
        everything(task, "eval")
