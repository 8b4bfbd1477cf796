"""What a model's processor says of images is checked before anything is divided by it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from leansurgeon.errors import UnsupportedModel
from leansurgeon.measure.data import images

WHOLE = {"image_mean": [0.5, 0.4, 0.3], "image_std": 0.25, "size": {"shortest_edge": 8}, "resample": 3}
WRONG = [
    {"image_mean": ["a"]},
    {"image_mean": {}},
    {"image_std": "0.5"},
    {"rescale_factor": "x"},
    {"resample": [2]},
]


def source(folder, said, name="preprocessor_config.json"):
    (folder / name).write_text(json.dumps(said))
    takes = SimpleNamespace(any_image_size=False)
    architecture = SimpleNamespace(takes=takes, library="transformers")
    return SimpleNamespace(folder=folder, flat_config={}, architecture=architecture, name="a-vit")


def test_what_is_whole_is_taken(tmp_path):
    found = images.of_transformers(source(tmp_path, WHOLE))
    assert found["mean"] == pytest.approx([0.5, 0.4, 0.3]) and found["std"] == pytest.approx([0.25] * 3)
    assert found["image_size"] == [8, 8] and found["interpolation"] == "bicubic"


def test_a_processor_of_pictures_and_texts(tmp_path):
    """As transformers 5 writes it: all parts of a processor in one file."""
    inside = {"image_processor": WHOLE, "processor_class": "CLIPProcessor"}
    found = images.of_transformers(source(tmp_path, inside, "processor_config.json"))
    assert found == images.of_transformers(source(tmp_path, WHOLE))
    (tmp_path / "preprocessor_config.json").unlink()
    assert not images.of_transformers(source(tmp_path, {"image_processor": 3}, "processor_config.json"))["mean"]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_value_of_the_wrong_kind_is_one_sentence(change, tmp_path):
    with pytest.raises(UnsupportedModel, match="says of its images cannot be read"):
        images.folder_options(source(tmp_path, WHOLE | change))
