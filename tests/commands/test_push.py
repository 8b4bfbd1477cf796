"""Pushing a result to a hub that listens on this machine, and what happens where that fails."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard, constants

from leansurgeon.checkpoints import record
from leansurgeon.commands import push as room
from leansurgeon.commands.push import check, push, target
from leansurgeon.commands.results import Cut
from leansurgeon.errors import NotPushed, UsageError
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import Decided, carry_out
from tests.support.command_line import leansurgeon
from tests.support.hub import TOKEN, hub


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
    carry_out(Decided(plan(open_source("digits-vit"), Wanted(layers="2"))), folder, check=False)
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

    # Another model in its place leaves nothing of the first that would be loaded with it.
    there.files["me/small-digits"]["model-00001-of-00002.safetensors"] = b"old"
    there.files["me/small-digits"]["notes.txt"] = b"mine"
    push(lean, "me/small-digits")
    assert "notes.txt" in sent and "model-00001-of-00002.safetensors" not in sent


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
            check(room.Target(repo), print)
    there.role = "read"
    with pytest.raises(UsageError, match="only read"):
        check(room.Target("me/x"), print)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UsageError, match="token"):
        check(room.Target("me/x"), print)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    calls = len(there.calls)
    done = leansurgeon("shrink", "digits-vit", "--layers", "2", "--push", "me/x", cwd=tmp_path)
    assert done.returncode == 2 and "HF_TOKEN" in done.stderr and len(there.calls) == calls
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = leansurgeon("retrain", "--push", "me/x", cwd=tmp_path)
    assert done.returncode == 2 and "HF_HUB_OFFLINE" in done.stderr
    assert not list(tmp_path.iterdir())
    for arguments in (["--public"], ["--push", "me/x", "--dry-run"]):
        assert leansurgeon("shrink", "digits-vit", "--layers", "2", *arguments, cwd=tmp_path).returncode == 2
    assert leansurgeon("heads", "digits-vit", "--push", "me/x", cwd=tmp_path).returncode == 2


def test_a_hub_that_cannot_be_asked_is_tried_when_the_work_is_done(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    told: list[str] = []
    check(room.Target("me/x"), told.append)
    assert len(told) == 1 and "me/x" in told[0]


def test_commands_push_what_they_have_written(there, tmp_path):
    shape = ["digits-vit", "--layers", "2", "--no-proof"]
    done = leansurgeon("shrink", *shape, "-o", "lean", "--push", "me/lean", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"{there.endpoint}/me/lean" in done.stderr and "README.md" in there.files["me/lean"]
    short = ["--set", "train.duration=2st", "--set", "measure=null", "-o", "run"]
    done = leansurgeon("retrain", "lean", *short, "--push", "me/run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert there.files["me/run"]["model.safetensors"] == (tmp_path / "run/model/model.safetensors").read_bytes()
    there.broken = 503
    done = leansurgeon("shrink", *shape, "-o", "other", "--push", "me/other", cwd=tmp_path)
    assert done.returncode == 1 and "hf upload me/other other" in done.stderr and "layers" in done.stdout
    assert (tmp_path / "other/model.safetensors").is_file()


def test_target():
    assert target(None, public=False) is None
    assert target("me/x", public=True) == room.Target("me/x", private=False)
