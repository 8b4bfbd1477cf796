"""A trained classifier and data whose classes are called or numbered otherwise: every command measures the truth, or
stops.
"""

from __future__ import annotations

import io
import json
import shutil

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import calibration
from tests.cli.answers import document, heal, heals, read, stderr_of, typed, works
from tests.support.models import strangers

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="session")
def digits():
    """(1797, 8, 8) bytes and their classes."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return (found.images * 15).astype(np.uint8), found.target


@pytest.fixture(scope="session")
def trained(tmp_path_factory, digits):
    """A small ViT that knows the digits, without names."""
    folder, (images, labels) = tmp_path_factory.mktemp("digits") / "vit", digits
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=8, patch_size=2, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        num_labels=10, initializer_range=0.15, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    pixels = (torch.tensor(images / 255, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1) - 0.3) / 0.2
    steps = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(160):
        chosen = torch.randint(len(pixels), (128,))
        loss = model(pixels[chosen], labels=torch.tensor(labels[chosen])).loss
        steps.zero_grad()
        loss.backward()
        steps.step()
    assert loss < 0.5
    model.save_pretrained(folder)
    return strangers.processor(folder, 8, 3)


@pytest.fixture
def folders(tmp_path, digits):
    """Class folders with `each` image of a digit, called as asked."""

    def made(names, each=60, root="images"):
        for digit, name in enumerate(names):
            (tmp_path / root / name).mkdir(parents=True)
            for i in np.flatnonzero(digits[1] == digit)[:each]:
                Image.fromarray(digits[0][i]).convert("RGB").save(tmp_path / root / name / f"{i}.png")
        return tmp_path / root

    return made


def named(trained, folder, names):
    """The same model with names for its outputs."""
    shutil.copytree(trained, folder)
    config = read(folder / "config.json")
    config |= {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def accuracy_of(batches, folder):
    """Of the samples as the calibration has them, by plain transformers."""
    model = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    right = [model(batch["pixel_values"]).logits.argmax(-1) == batch["labels"] for batch in batches]
    return float(torch.cat(right).float().mean())


@pytest.mark.parametrize(
    ("own", "data"),
    [
        (NAMES, [name.upper() for name in NAMES]),
        (None, [str(i + 1) for i in range(10)]),  # 1, 10, 2 as text
        (NAMES, [f"LABEL_{i}" for i in range(10)]),
        (NAMES, NAMES[:5]),
    ],
)
def test_labels_are_those_of_the_model(trained, folders, tmp_path, own, data):
    model = named(trained, tmp_path / "model", own) if own else trained
    found = calibration.open_calibration(str(folders(data)), open_source(str(model)), cache=tmp_path / "cache")
    assert accuracy_of([*found.fit, *found.heldout], model) > 0.8 and found.classes in str(found.as_record().as_dict())


def test_what_is_in_another_order_is_neither_cut_nor_healed(trained, folders, tmp_path):
    """The model's names are those of other outputs, by a shuffle of all; and the numbers of two classes are swapped."""
    swapped = [f"c{i}" for i in (0, 1, 2, 3, 9, 5, 6, 7, 8, 4)]
    model = named(trained, tmp_path / "model", sorted(NAMES))
    shuffled, data = folders(NAMES, root="shuffled"), folders(swapped, root="swapped")
    cut = f"shrink {trained} --layers 2 --calibrate {data} --heal none"
    given = f"--classes {','.join(swapped)}"
    for command in (cut, f"retrain {model} --data {shuffled}", f"retrain {trained} --data {data}"):
        done = typed(f"{command} -o {tmp_path}/out")
        assert done.returncode == 2 and "--classes" in done.stderr and not (tmp_path / "out").exists()
        assert "another order of the classes" in stderr_of(done)
    # What the message says helps.
    done = works(f"{cut} {given} -o {tmp_path}/out")
    assert "c9 is output 4" in stderr_of(done), done.stderr


def test_names_on_a_model_that_names_none_are_asked_for(trained, folders, tmp_path):
    """By every command, and what the message says helps: the figure is that of plain transformers."""
    data = folders(NAMES)
    for command in (
        f"retrain {trained} --data {data}",
        f"shrink {trained} --layers 2 --calibrate {data}",
        f"heads {trained} --data {data}",
        f"kappa {trained} --data {data}",
        f"search {trained} --data {data} --params 10k",
    ):
        done = typed(command, cwd=tmp_path)
        said = stderr_of(done)
        assert done.returncode == 2 and f"--classes {','.join(sorted(NAMES))}" in said, said
        assert "does not say what its 10 outputs are called" in said and not (tmp_path / "runs").exists()
    how = f"--classes {','.join(NAMES)} --steps 2 --samples 64"
    numbered = str(folders([f"LABEL_{i}" for i in range(10)], root="numbered"))
    heldout = calibration.open_calibration(numbered, open_source(str(trained)), cache=tmp_path).heldout
    found = document(f"heads {trained} --data {data} {how}")["whole"]
    assert found["accuracy"] == pytest.approx(accuracy_of(heldout, trained))


def test_nine_of_ten_names_stop_every_command(trained, folders, tmp_path):
    model, data = named(trained, tmp_path / "model", NAMES), folders([*NAMES[:9], "neun"], each=12)
    for command in (
        f"retrain {model} --data {data}",
        f"shrink {model} --layers 2 --calibrate {data}",
        f"heads {model} --data {data}",
        f"search {model} --data {data} --params 10k",
    ):
        done = typed(command, cwd=tmp_path)
        assert done.returncode == 2 and "neun" in done.stderr and "--classes" in done.stderr, done.stderr


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_names_that_were_given_are_those_of_the_result(library, trained, folders, tmp_path):
    """`retrain --classes` writes them into the model's config, and nobody is asked again."""
    data, source = folders(NAMES, each=30), trained
    if library == "timm":
        source = strangers.timm_vit(tmp_path / "timm", classes=10, names=())
    how = f"--classes {','.join(NAMES)} --set train.duration=2st"
    works(f"retrain {source} --data {data} {how} -o {tmp_path}/run")
    config = read(tmp_path / "run" / "model" / "config.json")
    given = config["label_names"] if library == "timm" else [*config["id2label"].values()]
    assert given == NAMES
    asked = typed(f"heads {tmp_path}/run --data {data} --steps 2 --samples 32")
    assert "zero is output 0" in stderr_of(asked) and "(by name)" in asked.stderr


def test_an_experiment_from_a_trained_model_keeps_to_the_same_rules(trained, folders, tmp_path):
    """`run`: names that the model does not know, and names of other outputs, stop it before anything is cut."""
    images = {"image_size": 8, "mean": [0.3] * 3, "std": [0.2] * 3, "crop_pct": 1.0, "augment": False}
    task = {"name": "folder", "data": str(folders(NAMES))} | images
    train = {"duration": "1st", "batch": 16, "precision": "fp32", "optim": {"name": "adamw", "lr": 1e-12}}
    wrong = named(trained, tmp_path / "model", sorted(NAMES))
    for source, says in ((trained, "does not say what its 10"), (wrong, "another order")):
        document = {"version": 1, "name": "own", "kind": "experiment", "source": str(source), "task": task}
        document |= {"train": train, "measure": None, "arms": {"original": {}, "lean": {"layers": 2}}}
        (tmp_path / "own.yaml").write_text(json.dumps(document))
        done = typed(f"run {tmp_path}/own.yaml --workspace {tmp_path}/runs", cwd=tmp_path)
        assert done.returncode == 2 and says in stderr_of(done) and "task.class_names" in done.stderr, done.stderr
        assert not (tmp_path / "runs").exists()


def test_a_head_of_another_objective_is_refused_and_calibrates(trained, folders, tmp_path):
    model, data = named(trained, tmp_path / "model", NAMES), folders(NAMES)
    config = read(model / "config.json") | {"problem_type": "multi_label_classification"}
    (model / "config.json").write_text(json.dumps(config))
    done = heal(model, data, tmp_path / "run")
    said = stderr_of(done)
    assert done.returncode == 2 and "several classes" in said and "--calibrate" in said and "--classes new" in said
    assert not (tmp_path / "run").exists()
    how = f"--layers 2 --calibrate {data} --heal none -o {tmp_path}/cut"
    cut = works(f"shrink {model} {how}")
    assert "accuracy" not in cut.stdout + cut.stderr, cut.stderr


def recipe(file, task, **train):
    train = {"duration": "2st", "batch": 16, "precision": "fp32", "optim": {"name": "adamw", "lr": 1e-12}} | train
    document = {"version": 1, "name": "own", "kind": "training", "task": task, "train": train, "measure": None}
    file.write_text(json.dumps(document))
    return file


def test_a_recipe_on_ones_own_folders_keeps_to_the_same_rules(trained, folders, tmp_path):
    """Other classes get a new head, and the model's own keep theirs."""
    model = named(trained, tmp_path / "model", NAMES)
    images = {"image_size": 8, "mean": [0.3] * 3, "std": [0.2] * 3, "crop_pct": 1.0, "augment": False}
    animals = [f"animal{chr(97 + i)}" for i in range(10)]
    cases = ((animals, "new head for animala"), ([name.upper() for name in NAMES], "by name"))
    for number, (names, says) in enumerate(cases):
        data = folders(names, root=f"images-{number}")
        file = recipe(tmp_path / f"{number}.yaml", {"name": "folder", "data": str(data)} | images)
        run = tmp_path / f"run-{number}"
        done = works(f"retrain {model} --recipe {file} -o {run} --cpu-processes 1")
        assert says in stderr_of(done) and "It healed" not in done.stderr
    before, new, own = (
        transformers.AutoModelForImageClassification.from_pretrained(place)
        for place in (model, tmp_path / "run-0" / "model", tmp_path / "run-1" / "model")
    )
    assert new.config.id2label[3] == "animald" and not torch.allclose(new.classifier.weight, before.classifier.weight)
    assert torch.allclose(own.classifier.weight, before.classifier.weight, atol=1e-6)


def test_glue_is_read_by_the_names_of_the_models_classes(tmp_path):
    """As roberta-large-mnli: contradiction is output 0, which GLUE calls 2."""
    from tests.support.models.word_models import words
    from tests.tasks import test_glue

    own, theirs = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], test_glue.NLI
    torch.manual_seed(1)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48, vocab_size=61,
        max_position_embeddings=40, initializer_range=0.8, id2label=dict(enumerate(own)),
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    words(tmp_path / "model")
    data = test_glue.write_hub(tmp_path / "data", "mnli")
    file = recipe(tmp_path / "r.yaml", {"name": "glue", "task": "mnli", "data": data, "seq_len": 40})
    tokenizer, right = transformers.AutoTokenizer.from_pretrained(tmp_path / "model"), []
    for *texts, label in test_glue.rows("mnli", "matched"):
        said = model(**tokenizer(*texts, truncation=True, max_length=40, return_tensors="pt")).logits.argmax(-1)
        right.append(own[int(said)].lower() == theirs[label])
    found = document(f"retrain {tmp_path}/model --recipe {file} --eval-only --cpu-processes 1")
    assert found["metrics"]["accuracy"] == pytest.approx(np.mean(right))


def test_parquet_whose_classes_have_another_order(trained, digits, tmp_path):
    model, (images, labels) = named(trained, tmp_path / "model", NAMES), digits
    pictures = []
    for image in images[:600]:
        buffer = io.BytesIO()
        Image.fromarray(image).convert("RGB").save(buffer, "png")
        pictures.append({"bytes": buffer.getvalue(), "path": None})
    order, data = sorted(NAMES), tmp_path / "train.parquet"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=order)})
    columns = {"image": pictures, "label": [order.index(NAMES[label]) for label in labels[:600]]}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(data)
    done = heals(model, data, tmp_path / "run", "--set train.optim.lr=1e-12")
    assert "new head" not in done.stderr and read(tmp_path / "run" / "summary.json")["before"]["metric"] > 0.75
    assert [*read(tmp_path / "run" / "model" / "config.json")["id2label"].values()] == NAMES
