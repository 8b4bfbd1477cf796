"""Forms in which people have labels, through the commands: each says what the model reaches by plain libraries, and
keeps its head and its names.
"""

from __future__ import annotations

import csv
import io
import json
import tarfile

import datasets
import numpy as np
import pytest
import timm
import torch
import transformers
from PIL import Image

from tests.cli.test_classes import NAMES, digits, folders, named, trained  # noqa: F401, fixtures
from tests.support.command_line import leansurgeon
from tests.support.models import strangers
from tests.support.models.word_models import WORDS, words

CLASSES = 12


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANSURGEON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def fit(model, answer, inputs, labels, steps, batch=128):
    """Train a tiny model until it knows its data; the share that it is right on."""
    updates = torch.optim.AdamW(model.parameters(), 3e-3)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(labels), (batch,))
        loss = torch.nn.functional.cross_entropy(answer(inputs[chosen]), labels[chosen])
        updates.zero_grad()
        loss.backward()
        updates.step()
    model.eval()
    with torch.no_grad():
        right = (answer(inputs).argmax(-1) == labels).float().mean()
    assert right > 0.9
    return float(right)


def greys(number):
    """60 pictures of a class of its own, a bright bar of 8 x 8 pixels in noise."""
    made = np.random.default_rng(number).integers(0, 90, (60, 8, 8), dtype=np.uint8)
    bar = slice(4 * (number % 2), 4 * (number % 2) + 4)
    if number < 6:
        made[:, number, bar] = 250
    else:
        made[:, bar, number - 6] = 250
    return made


@pytest.fixture(scope="session")
def bars(tmp_path_factory):
    """A timm model without names that knows twelve classes, and the share that it is right on."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bars") / "timm"
    args = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 3, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **args)
    pixels = torch.tensor(np.concatenate([greys(n) for n in range(CLASSES)]) / 255, dtype=torch.float32)
    pixels = (pixels[:, None].expand(-1, 3, -1, -1) - 0.5) / 0.5
    right = fit(model, model, pixels, torch.arange(CLASSES).repeat_interleave(60), 120)
    how = {"input_size": [3, 8, 8], "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "interpolation": "bicubic"}
    timm.models.save_for_hf(
        model, str(folder), model_config={"num_classes": CLASSES, "model_args": args, "pretrained_cfg": how},
        safe_serialization=True,
    )  # fmt: skip
    return folder, right


@pytest.fixture
def numbered(tmp_path):
    """Class folders called by numbers from `first` on."""

    def made(first):
        for number in range(CLASSES):
            folder = tmp_path / "images" / str(number + first)
            folder.mkdir(parents=True)
            for i, picture in enumerate(greys(number)):
                Image.fromarray(picture).convert("RGB").save(folder / f"{i}.png")
        return tmp_path / "images"

    return made


@pytest.mark.parametrize("first", [0, 1])
def test_folders_by_number_are_in_natural_order_for_every_command(bars, numbered, tmp_path, first):
    """0..11 and 1..12 on a timm model: 10 does not stand behind 1."""
    (model, right), data = bars, numbered(first)
    cut = leansurgeon("shrink", model, "--layers", 2, "--calibrate", data, "--heal", "none", "-o", tmp_path / "cut")
    assert cut.returncode == 0 and f"{first} is output 0" in " ".join(cut.stderr.split()), cut.stderr
    record = json.loads((tmp_path / "cut" / "surgery.json").read_text())
    said = [record["proof"]["compared"]["accuracy"]["source"]]
    if first:
        judged = leansurgeon("judge", tmp_path / "cut", "--data", data, "--json")
        said.append(json.loads(judged.stdout)["judged"][str(data)]["accuracy"]["source"])
        ranked = leansurgeon("heads", model, "--data", data, "--steps", 2, "--samples", 64, "--json")
        said.append(json.loads(ranked.stdout)["whole"]["accuracy"])
        search = ("--params", "34k", "--tries", 2, "--samples", 32, "--workspace", tmp_path / "runs")
        tried = leansurgeon("search", model, "--data", data, *search)
        kappa = leansurgeon("kappa", model, "--data", data)
        for done in (tried, kappa):
            assert done.returncode == 0 and "1 is output 0" in " ".join(done.stderr.split()), done.stderr
    assert said == pytest.approx([right] * len(said), abs=0.06)


def before(done, run, model):
    """What a healing says of the model at its start; head and names are as they were."""
    assert done.returncode == 0 and "new head" not in done.stderr, done.stderr
    own, made = (json.loads((place / "config.json").read_text()) for place in (model, run / "model"))
    assert len(made["id2label"]) == len(own["id2label"])
    return json.loads((run / "summary.json").read_text())["before"]["metric"], made["id2label"]


def truth(model, images, labels):
    """Of plain transformers, on all images."""
    plain = transformers.AutoModelForImageClassification.from_pretrained(model).eval()
    pixels = (torch.tensor(images / 255, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) - 0.3) / 0.2
    with torch.no_grad():
        return float((plain(pixels).logits.argmax(-1) == torch.tensor(labels)).float().mean())


@pytest.mark.parametrize("form", ["parquet", "webdataset", "unlabelled", "hidden"])
def test_forms_of_labelled_images(trained, digits, folders, tmp_path, form):  # noqa: F811
    """Parquet whose ClassLabel has another order; shards of five of the ten classes; what a notebook leaves behind."""
    model, (images, labels) = named(trained, tmp_path / "model", NAMES), digits
    chosen = np.flatnonzero(labels < (5 if form == "webdataset" else 10))[:600]
    pictures = []
    for image in images[chosen]:
        buffer = io.BytesIO()
        Image.fromarray(image).convert("RGB").save(buffer, "png")
        pictures.append(buffer.getvalue())
    if form == "parquet":
        order = sorted(NAMES)
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=order)})
        columns = {"image": [{"bytes": content, "path": None} for content in pictures]}
        columns["label"] = [order.index(NAMES[label]) for label in labels[chosen]]
        data = tmp_path / "train.parquet"
        datasets.Dataset.from_dict(columns, features=features).to_parquet(data)
    elif form in ("webdataset", "unlabelled"):
        data = tmp_path / "shard-0.tar"
        with tarfile.open(data, "w") as tar:
            for i, (content, label) in enumerate(zip(pictures, labels[chosen], strict=True)):
                label = ("-1", "")[i % 2] if form == "unlabelled" and i < 30 else label
                for suffix, part in (("png", content), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{i:04d}.{suffix}")
                    member.size = len(part)
                    tar.addfile(member, io.BytesIO(part))
    else:
        data = folders(NAMES)
        (data / ".ipynb_checkpoints").mkdir()
        (data / ".ipynb_checkpoints" / "a.png").write_bytes(pictures[0])
    run = tmp_path / "run"
    done = strangers.healed(model, data, run, "--set", "train.optim.lr=1e-12")
    said, names = before(done, run, model)
    assert said == pytest.approx(truth(model, images[chosen], labels[chosen]), abs=0.08)
    assert [*names.values()] == NAMES
    assert ("30 of 600 rows have no label and are left out" in " ".join(done.stderr.split())) == (form == "unlabelled")


def test_nine_of_ten_names_stop_every_command(trained, folders, tmp_path):  # noqa: F811
    model, data = named(trained, tmp_path / "model", NAMES), folders([*NAMES[:9], "neun"], each=12)
    for command in (
        ("retrain", model, "--data", data),
        ("shrink", model, "--layers", 2, "--calibrate", data),
        ("heads", model, "--data", data),
        ("kappa", model, "--data", data),
    ):
        done = leansurgeon(*command, cwd=tmp_path)
        assert done.returncode == 2 and "neun" in done.stderr and "--classes" in done.stderr, done.stderr


def test_topics_as_floats_and_rows_without_a_label(tmp_path):
    """0.0 ... 11.0, as pandas writes a column with gaps, and SNLI's -1."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40, initializer_range=0.1, num_labels=CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model, rng = transformers.BertForSequenceClassification(config), np.random.default_rng(0)
    words(tmp_path)
    texts = [f"{WORDS[i % CLASSES]} {' '.join(rng.choice(WORDS[CLASSES:], 5))}" for i in range(480)]
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path)(texts, return_tensors="pt")["input_ids"]
    fit(model, lambda rows: model(rows).logits, ids, torch.arange(480) % CLASSES, 100)
    model.save_pretrained(tmp_path)
    data = tmp_path / "topics.csv"
    with data.open("w", newline="") as file:
        rows = [(text, f"{i % CLASSES}.0") for i, text in enumerate(texts)]
        csv.writer(file).writerows([("text", "label"), *rows, *[(f"{text} w40", "-1.0") for text in texts[:30]]])
    done = strangers.healed(tmp_path, data, tmp_path / "run", "--set", "train.optim.lr=1e-12")
    said, _ = before(done, tmp_path / "run", tmp_path)
    assert said > 0.9 and "30 without label left out" in " ".join(done.stderr.split())


def test_texts_are_cut_at_the_models_own_length(tmp_path):
    """The words that tell stand behind 140 others, and the model reads 192: 128 would be chance."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=61,
        max_position_embeddings=192, initializer_range=0.1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        id2label={0: "bad", 1: "good"},
    )  # fmt: skip
    model, rng = transformers.BertForSequenceClassification(config), np.random.default_rng(0)
    words(tmp_path)
    texts = [f"{' '.join(rng.choice(WORDS[2:12], 140))} {' '.join([WORDS[i % 2]] * 10)}" for i in range(240)]
    texts += [f"{' '.join(rng.choice(WORDS[2:12], 200))}" for _ in range(20)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=192)["input_ids"]
    labels = torch.arange(240) % 2
    fit(model, lambda rows: model(rows, attention_mask=rows != 0).logits, ids[:240], labels, 60, batch=32)
    model.save_pretrained(tmp_path)
    data = tmp_path / "long.csv"
    with data.open("w", newline="") as file:
        labels = [("bad", "good")[i % 2] for i in range(260)]
        csv.writer(file).writerows([("text", "label"), *zip(texts, labels, strict=True)])
    ranked = leansurgeon("heads", tmp_path, "--data", data, "--steps", 2, "--samples", 32, "--json")
    assert ranked.returncode == 0, ranked.stderr
    assert "20 texts longer than 192 tokens are cut" in " ".join(ranked.stderr.split())
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure.data.calibration import open_calibration

    found = open_calibration(str(data), open_source(str(tmp_path)), cache=tmp_path / "cache")
    held = {tokenizer.decode(ids, skip_special_tokens=True) for b in found.heldout for ids in b["input_ids"]}
    whole = [(text, i % 2) for i, text in enumerate(texts) if " ".join(text.split()[:192]) in held]
    right = []
    for text, label in whole:
        given = tokenizer(text, return_tensors="pt", truncation=True, max_length=192)
        right.append(int(model(**given).logits.argmax(-1)) == label)
    assert json.loads(ranked.stdout)["whole"]["accuracy"] == pytest.approx(np.mean(right)) and np.mean(right) > 0.8
