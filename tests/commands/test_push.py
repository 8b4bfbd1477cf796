"""Pushing a result to a hub that listens on this machine, and what happens where that fails."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from huggingface_hub import ModelCard, constants

from leansurgeon.checkpoints import record
from leansurgeon.commands.in_memory import Cut
from leansurgeon.commands.push import check, push
from leansurgeon.errors import NotPushed, UsageError
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out
from tests.cli import test_headless
from tests.cli.answers import stderr_of, typed, works
from tests.support.hub import TOKEN, hub
from tests.support.models import strangers


@pytest.fixture
def there(monkeypatch):
    """A hub that this process may ask, with a token that may write."""
    with hub() as made:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield made


@pytest.fixture(scope="module")
def lean(tmp_path_factory):
    from leansurgeon.checkpoints.source import open_source

    folder = tmp_path_factory.mktemp("made") / "lean"
    carry_out(DecidedCut(plan(open_source("digits-vit"), RequestedShape(layers="2"))), folder, check=False)
    return folder


def test_a_result_arrives_whole_and_private_under_its_name(there, lean):
    cut = Cut(lean, record.read(lean), {})
    assert cut.push_to_hub("me/small-digits") == f"{there.endpoint}/me/small-digits"
    assert there.private == {"me/small-digits": True}
    sent = there.files["me/small-digits"]
    assert sent == {file.name: file.read_bytes() for file in lean.iterdir()}
    assert len(sent["model.safetensors"]) > 100_000 and "surgery.json" in sent
    card = ModelCard(sent["README.md"].decode())
    assert card.text.lstrip().startswith("# small-digits\n") and card.data.tags == ["leansurgeon"]


STRANGE = {"tables/index.bin": b"1", "lora-v2/adapter_model.safetensors": b"2", "training_args.bin": b"3"}
CARD = """---
license: apache-2.0
language: [de]
tags: [poems]
released: 2024-03-01
---
# Ours

Written by **hand**.
"""


def pushed_before(there, lean, repo):
    """A repository that holds the result; its files by name."""
    push(lean, repo)
    return there.files[repo]


def test_what_is_not_of_the_model_stays(there, lean):
    held = pushed_before(there, lean, "me/stays")
    held |= STRANGE | {"pytorch_model.bin": b"old", "model-00002-of-00002.safetensors": b"old", "run.safetensors": b"4"}
    push(lean, "me/stays")
    assert {name: held[name] for name in STRANGE} == STRANGE and held["run.safetensors"] == b"4"
    assert "pytorch_model.bin" not in held and "model-00002-of-00002.safetensors" not in held


def test_the_card_keeps_what_people_wrote(there, lean):
    """On a card that was there first, and around what an earlier push wrote."""
    there.private["me/card"], there.files["me/card"] = True, {"README.md": CARD.encode()}
    for _ in range(2):
        push(lean, "me/card")
    made = there.files["me/card"]["README.md"].decode()
    card = ModelCard(made)
    assert card.data.license == "apache-2.0" and card.data.language == ["de"] and "2024-03-01" in made
    assert card.data.tags == ["poems", "leansurgeon"]
    assert card.text.lstrip().startswith("# Ours\n\nWritten by **hand**.\n")
    assert made.count("<!-- leansurgeon") == 1
    held = pushed_before(there, lean, "me/edited")
    pushed = held["README.md"].decode()
    edited = pushed.replace("# edited\n", "# edited\n\nRead this first.\n") + "\n## Thanks\n\nTo all.\n"
    held["README.md"] = edited.replace("layers", "LAYERS").encode()
    push(lean, "me/edited")
    assert held["README.md"].decode() == edited


def test_a_head_that_is_not_in_the_files_is_not_published(there, tmp_path):
    """Whoever loads the class in config.json would get a random one; an embedder is loaded by modules.json."""
    folder = test_headless.named(strangers.encoder(tmp_path / "own"), "BertForSequenceClassification")
    with pytest.raises(NotPushed, match="random head") as refused:
        push(folder, "me/headless")
    assert '"architectures": ["BertModel"]' in refused.value.hint and "me/headless" not in there.files
    cls = transformers.AutoModelForSequenceClassification
    before, again = (cls.from_pretrained(folder).classifier.weight for _ in range(2))
    assert not torch.equal(before, again)  # it is so
    # What the message says helps.
    push(test_headless.named(folder, "BertModel"), "me/headless")
    push(test_headless.mlm(tmp_path / "embedder"), "me/embedder")
    assert "model.safetensors" in there.files["me/headless"] and "modules.json" in there.files["me/embedder"]


@pytest.mark.parametrize(
    "files",
    [
        {"adapter_config.json": b"{}"},
        {"tokenizer.json": b"{}"},
        {"1_Pooling/config.json": b"{}", "modules.json": b"[]"},
    ],
    ids=lambda files: next(iter(files)),
)
def test_what_would_be_read_beside_the_result_is_refused_by_name(files, there, lean):
    held = pushed_before(there, lean, "me/beside")
    held |= files
    before = dict(held)
    with pytest.raises((NotPushed, UsageError)) as refused:
        push(lean, "me/beside")
    assert all(name in refused.value.message for name in files) and "--force" in refused.value.hint
    assert held == before
    push(lean, "me/beside", force=True)
    assert not files.keys() & held.keys()


def test_another_tokenizer_in_its_place_is_refused(there, lean, tmp_path):
    folder = shutil.copytree(lean, tmp_path / "worded")
    (folder / "tokenizer.json").write_text('{"a": 1}')
    held = pushed_before(there, folder, "me/worded")
    push(folder, "me/worded")  # the same: nothing to say
    held["tokenizer.json"] = b'{"a": 2}'
    with pytest.raises(NotPushed, match=r"tokenizer\.json"):
        push(folder, "me/worded")
    assert held["tokenizer.json"] == b'{"a": 2}'
    push(folder, "me/worded", force=True)
    assert held["tokenizer.json"] == b'{"a": 1}'


def test_a_repository_of_another_tool_is_refused_before_the_work(there, tmp_path):
    theirs = {"config.json": b"{}", "model.safetensors": b"x", "README.md": CARD.encode()} | STRANGE
    there.private["me/theirs"], there.files["me/theirs"] = True, dict(theirs)
    line = "shrink digits-vit --layers 2 --no-proof -o lean --push me/theirs"
    done = typed(line, cwd=tmp_path)
    said = stderr_of(done)
    assert done.returncode == 2 and "config.json, model.safetensors" in said and "--force" in said
    assert there.files["me/theirs"] == theirs and not list(tmp_path.iterdir())
    done = works(f"{line} --force", cwd=tmp_path)
    held = there.files["me/theirs"]
    assert held["model.safetensors"] != b"x" and {name: held[name] for name in STRANGE} == STRANGE
    assert "Written by **hand**." in held["README.md"].decode()


def test_public_only_where_it_was_said(there, lean):
    push(lean, "me/open", private=False)
    assert there.private == {"me/open": False}
    with pytest.raises(UsageError, match="is public"):
        push(lean, "me/open")
    push(lean, "me/open", private=False)


def test_a_push_that_fails_costs_no_result(there, lean):
    before = {file.name: file.read_bytes() for file in lean.iterdir() if file.name != "README.md"}
    there.broken = 507
    with pytest.raises(NotPushed) as failed:
        push(lean, "me/full")
    assert failed.value.exit_code == 1 and "507" in failed.value.message
    assert f"hf upload me/full {lean} --private" in failed.value.hint and TOKEN not in str(failed.value)
    assert before == {file.name: file.read_bytes() for file in lean.iterdir() if file.name != "README.md"}


def test_what_can_be_known_is_said_before_the_work(there, monkeypatch, tmp_path):
    for repo in ("me", "me/a/b", "me/with blank", "me/-x-", ""):
        with pytest.raises(UsageError):
            check(repo, print)
    there.role = "read"
    with pytest.raises(UsageError, match="only read"):
        check("me/x", print)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UsageError, match="token"):
        check("me/x", print)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    calls = len(there.calls)
    done = typed("shrink digits-vit --layers 2 --push me/x", cwd=tmp_path)
    assert done.returncode == 2 and "HF_TOKEN" in done.stderr and len(there.calls) == calls
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = typed("retrain --push me/x", cwd=tmp_path)
    assert done.returncode == 2 and "HF_HUB_OFFLINE" in done.stderr
    assert not list(tmp_path.iterdir())
    shrink = "shrink digits-vit --layers 2"
    for line in (f"{shrink} --public", f"{shrink} --push me/x --dry-run", "heads digits-vit --push me/x"):
        assert typed(line, cwd=tmp_path).returncode == 2


def test_a_hub_that_cannot_be_asked_is_tried_when_the_work_is_done(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    told: list[str] = []
    check("me/x", told.append)
    assert len(told) == 1 and "me/x" in told[0]


def test_commands_push_what_they_have_written(there, tmp_path):
    shrink = "shrink digits-vit --layers 2 --no-proof"
    done = works(f"{shrink} -o lean --push me/lean --json", cwd=tmp_path)
    assert f"{there.endpoint}/me/lean" in done.stderr and "README.md" in there.files["me/lean"]
    works("retrain lean --push me/run --set train.duration=2st --set measure=null -o run", cwd=tmp_path)
    assert there.files["me/run"]["model.safetensors"] == (tmp_path / "run/model/model.safetensors").read_bytes()
    there.broken = 503
    done = typed(f"{shrink} -o other --push me/other", cwd=tmp_path)
    assert done.returncode == 1 and "hf upload me/other other" in done.stderr and "layers" in done.stdout
    assert (tmp_path / "other/model.safetensors").is_file()
