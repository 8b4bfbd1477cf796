"""Calibration data: what a name stands for, that the parts have no sample in common, and what is refused."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from leansurgeon.checkpoints.source import open_source
from leansurgeon.errors import UsageError
from leansurgeon.measure.data import calibration
from leansurgeon.measure.data.choose_task import parse_task, spell_task
from leansurgeon.tasks.text.vocab import make
from tests.conftest import build
from tests.support.content import side_of

TEXT = "\n".join(f"Sentence number {i} says that {i * i} is the square of {i}." for i in range(2_000))


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


@pytest.fixture
def language_model(tmp_path):
    """A saved family with a small tokenizer of its own beside it."""

    def made(family: str, head: str | None = None, **changes):
        folder = tmp_path / family
        model = build(family, **changes)
        model = getattr(transformers, head)(model.config) if head else model
        model.save_pretrained(folder)
        make("byte", None, []).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        return open_source(str(folder)), config

    return made


def rows(batches, key):
    return [tuple(row.tolist()) for batch in batches for row in batch[key]]


def test_parts_of_a_task_share_no_sample(tmp_path):
    source = open_source("digits-vit")
    found = calibration.open_calibration("task:digits", source, cache=tmp_path)
    images = [rows([{"x": b["pixel_values"].flatten(1)} for b in getattr(found, part)], "x") for part in PARTS]
    assert [len(part) for part in images] == [1150, 287, 360]
    assert all(not set(a) & set(b) for a, b in itertools.combinations(images, 2))


PARTS = ("fit", "guard", "heldout")


def test_a_tasks_list_is_read_back_from_the_name_that_is_printed():
    """As in `surgery.json` and `search`: several files of text are a list."""
    options = {"data": ["a.txt", "b c.txt"], "seq_len": 64, "shuffle": True, "limit": None}
    typed = spell_task("masked-lm", options)
    assert typed == "task:masked-lm,data=['a.txt', 'b c.txt'],seq_len=64,shuffle=True,limit=null"
    assert parse_task(typed) == ("masked-lm", options)
    assert parse_task("task:x,a=[1,2],b=[3,4],c=5") == ("x", {"a": [1, 2], "b": [3, 4], "c": 5})


def test_a_language_model_gets_windows_of_its_own_length(language_model, text, tmp_path):
    source, config = language_model("gpt2")
    found = calibration.open_calibration(str(text), source, cache=tmp_path / "cache", samples=20)
    length = config["n_positions"]
    assert all(b["input_ids"].shape[1] == length for part in PARTS for b in getattr(found, part))
    assert len(rows(found.fit, "input_ids")) == 20 and found.task.head == "causal-lm"


def test_an_encoder_without_a_head_gets_sentences(language_model, text, tmp_path):
    source, _ = language_model("bert", "BertModel")
    found = calibration.open_calibration(str(text), source, cache=tmp_path / "cache", samples=64)
    held_out = sum(side_of(line) == "test" for line in TEXT.split("\n"))
    assert [sum(len(b["input_ids"]) for b in getattr(found, part)) for part in PARTS] == [64, 16, held_out]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.txt", "no file or folder"),
        ("task:digit", r"'digits'"),
        ("task:digits,split", "write key=value"),
        ("task:digits,split_sed=1", "did you mean 'split_seed'"),
        ("task:listops", "takes images"),
        ("", "names no data"),
    ],
)
def test_what_cannot_serve_is_one_sentence(spec, says, tmp_path):
    with pytest.raises(UsageError, match=says):
        calibration.open_calibration(spec, open_source("digits-vit"), cache=tmp_path)


@pytest.mark.parametrize(
    ("flag", "spec"), [("--data", ""), ("--judge", "nowhere.txt"), ("--data", "task:digits,split")]
)
def test_an_error_names_the_flag_that_was_typed(spec, flag, tmp_path):
    with pytest.raises(UsageError) as caught:
        calibration.open_calibration(spec, open_source("digits-vit"), cache=tmp_path, flag=flag)
    assert set(re.findall(r"--\w+", f"{caught.value.message} {caught.value.hint}")) == {flag}


@pytest.fixture
def vision_model(tmp_path):
    """A saved vision model with an image processor of its own kind beside it."""

    def made(family: str, head: str | None = None, processor=None, **changes):
        model = build(family, **changes)
        model = getattr(transformers, head)(model.config) if head else model
        model.save_pretrained(tmp_path / "model")
        if processor:
            processor.save_pretrained(tmp_path / "model")
        return open_source(str(tmp_path / "model"))

    return made


def pictures(folder, classes, each=6):
    draw = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(each):
            Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


def test_images_look_as_the_models_processor_makes_them(vision_model, tmp_path):
    processor = transformers.ViTImageProcessorPil(
        size={"height": 8, "width": 8}, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7], resample=2
    )
    source = vision_model("vit", processor=processor, num_channels=3)
    folder = pictures(tmp_path / "images", [""])
    found = calibration.open_calibration(str(folder), source, cache=tmp_path / "cache")
    assert found.task is None
    # Every picture goes to one of the parts; each is one that transformers' own processor made, not augmented.
    ours = torch.cat([b["pixel_values"] for part in PARTS for b in getattr(found, part)])
    theirs = processor([Image.open(f) for f in sorted(folder.iterdir())], return_tensors="pt")["pixel_values"]
    nearest = (ours[:, None] - theirs[None]).abs().amax((2, 3, 4)).min(1)
    assert len(ours) == 6 and nearest.indices.unique().numel() == 6 and nearest.values.max() < 0.02


TEN = [f"class{i}" for i in range(10)]


@pytest.mark.parametrize(("classes", "scored"), [(TEN, True), (TEN[:3], True), (["bee", "cow", "owl"], False)])
def test_a_folder_is_scored_where_the_model_has_its_classes(vision_model, tmp_path, classes, scored):
    source = vision_model("vit", num_channels=3)
    folder = pictures(tmp_path / "images", classes)
    found = calibration.open_calibration(str(folder), source, cache=tmp_path / "cache")
    assert (found.task is not None) == scored == all("labels" in b for b in found.fit)


@pytest.mark.parametrize(("family", "head"), [("vit", "ViTModel"), ("clip_vision_model", None)])
def test_a_tower_gets_images_without_labels(vision_model, tmp_path, family, head):
    source = vision_model(family, head, num_channels=3)
    folder = pictures(tmp_path / "images", ["a", "b"])
    found = calibration.open_calibration(str(folder), source, cache=tmp_path / "cache")
    assert found.fit[0]["pixel_values"].shape[1:] == (3, 8, 8) and list(found.fit[0]) == ["pixel_values"]


@pytest.mark.parametrize(("family", "length"), [("roberta", 38), ("xlm-roberta", 38), ("nystromformer", 12)])
def test_the_longest_window_is_one_that_the_library_takes(language_model, text, tmp_path, family, length):
    """RoBERTa's positions start at pad_token_id + 1; Nystromformer takes one length only."""
    source, _ = language_model(family, vocab_size=300)
    found = calibration.open_calibration(str(text), source, cache=tmp_path / "cache", samples=8)
    assert found.fit[0]["input_ids"].shape[1] == length
    model = transformers.AutoModelForMaskedLM.from_pretrained(source.folder).eval()
    with torch.no_grad():
        assert found.score(model(found.fit[0]["input_ids"]).logits, found.fit[0])[1] > 0


@pytest.mark.parametrize(
    ("family", "head"), [("gpt2", "GPT2Model"), ("roberta", "RobertaModel"), ("nystromformer", "NystromformerModel")]
)
def test_sentences_run_through_the_library(language_model, text, tmp_path, family, head):
    source, _ = language_model(family, head, vocab_size=300)
    if family == "gpt2":  # as published: no token for padding
        settings = source.folder / "tokenizer_config.json"
        said = json.loads(settings.read_text())
        del said["pad_token"]
        settings.write_text(json.dumps(said))
    found = calibration.open_calibration(str(text), source, cache=tmp_path / "cache", samples=40)
    lengths = [int(length) for batch in found.fit for length in batch["attention_mask"].sum(1)]
    assert lengths == sorted(lengths)
    model = transformers.AutoModel.from_pretrained(source.folder).eval()
    for batch in found.fit:
        with torch.no_grad():
            assert torch.isfinite(model(**batch)[0]).all()


LISTOPS = "task:listops,train=8,eval=4,test=4,min_length=8"


@pytest.mark.parametrize(
    ("family", "spec", "says"),
    [
        ("bert", f"{LISTOPS},seq_len=60,max_length=50", r"\bseq_len\b.*\b60\b.*\b40\b"),
        ("nystromformer", f"{LISTOPS},seq_len=30,max_length=24", r"\b30 tokens\b.*\b12\b"),
        ("gpt2", "task:masked-lm", r"\bcausal\b"),
        ("bert", "task:causal-lm", r"\bmasked\b"),
        ("t5", "TEXT", r"\bencoder\b.*\bdecoder\b.*--uncalibrated"),
        ("bart", "task:causal-lm", r"\bencoder\b.*\bdecoder\b.*--uncalibrated"),
    ],
)
def test_data_that_the_model_cannot_run_on_is_refused(language_model, text, tmp_path, family, spec, says):
    source, _ = language_model(family)
    with pytest.raises(UsageError, match=says):
        calibration.open_calibration(str(text) if spec == "TEXT" else spec, source, cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("side", "units", "fit"),
    [(32, 768, 4_096), (224, 3_072, 334), (384, 3_072, 128), (224, 1_536, 167)],
)
def test_images_are_calibrated_on_as_many_tokens_as_text(side, units, fit):
    """224 x 224 are 196 patches each: 334 images have as many tokens as are usual of text, 65,536."""
    wanted = calibration.images_wanted({"x": torch.zeros(1, 3, side, side), "labels": torch.zeros(1)}, units)
    assert wanted.fit == fit and wanted.guard == fit // 4
