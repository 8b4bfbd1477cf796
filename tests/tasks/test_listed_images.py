"""Images that a table names: metadata.csv beside them, and train.csv with folders of images as on Kaggle."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
from PIL import Image

from leansurgeon.tasks.user_data import recognise
from tests.tasks.prepared import everything, prepare

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
    found = recognise(make(tmp_path / "data", layout))
    assert (found.kind, len(found.columns)) == ("classes", 2)
    lines = []
    batches = batches_of(prepared(tmp_path, found.names[0], lines.append))
    seen = set()
    for batch in (batches["train"], batches["eval"]):
        for pixels, label in zip(batch["pixel_values"], batch["labels"], strict=True):
            number = round(float(pixels.mean()) * 255 / 3)
            assert int(label) == number % 3
            seen.add(number)
    assert len(seen) >= 24 and seen <= set(range(30))
    assert any("1 rows name no image" in line for line in lines) == (layout in ("kaggle", "file"))


def test_a_damaged_table_among_pictures_is_passed_over(tmp_path):
    for name in NAMES:
        draw(tmp_path / name / "0.png", 1)
    (tmp_path / "notes.csv").write_text('file_name,label\n"open,1\n')
    (tmp_path / "metadata.csv").write_bytes(b"\xff\xfe")
    assert recognise(str(tmp_path)).columns == ()


def test_a_folder_called_train_beside_other_classes_is_a_class(tmp_path):
    for name in ("train", "bus", "car"):
        for i in range(6):
            draw(tmp_path / "traffic" / name / f"{i}.png", i)
    task = prepared(tmp_path, tmp_path / "traffic")
    labels = {split: batch["labels"].tolist() for split, batch in batches_of(task).items()}
    assert sum(map(len, labels.values())) == 18 and labels["eval"]
    assert {label for some in labels.values() for label in some} == {0, 1, 2}


def test_parts_by_other_names_are_parts_and_a_test_is_read_last(tmp_path):
    for part, number in (("Training", 0), ("Testing", 40)):
        for name in NAMES:
            for i in range(6):
                draw(tmp_path / "parts" / part / name / f"{i}.png", i + number)
    batches = batches_of(prepared(tmp_path, tmp_path / "parts"))
    assert len(batches["train"]["labels"]) + len(batches["eval"]["labels"]) == len(batches["test"]["labels"]) == 18
    assert (
        float(batches["train"]["pixel_values"].max()) * 255 < 119 <= float(batches["test"]["pixel_values"].min()) * 255
    )


def prepared(folder, data, say=print):
    options = {"data": str(data), "image_size": 8, "augment": False, "mean": [0.0] * 3, "std": [1.0] * 3}
    return prepare(folder / "cache", "folder", say=say, **options)


def batches_of(task):
    return {split: everything(task, split) for split in task.splits}
