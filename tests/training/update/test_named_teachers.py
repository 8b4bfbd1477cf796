"""Teachers as the user names them: each is taken exactly as it is and what it says is put into the student's order, or
it is refused with both numbers.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from leansurgeon import tasks
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data import images
from leansurgeon.reading.cache_folder import cache_folder
from leansurgeon.training import data_loader, distill
from tests.support.command_line import leansurgeon
from tests.support.models import strangers
from tests.support.models.word_models import WORDS


@pytest.fixture(autouse=True)
def in_a_cache(own_cache):
    """Each test has a cache of its own."""


def taught(model: Path, data: Path, run: Path, teacher: object, *more: object):
    """`retrain` with a named teacher."""
    return strangers.healed(model, data, run, "--set", f"train.distill.teacher={teacher}", *more)


def check_refused(done, *says: str) -> None:
    assert done.returncode == 2 and all(text in " ".join(done.stderr.split()) for text in says), done.stderr


def test_a_teacher_of_other_classes_is_refused_with_both_numbers(tmp_path):
    data = strangers.pictures(tmp_path / "pictures", side=16)
    student, teacher, again = (strangers.timm_vit(tmp_path / f"vit{i}", classes) for i, classes in enumerate((2, 3, 2)))
    check_refused(taught(student, data, tmp_path / "run", teacher), "has 3 classes")
    assert not (tmp_path / "run").exists()
    done = taught(student, data, tmp_path / "run", again)
    assert done.returncode == 0, done.stderr


def test_classes_in_another_order_are_taught_by_name(tmp_path):
    table = strangers.reviews(tmp_path / "reviews.csv")
    student = strangers.classifier(tmp_path / "student", ("bad", "good"))
    teacher = strangers.classifier(tmp_path / "teacher", ("GOOD", "Bad", "neither"))
    steps = ("--set", "train.batch=70", "--set", "train.duration=1st", "--set", "train.log_every=1")
    done = taught(student, table, tmp_path / "run", teacher, *steps)
    assert done.returncode == 0, done.stderr
    options = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["task"]
    task = tasks.make(options.pop("name"), options)
    task.prepare(cache_folder(), student, workers=1, say=lambda text: None)
    chosen = data_loader.epoch_order(0, 0, task.size("train"))[:70]
    batch = task.batch("train", chosen, seed=0, epoch=0)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    cls = transformers.BertForSequenceClassification
    with torch.no_grad():
        ours, theirs = (cls.from_pretrained(folder).eval()(**inputs).logits for folder in (student, teacher))
    p, q = ours.log_softmax(-1), theirs[:, [1, 0]].log_softmax(-1)  # bad, good
    wanted = torch.nn.functional.cross_entropy(ours, batch["labels"]) + (q.exp() * (q - p)).sum(-1).mean()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    first = next(row["loss"] for row in rows if row["type"] == "train")
    assert first == pytest.approx(wanted.item(), rel=1e-4)


def test_a_model_is_not_judged_against_other_classes_or_another_order(tmp_path):
    table = strangers.reviews(tmp_path / "reviews.csv")
    model = strangers.classifier(tmp_path / "model", ("bad", "good"))
    for names in (("GOOD", "Bad"), ("bad", "good", "neither")):
        other = strangers.classifier(tmp_path / f"other{len(names)}", names)
        done = leansurgeon("judge", model, "--against", other, "--data", table)
        check_refused(done, f"({len(names)}: {', '.join(names)})")
    again = strangers.classifier(tmp_path / "again", ("Bad", "GOOD"))
    done = leansurgeon("judge", model, "--against", again, "--data", table, "--classes", "bad,good")
    assert done.returncode == 0, done.stderr


def test_another_tokenizer_of_equal_size_is_another_vocabulary(tmp_path):
    """The words in another order: as many tokens, and each means something else."""
    text = strangers.texts(tmp_path / "texts", lines=40)
    student, same, other = (strangers.model(tmp_path / name, "gpt2", vocab_size=61) for name in ("a", "b", "c"))
    words = ["<pad>", "</s>", "<unk>", *(f"<extra_id_{i}>" for i in range(8)), *reversed(WORDS)]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(other)
    check_refused(taught(student, text, tmp_path / "run", other), "61 tokens; the model's has 61")
    done = leansurgeon("judge", student, "--against", other, "--data", text)
    check_refused(done, "different tokenizers (61 and 61 tokens)")
    assert taught(student, text, tmp_path / "run", same).returncode == 0


def test_a_teacher_sees_pixels_as_its_own_processor_makes_them(tmp_path):
    data = strangers.pictures(tmp_path / "pictures", side=16)
    seen = []
    for number in (0.5, 0.3):
        folder = strangers.timm_vit(tmp_path / str(number), 2)
        config = json.loads((folder / "config.json").read_text())
        config["pretrained_cfg"] |= {"mean": [number, 0.4, 0.5], "std": [0.2, number, 0.25]}
        (folder / "config.json").write_text(json.dumps(config))
        source = open_source(str(folder))
        task = tasks.make("folder", {"data": str(data)} | images.folder_options(source))
        task.prepare(cache_folder(), folder, workers=1, say=lambda text: None)
        seen.append((source, task, task.batch("train", np.arange(4), seed=0, epoch=0)))
    (_, task, batch), (teacher, _, wanted) = seen
    found = distill.make_restandardise(teacher, task)(batch)["pixel_values"]
    assert torch.allclose(found, wanted["pixel_values"], atol=1e-5)
    assert not torch.allclose(found, batch["pixel_values"], atol=0.1)


@pytest.mark.parametrize(
    ("names", "teacher", "says"),
    [
        (("red", "green", "blue"), ".teacher=source", "from the data alone: its head is new"),
        (("bad", "good"), "=null", "from the data alone: train.distill is null"),
    ],
)
def test_what_is_said_of_the_teacher_is_what_is_done(names, teacher, says, tmp_path):
    """A model whose head is new learns from nobody, though --set names its source; null asks for nobody."""
    cut = strangers.halved(tmp_path / "cut", strangers.classifier(tmp_path / "source", ("bad", "good")))
    data = strangers.reviews(tmp_path / "reviews.csv", names=names)
    done = strangers.healed(cut, data, tmp_path / "run", "--set", f"train.distill{teacher}")
    assert done.returncode == 0 and says in " ".join(done.stderr.split()), done.stderr
    recipe = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert not recipe["train"].get("distill")


def test_embeddings_of_another_width_are_refused(tmp_path):
    text = strangers.texts(tmp_path / "texts", lines=20)
    student, teacher = (strangers.encoder(tmp_path / str(width), hidden_size=width) for width in (32, 48))
    check_refused(taught(student, text, tmp_path / "run", teacher), "embeddings of 48 numbers, the model of 32")
