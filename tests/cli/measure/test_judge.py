"""`judge`: source and result on the same samples, against scipy and against a calculation by hand; where it shows."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from scipy import stats

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.checkpoints.record import PairedFigure
from leansurgeon.errors import UsageError
from leansurgeon.intervals import paired_interval
from leansurgeon.measure import harness
from tests.cli.answers import document, typed, works
from tests.support.models import strangers


def test_the_interval_is_that_of_the_paired_t_test():
    rng = np.random.default_rng(0)
    before = rng.normal(size=40)
    after = before + 0.1 + 0.05 * rng.normal(size=40)
    wanted = stats.ttest_rel(after, before).confidence_interval(0.95)
    assert paired_interval((after - before).tolist()) == pytest.approx((wanted.low, wanted.high))
    sevens = paired_interval((7 * (after - before)).tolist(), [7.0] * 40)  # samples of seven labels each
    assert sevens == pytest.approx((wanted.low, wanted.high))
    assert paired_interval([0.5]) is None


def test_samples_of_other_sizes_are_weighed_and_the_interval_covers_what_it_says():
    """1,000 draws of 30 samples of 1 to 60 labels: the true mean over labels lies inside in 95 of 100."""
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(1000):
        counts = rng.integers(1, 60, 30)
        sums = np.array([rng.normal(0.2, 1.0 / np.sqrt(c)) * c for c in counts])
        low, high = paired_interval(sums.tolist(), counts.tolist())
        inside += low <= 0.2 <= high
    assert 0.935 < inside / 1000 < 0.965


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """A language model on words, a cut of it, and texts that neither was made on."""
    place = tmp_path_factory.mktemp("cut")
    source = strangers.model(place / "source", "llama", seed=77)  # weights of no other test, to be found by them
    other = strangers.texts(place / "other", lines=60)
    works(f"shrink {source} --layers 3 --uncalibrated -o {place}/lean")
    return place, source, other


def test_a_language_model_is_judged_as_by_hand_and_it_shows_in_report_page_and_card(cut):
    place, source, other = cut
    (found,) = document(f"judge {place}/lean --data {other}")["judged"].values()
    losses = [by_hand(folder, source, other) for folder in (source, place / "lean")]
    means = [sum(sums) / sum(counts) for sums, counts in losses]
    assert (found["loss"]["source"], found["loss"]["result"]) == pytest.approx(means, rel=1e-4)
    wanted = paired_interval([b - a for a, b in zip(losses[0][0], losses[1][0], strict=True)], losses[0][1])
    assert (found["loss"]["low"], found["loss"]["high"]) == pytest.approx(wanted, rel=1e-3)
    assert found["loss"]["low"] < means[1] - means[0] < found["loss"]["high"]

    made = record.read(place / "lean")
    assert made.language and list(made.judged) == [other.name]
    said = sentence(made.judged[other.name], True)
    card = (place / "lean" / "README.md").read_text()
    assert said in card and card.count("## On other data") == 1
    report = works(f"report {place}/lean --html {place}/page.html")
    assert "perplexity" in report.stdout and other.name in report.stdout
    assert other.name in (place / "page.html").read_text()


def test_a_copy_of_the_source_that_has_no_tokenizer_judges_with_that_of_the_result(cut, tmp_path, monkeypatch):
    """The copy is where the source is found by its digests, and the folder that it was copied from is gone."""
    place, source, other = cut
    bare, lean = tmp_path / "bare", shutil.copytree(place / "lean", tmp_path / "lean")
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, bare)
    with monkeypatch.context() as patch:
        patch.setattr("leansurgeon.checkpoints.whereabouts.find", lambda origin: bare)
        done = works(f"judge {lean} --data {other} --json")
    whole = typed(f"judge {lean} --data {other} --json")
    found, wanted = (json.loads(one.stdout)["judged"][str(other)]["loss"] for one in (done, whole))
    assert found == pytest.approx(wanted)
    assert (lean / "README.md").read_text().count("## On other data") == 1  # whatever is judged twice


def by_hand(folder, source, other) -> tuple[list[float], list[int]]:
    """Sums of the next-token loss and tokens of every window of the data, by transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM

    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.commands.samples import sample_data

    data = sample_data(open_source(str(source)), str(other), None, None, 0, lambda _: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    sums, counts = [], []
    for batch in data.heldout:
        for ids in batch["input_ids"]:
            with torch.no_grad():
                sums.append(float(model(ids[None], labels=ids[None]).loss) * (len(ids) - 1))
            counts.append(len(ids) - 1)
    return sums, counts


def test_models_without_a_record_are_compared_with_another_and_nothing_is_kept(cut, tmp_path):
    place, source, other = cut
    for words, says in (
        (f"{place}/lean", "--data"),
        (f"{place}/lean --data {tmp_path}/nowhere.txt", "nowhere.txt"),
        (f"{source} --data {other}", "--against"),
        (f"vit-b --data {other}", "vit-b"),
    ):
        refused = typed(f"judge {words}")
        assert refused.returncode == 2 and says in refused.stderr, refused.stderr
    (found,) = document(f"judge {source} --against {source} --data {other}")["judged"].values()
    assert found["max_difference"] == 0 and found["loss"]["low"] == found["loss"]["high"] == 0
    assert not (source / "surgery.json").exists()


def test_scores_of_the_harness_are_paired_by_document():
    """Accuracy is a mean over documents, a perplexity a ratio of sums; documents of one side only are left out."""
    acc = [{"doc_id": i, "metrics": ["acc"], "acc": float(i % 2)} for i in range(10)]
    better = [{**one, "acc": 1.0} for one in acc]
    found = harness.compare_metrics(harness.scores(acc), harness.scores(better[:8])).scores["acc"]
    low, high = stats.ttest_rel([1.0] * 8, [0.0, 1.0] * 4).confidence_interval(0.95)
    assert (found.source, found.result, found.low, found.high) == pytest.approx((0.5, 1.0, low, high))
    words = [
        {"doc_id": i, "metrics": ["word_perplexity"], "word_perplexity": (-2.0 * n, n)} for i, n in enumerate([3, 9])
    ]
    (ratio,) = harness.compare_metrics(harness.scores(words), harness.scores(words)).scores.values()
    assert ratio == PairedFigure(2.0, 2.0, 0.0, 0.0)


def test_tasks_of_ones_own_are_named_by_their_file(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("# a task\ntask: my_task\ndataset_path: json\n")
    assert harness.split_task_names(f"arc_easy, {mine}") == (["arc_easy", "my_task"], [str(tmp_path)])
    mine.write_text("dataset_path: json\n")
    for wrong in (str(mine), str(tmp_path / "gone.yaml"), ","):
        with pytest.raises(UsageError):
            harness.split_task_names(wrong)
