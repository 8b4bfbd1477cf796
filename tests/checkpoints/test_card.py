"""The model card of a result: the source's front matter, what was measured in the hub's form, and cards that attack."""

import json
import math
import os
from dataclasses import replace
from itertools import pairwise

import pytest
import yaml
from huggingface_hub import ModelCard

from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.publish import card
from leansurgeon.checkpoints.record import Comparison, Embeddings, Origin, PairedFigure, SurgeryRecord
from leansurgeon.checkpoints.source import open_source
from leansurgeon.commands.in_memory import Cut
from leansurgeon.reading import modelcard
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import DecidedCut, carry_out

SOURCE = """---
language:
- en
- no
license: other
license_name: somebody-s
license_link: LICENSE
library_name: sentence-transformers
pipeline_tag: sentence-similarity
datasets: [s2orc, ms_marco]
tags: [sentence-transformers, transformers]
base_model: org/ancestor
base_model_relation: quantized
widget:
- text: "Was: “schön”?"
extra_gated_prompt: |
  Say yes.
  Or no.
model-index:
- name: the source
  results: []
---

# The source

Its own words.
"""


@pytest.fixture
def cut(saved, tmp_path):
    """A function that writes a card beside a BERT, cuts that to two layers, and gives the result's folder."""

    def make(text: str | bytes | None, out: str = "lean"):
        folder = tmp_path / "source-bert"
        if not folder.exists():
            saved("bert")
        if text is not None:
            (folder / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
        (folder / "LICENSE").write_text("All rights reserved.")
        carry_out(DecidedCut(plan(open_source(str(folder)), RequestedShape(layers="2"))), tmp_path / out, check=False)
        return tmp_path / out

    return make


def test_the_source_s_front_matter_is_kept(cut):
    lean = cut(SOURCE)
    made = ModelCard.load(lean / "README.md")
    before = yaml.safe_load(SOURCE.split("---\n")[1].replace("- no", "- 'no'"))
    data = made.data.to_dict()
    changed = {"tags", "model-index", "base_model_relation"}
    assert {key: data[key] for key in before.keys() - changed} == {key: before[key] for key in before.keys() - changed}
    assert data["tags"] == ["sentence-transformers", "transformers", "leansurgeon"]
    assert data["base_model"] == "org/ancestor" and data["base_model_relation"] == "finetune"
    assert "model-index" not in data  # what was measured on the source's weights is said of the source alone
    assert made.text.lstrip().startswith("# lean\n") and "Its own words" not in made.text
    assert (lean / "LICENSE").read_text() == "All rights reserved." and "LICENSE" in record.read(lean).files

    # A cut of a cut keeps it, too, and says its own shape once.
    carry_out(DecidedCut(plan(open_source(str(lean)), RequestedShape(layers="1"))), lean.parent / "leaner", check=False)
    assert ModelCard.load(lean.parent / "leaner/README.md").data.to_dict() == data


def test_a_model_without_a_card_gets_one(cut):
    data = ModelCard.load(cut(None) / "README.md").data.to_dict()
    assert data == {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": ["leansurgeon"]}


LEVELS = [f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefgh")]
ALIASES = "a: &a [x, x]\n" + "".join(LEVELS)
HOSTILE = {
    "aliases": f"---\n{ALIASES}---\n",
    "python": "---\nlicense: !!python/object/apply:os.system [touch evil]\n---\n",
    "twice": "---\nlicense: mit\nlicense: other\n---\n",
    "no yaml": "---\n: : :\n\t- [\n---\n",
    "no text": b"---\nlicense: \xff\xfe\n---\n",
    "deep": f"---\na: {'[' * 200}{']' * 200}\n---\n",
    "long": "---\nlicense: mit\n---\n" + "x" * 2**21,
}


def test_a_card_that_attacks_is_no_reason_to_refuse_a_model(cut, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in HOSTILE.items():
        made = ModelCard.load(cut(text, f"lean {name}") / "README.md")
        assert made.data.to_dict()["tags"] == ["leansurgeon"] and "could not be kept" in made.text, name
    assert not (tmp_path / "evil").exists()


def test_a_card_elsewhere_is_not_read(cut, tmp_path):
    (tmp_path / "secret.md").write_text("---\nlicense: secret\n---\n")
    source = tmp_path / "source-bert"
    source.mkdir()
    os.symlink(tmp_path / "secret.md", source / "README.md")
    assert card.read_front_matter(source)[0] == {} and "link" in card.read_front_matter(source)[1]
    os.mkfifo(source / "pipe")
    os.replace(source / "pipe", source / "README.md")
    assert card.read_front_matter(source) == ({}, "")  # no file at all


ODD = {
    "---\ntags: one\n---\n": {"tags": "one"},
    "---\r\nlicense: mit\r\n---\r\ntext": {"license": "mit"},
    "\ufeff---\nlicense: mit\n---": {"license": "mit"},
    "---\n- a list\n---\n": {},
    "no front matter\n---\nlicense: mit\n---\n": {},
    "---\nwhen: 2024-01-01\n1: number\nnothing: null\nset: !!set {a}\n---\n": {"when": "2024-01-01"},
}


@pytest.mark.parametrize("text", ODD, ids=repr)
def test_odd_front_matter(text, tmp_path):
    (tmp_path / "README.md").write_text(text, newline="")
    found = {key: value for key, value in modelcard.front_matter(tmp_path).items() if value is not None}
    assert {key: value for key, value in found.items() if value != {"a": None}} == ODD[text]


# -- what was measured -----------------------------------------------------------------------------


def test_a_proof_is_what_the_hub_reads(tmp_path):
    """Perplexity by hand, of both models; the hub's own reader gives the numbers back."""
    compared = Comparison(
        data="held-out data",
        loss=PairedFigure(2.0, 2.5),
        accuracy=PairedFigure(0.5, 0.25),
        relative_error=0.125,
        cosine=0.75,
    )
    measured = [
        card.of_comparison("brown.txt, held out", compared, True),
        card.of_comparison("pairs", Comparison(embeddings=Embeddings(0.9, 0.8, 10, 0.7, None, 10)), False),
        card.of_comparison("not done", Comparison(done=False, why="no"), True),
    ]
    head = card.front({}, "lean", "org/base", {"architectures": ["LlamaForCausalLM"]}, measured, cut=True)
    (tmp_path / "README.md").write_text(card.text_of(head, "# lean\n"))
    data = ModelCard.load(tmp_path / "README.md").data
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in data.eval_results}
    assert found == {
        ("brown.txt, held out", "loss"): 2.5,
        ("brown.txt, held out", "perplexity"): pytest.approx(math.exp(2.5), abs=1e-6),
        ("brown.txt, held out", "accuracy"): 0.25,
        ("brown.txt, held out", "relative_error"): 0.125,
        ("brown.txt, held out", "cosine_similarity"): 0.75,
        ("pairs", "cosine_similarity"): 0.9,
        ("pairs", "spearman"): 0.7,
    }
    assert {r.task_type for r in data.eval_results} == {"text-generation"} and data.model_name == "lean"
    words = {r.metric_name for r in data.eval_results if r.metric_type == "perplexity"}
    assert words == {f"perplexity (source: {math.exp(2.0):.4g})"}
    assert data.base_model == "org/base" and data.to_dict()["base_model_relation"] == "finetune"
    card.rename(tmp_path, "other")
    again = ModelCard.load(tmp_path / "README.md")
    assert again.data.model_name == "other" and again.text.strip() == "# other"


def test_the_base_is_named_as_the_hub_names_it(tmp_path):
    cached = tmp_path / "models--org--name" / "snapshots" / "0123"
    assert card.base_of(Origin("org/name", "hub"), None, {}) == "org/name"
    assert card.base_of(Origin("name", "folder"), cached, {}) == "org/name"
    assert card.base_of(Origin("mine", "folder"), None, {}) is None
    for tags in (5, None, ["x"]):  # a finished cut was thrown away because its source's card said `tags: 5`
        assert card.base_of(Origin("mine", "folder"), tmp_path, {"tags": tags}) is None


OWN = "# all-Mini-v2\n\nmodel = SentenceTransformer('sentence/all-Mini-v2')  # see https://x.co/other/all-Mini-v2\n"
# The source's card, and the base model that the result's card names.
BASES = {
    "by its title and its example": (OWN, "sentence/all-Mini-v2"),
    "by two names": (OWN + "'another/all-Mini-v2'", None),
    "by its front matter": ("---\nbase_model: org/first\n---\n# mine\n", "org/first"),
    "no card": (None, None),
    "a result of ours": ("---\ntags: [leansurgeon]\n---\n# lean\n\nMade from `my/lean`.", None),
}


@pytest.mark.parametrize("case", BASES)
def test_a_folder_without_a_name_on_the_hub_is_named_as_its_card_says(case, tmp_path):
    text, wanted = BASES[case]
    config = {"model_type": "bert", "architectures": ["BertModel"], "_name_or_path": "some/ancestor"}
    source, made = tmp_path / "source", tmp_path / "made"
    for folder in (source, made):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    if text is not None:
        (source / "README.md").write_text(text)
    card.write_card(made, None, "made", source)
    found = modelcard.front_matter(made)
    assert found.get("base_model") == wanted and ("base_model_relation" in found) == (wanted is not None)


def test_a_training_s_card_goes_on_from_the_model_that_it_began_with(tmp_path, cut):
    from leansurgeon.training.finish import write_cards
    from leansurgeon.training.runs.summary import Model, Scores, Summary, Task

    start = cut(SOURCE)
    for name in ("model", "last"):
        (tmp_path / "run" / name).mkdir(parents=True)
        for file in ("config.json", "surgery.json"):
            (tmp_path / "run" / name / file).write_bytes((start / file).read_bytes())
    task = Task("masked-lm", "perplexity", "perplexity", False, False, 100, 20, {"source": "/home/me/texts/brown.txt"})
    scores = {"before": Scores(3.0, 20.0), "best": Scores(2.0, 7.5), "final": Scores(2.5, 9.0)}
    made = Summary(model=Model(), task=task, steps=40, epochs=0.5, **scores)
    write_cards(tmp_path / "run", start, made, {"rule": "task digits"})
    best, last = (ModelCard.load(tmp_path / "run" / name / "README.md") for name in ("model", "last"))
    assert best.data.license == "other" and best.data.to_dict()["datasets"] == ["s2orc", "ms_marco"]
    numbers = [{r.metric_type: r.metric_value for r in one.data.eval_results} for one in (best, last)]
    assert numbers == [{"perplexity": 7.5, "loss": 2.0}, {"perplexity": 9.0, "loss": 2.5}]
    assert best.text.lstrip().startswith("# run\n") and "20.000 before and 7.500 after" in best.text


STAGE = {"depth": 2, "heads": 4, "head_dim": 8, "kv_heads": 4, "mlp_dim": 64, "width": 32}
PLAN = {
    "before": {"stages": [STAGE | {"depth": 4}]},
    "after": {"stages": [STAGE]},
    "operators": [{"name": "drop-layers", "exactness": "near", "says": "layers go"}],
    "parameters_before": {"total": 1100},
    "parameters_after": {"total": 1000},
}


def test_a_record_that_lacks_numbers_ends_no_training(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    training = card.Training((), ("Trained for 3 steps.",))
    odd = ({}, {"before": None}, {"after": None}, {"parameters_before": 7}, {"parameters_after": {"total": "x"}})
    for changes in odd:
        made = SurgeryRecord.from_dict({"source": {"name": "org/name"}, "plan": PLAN | changes})
        card.write_card(tmp_path, replace(made, initialised="grown"), "lean", None, training)  # of another version
        said = (tmp_path / "README.md").read_text()
        assert "Made from `org/name`" in said and "**drop-layers** (near)" in said and training.says[0] in said
        assert ("| parameters |" in said) == (changes == {})
        shares = "org/name with 1,000 of 1,100 parameters"
        whole = "parameters_before" not in changes and "parameters_after" not in changes
        assert str(Cut(tmp_path, made, {})).endswith(shares if whole else "org/name")
