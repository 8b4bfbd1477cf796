"""Images that a table names: metadata.csv beside them, and train.csv with folders of images as on Kaggle."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image

from leansurgeon import tasks
from leansurgeon.tasks.user_data import recognise

NAMES = ["cat", "dog", "emu"]


def draw(path, number):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), 3 * number, dtype=np.uint8)).save(path)


def write(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def make(root, layout):
    """Thirty images, of which number i is of class i % 3 and 3 * i bright; returns what is named as data."""
    root.mkdir()
    labelled = [(i, NAMES[i % 3]) for i in range(30)]
    if layout.startswith("metadata"):
        for i, _ in labelled:
            draw(root / f"{i}.png", i)
        write(root / layout, [{"file_name": f"{i}.png", "label": name} for i, name in labelled])
    elif layout == "parts":
        for i, _ in labelled:
            draw(root / ("train" if i < 24 else "validation") / f"{i}.png", i)
        for part, some in (("train", labelled[:24]), ("validation", labelled[24:])):
            write(root / part / "metadata.csv", [{"file_name": f"{i}.png", "label": name} for i, name in some])
    else:  # kaggle: names without an ending, and other images of the same names
        for i, _ in labelled:
            draw(root / "train" / f"{i}.jpg", i)
            draw(root / "test" / f"{i}.jpg", 80)
        write(root / "train.csv", [{"id": i, "breed": name} for i, name in labelled] + [{"id": 99, "breed": "cat"}])
        write(root / "sample_submission.csv", [{"id": i, "breed": "cat"} for i in range(30)])
        write(root / "test.csv", [{"id": i} for i in range(30)])
    return str(root / "train.csv") if layout == "file" else str(root)


@pytest.mark.parametrize("layout", ["metadata.csv", "metadata.jsonl", "parts", "kaggle", "file"])
def test_images_and_their_classes_are_those_of_the_table(tmp_path, layout):
    data = make(tmp_path / "data", layout)
    found = recognise(data)
    assert (found.kind, len(found.columns)) == ("classes", 2)
    options = {"data": found.names[0], "image_size": 8, "augment": False, "mean": [0.0] * 3, "std": [1.0] * 3}
    task = tasks.make("folder", options)
    lines = []
    task.prepare(tmp_path / "cache", None, workers=1, say=lines.append)
    seen = set()
    for split in ("train", "eval"):
        batch = task.batch(split, np.arange(task.size(split)), seed=0, epoch=0)
        for pixels, label in zip(batch["pixel_values"], batch["labels"], strict=True):
            number = round(float(pixels.mean()) * 255 / 3)
            assert int(label) == number % 3
            seen.add(number)
    assert len(seen) >= 24 and seen <= set(range(30))
    assert any("1 rows name no image" in line for line in lines) == (layout in ("kaggle", "file"))


def test_a_folder_called_train_beside_other_classes_is_a_class_and_a_test_is_read_last(tmp_path):
    for name in ("train", "bus", "car"):
        for i in range(6):
            draw(tmp_path / "traffic" / name / f"{i}.png", i)
    for part in ("Training", "Testing"):
        for name in NAMES:
            for i in range(6):
                draw(tmp_path / "parts" / part / name / f"{i}.png", i + 40 * (part == "Testing"))
    options = {"image_size": 8, "augment": False, "mean": [0.0] * 3, "std": [1.0] * 3}
    for data, sizes in (("traffic", (18, 0)), ("parts", (18, 18))):
        task = tasks.make("folder", {"data": str(tmp_path / data), **options})
        task.prepare(tmp_path / "cache", None, workers=1, say=print)
        there = {split: task.size(split) for split in ("train", "eval", "test")[: 2 if sizes[1] else 3]}
        assert sum(there.values()) == sizes[0] and there["eval"]
        labels = [task.batch(s, np.arange(n), seed=0, epoch=0)["labels"].tolist() for s, n in there.items()]
        assert {label for some in labels for label in some} == {0, 1, 2}
        if sizes[1]:
            batch = task.batch("test", np.arange(sizes[1]), seed=0, epoch=0)
            assert task.size("test") == sizes[1] and float(batch["pixel_values"].min()) * 255 >= 119


def test_a_damaged_table_among_pictures_is_passed_over(tmp_path):
    for name in NAMES:
        draw(tmp_path / name / "0.png", 1)
    (tmp_path / "notes.csv").write_text('file_name,label\n"open,1\n')
    (tmp_path / "metadata.csv").write_bytes(b"\xff\xfe")
    assert recognise(str(tmp_path)).columns == ()
