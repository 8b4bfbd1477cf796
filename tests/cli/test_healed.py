"""What a healed model says of itself: its card, `report` and the page, after `judge`; and no path of a disk."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.proof.report_numbers import sentence
from leansurgeon.reading import modelcard
from tests.cli.answers import document, heals, read, stdout_of, works
from tests.support.models import strangers


class Healed(NamedTuple):
    place: Path
    run: Path
    other: Path  # data that it was not trained on
    before: Path  # data that the model was judged on before it was healed


@pytest.fixture(scope="module")
def healed(tmp_path_factory) -> Healed:
    """A language model, cut, judged, and healed for three steps; all of it named by absolute paths."""
    place = tmp_path_factory.mktemp("secret-place")
    data = strangers.texts(place / "texts")
    other = strangers.texts(place / "elsewhere", lines=60)
    before = strangers.texts(place / "earlier", lines=60)
    lean = strangers.halved(place / "lean", strangers.model(place / "source", "llama", seed=78))
    judged = works(f"judge {lean} --data {before}")
    assert before.name in (lean / "README.md").read_text(), judged.stderr
    heals(lean, data, place / "runs" / "own", "--set train.duration=3st")
    return Healed(place, place / "runs" / "own", other, before)


def results(card: Path) -> dict[str, dict[str, float]]:
    """The figures of a card's front matter by data and kind."""
    (index,) = modelcard.front_matter(card)["model-index"]
    return {r["dataset"]["name"]: {m["type"]: m["value"] for m in r["metrics"]} for r in index["results"]}


def test_a_run_is_judged_and_it_shows_in_card_report_and_page(healed):
    model = healed.run / "model"
    assert record.read(model).judged == {}  # what was judged before the training was another model
    assert healed.before.name not in (model / "README.md").read_text()
    summary = read(healed.run / "summary.json")
    (found,) = document(f"judge {healed.run} --data {healed.other}")["judged"].values()

    made = record.read(model)
    said = sentence(made.judged[healed.other.name], True)
    card = (model / "README.md").read_text()
    assert said in card and healed.other.name not in (healed.run / "last" / "README.md").read_text()
    figures = results(model)
    assert figures[healed.other.name]["loss"] == pytest.approx(found["loss"]["result"], abs=1e-6)
    (trained,) = (by_kind for data, by_kind in figures.items() if data.endswith("held out"))
    assert trained["perplexity"] == pytest.approx(
        summary["test"]["best"]["metric"], abs=1e-6
    )  # the training's own stay

    page = healed.place / "page.html"
    report = works(f"report {healed.run} --html {page}")
    assert " ".join(said.split()) in stdout_of(report)
    assert said in page.read_text().replace("&#39;", "'")


def test_nothing_in_the_models_of_a_run_says_where_it_lay(healed):
    files = [file for name in ("model", "last") for file in (healed.run / name).rglob("*") if file.is_file()]
    wanted = {"README.md", "config.json", "model.safetensors", "surgery.json", "tokenizer.json"}
    assert wanted <= {file.name for file in files}
    for file in files:
        content = file.read_bytes()
        assert str(healed.place).encode() not in content and healed.place.name.encode() not in content, file
