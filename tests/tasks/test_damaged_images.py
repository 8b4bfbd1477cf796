"""Images that cannot be read: named before the first step, left out where that is asked for, and counted."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from leansurgeon.errors import UsageError
from leansurgeon.training.runs import resume
from tests.support.command_line import leansurgeon
from tests.support.models import strangers
from tests.tasks.prepared import prepare


@pytest.fixture
def damaged(tmp_path):
    """A classifier of two classes, and pictures of which two are cut short."""
    model = strangers.timm_vit(tmp_path / "model", 2)
    pictures = strangers.pictures(tmp_path / "pictures", each=40)
    for name in ("ant/3.png", "bee/5.png"):
        whole = (pictures / name).read_bytes()
        (pictures / name).write_bytes(whole[: len(whole) // 2])
    return model, pictures


def test_damaged_images_are_named_before_the_first_step_and_left_out_where_asked(damaged, tmp_path):
    model, pictures = damaged
    done = strangers.healed(model, pictures, tmp_path / "run")
    assert done.returncode == 2 and "ant/3.png cannot be read" in done.stderr and "1 more" in done.stderr
    assert "--skip-damaged" in done.stderr and not (tmp_path / "run" / "metrics.jsonl").exists()

    done = strangers.healed(model, pictures, tmp_path / "run", "--skip-damaged")
    assert done.returncode == 0 and "2 damaged images left out" in done.stderr
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["task"]["skip_damaged"] is True
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert '"damaged": 2' in json.dumps(summary)

    lean = tmp_path / "lean"
    shrink = ("shrink", model, "--layers", 3, "--calibrate", pictures, "--heal", "none", "--no-proof", "-o", lean)
    done = leansurgeon(*shrink)
    assert done.returncode == 2 and "ant/3.png" in done.stderr
    done = leansurgeon(*shrink, "--skip-damaged")
    assert done.returncode == 0, done.stderr
    assert "2 damaged left out" in (lean / "surgery.json").read_text()


def test_images_are_looked_at_again_where_one_was_written_to(damaged, tmp_path):
    """In its place, so that the folder's time stays."""
    model, pictures = damaged
    for name in ("ant/3.png", "bee/5.png"):
        (pictures / name).write_bytes((pictures / "ant" / "1.png").read_bytes())
    assert leansurgeon("judge", model, "--against", model, "--data", pictures).returncode == 0
    before = os.stat(pictures / "ant")
    with (pictures / "ant" / "7.png").open("r+b") as file:
        file.truncate(100)
    assert os.stat(pictures / "ant").st_mtime_ns == before.st_mtime_ns
    done = leansurgeon("judge", model, "--against", model, "--data", pictures)
    assert done.returncode == 2 and "ant/7.png cannot be read" in done.stderr


def test_images_of_forms_that_are_not_read_are_counted(damaged, tmp_path):
    model, pictures = damaged
    for number in range(3):
        (pictures / "ant" / f"{number}.heic").write_bytes(b"x")
    (pictures / "bee" / "1.AVIF").write_bytes(b"x")
    done = leansurgeon("judge", model, "--against", model, "--data", pictures, "--skip-damaged")
    assert done.returncode == 0 and "1 .avif, 3 .heic" in done.stderr


def test_a_resumed_run_says_that_its_data_changed_and_what_can_be_done(tmp_path):
    pictures = strangers.pictures(tmp_path / "pictures", each=40)

    def prepared():
        return prepare(tmp_path / "cache", "folder", data=str(pictures), image_size=12)

    before = prepared()
    saved = {"data": {split: before.size(split) for split in ("train", "eval")}, "entry": before.prepared_as}
    for number in range(10, 30):
        (pictures / "bee" / f"{number}.png").unlink()
    after = prepared()
    with pytest.raises(UsageError, match=r"\b\d+ samples, and had \d+ when this run was interrupted") as caught:
        resume.check_data(saved, after)
    assert "RUN/model" in caught.value.hint
