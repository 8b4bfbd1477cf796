"""What columns and cells of a user's table are taken for, and which files are parts of one data set."""

from __future__ import annotations

import csv
import json
import shlex

import pytest

from leansurgeon.commands import in_memory
from leansurgeon.errors import UsageError
from leansurgeon.tasks import user_data
from leansurgeon.tasks.text import corpus
from leansurgeon.tasks.user_data import columns_of, document_in, labels_in, recognise, texts_in

WORDS = ["the", "film", "was", "shown", "in", "a", "small", "room", "and", "nobody", "came", "to", "see", "it"]
CLASSIFIER, EMBEDDER, LANGUAGE, SEQ2SEQ = "sequence-classification", "features", "causal-lm", "seq2seq"


def sentence(i: int) -> str:
    return " ".join(WORDS[(i * 7 + k * (i % 5 + 1)) % len(WORDS)] for k in range(5 + i % 4)) + f" {i}"


def table(path, header, cells=None):
    """Rows of sentences; `cells` says what stands in some of the columns."""
    cells = cells or {}
    rows = [[cells[c](i) if c in cells else sentence(31 * n + i) for n, c in enumerate(header)] for i in range(60)]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return recognise(str(path))


@pytest.mark.parametrize("kind, header, form, texts", [
    (EMBEDDER, "id anchor positive negative", "triplet", "anchor positive negative"),
    (EMBEDDER, "Query Passage", "pair", "Query Passage"),
    (EMBEDDER, "text label", "text", "text"),
    (CLASSIFIER, "idx question sentence label", "pair", "question sentence"),
    (CLASSIFIER, "text summary label", "text", "text"),
    (CLASSIFIER, "user_id remark label", "text", "remark"),
    (SEQ2SEQ, "id input target", "answer", "input target"),
    (SEQ2SEQ, "instruction input output", "chat", "instruction input output"),
    (SEQ2SEQ, "id text", "text", "text"),
    (LANGUAGE, "prompt prompt_id messages", "chat", "messages"),
    (LANGUAGE, "prompt completion", "chat", "prompt completion"),
    (LANGUAGE, "id input target", "answer", "input target"),
    (LANGUAGE, "url story", "text", "story"),
])  # fmt: skip
def test_roles_by_name(tmp_path, kind, header, form, texts):
    """Those of examples/guide/data.md stand in `test_guide_data.py`."""
    numbers = {name: lambda i: i % 2 for name in ("label", "score")}
    numbers |= {name: lambda i: f"https://a.b/{i} x y z" for name in ("id", "idx", "user_id", "url", "prompt_id")}
    found = columns_of(table(tmp_path / "a.csv", header.split(), numbers), None, kind)
    assert (found.form, found.texts) == (form, tuple(texts.split()))
    assert found.labels == (("label",) if kind == CLASSIFIER else ())


@pytest.mark.parametrize("given, kind, texts, labels", [
    ("text=a", LANGUAGE, "a", ""),
    ("anchor=c, positive=a", EMBEDDER, "c a", ""),
    ("text=a,text_pair=c,label=b", CLASSIFIER, "a c", "b"),
    ("text=a,text=c,label=B", CLASSIFIER, "a c", "b"),
    ("premise=c,hypothesis=a,label=b", CLASSIFIER, "c a", "b"),
    ("input=c,target=a", SEQ2SEQ, "c a", ""),
    ("prompt=c,completion=a", LANGUAGE, "c a", ""),
    ("text=a,label=b,label=d", CLASSIFIER, "a", "b d"),
])  # fmt: skip
def test_roles_as_given(tmp_path, given, kind, texts, labels):
    data = table(tmp_path / "a.csv", ["a", "b", "c", "d"], {"b": lambda i: i % 2, "d": lambda i: i % 3 // 2})
    found = columns_of(data, given, kind)
    assert (found.texts, found.labels) == (tuple(texts.split()), tuple(labels.split()))


def test_what_a_message_says_can_be_typed(tmp_path):
    """A column whose name holds a comma and a space."""
    data = table(tmp_path / "a.csv", ["the text, whole", "x", "y"], {"x": lambda i: i % 2, "y": lambda i: i % 3})
    assert columns_of(data, None, CLASSIFIER).labels == ()  # two columns may be it
    error = user_data.missing_label(data, ["the text, whole"])
    typed = shlex.split(error.hint.split("`")[1].replace("COLUMN", "y"))[1]
    found = columns_of(data, typed, CLASSIFIER)
    assert (found.texts, found.labels) == (("the text, whole",), ("y",))
    with pytest.raises(UsageError, match="there is no column 'z'"):
        columns_of(data, "text=z", CLASSIFIER)
    with pytest.raises(UsageError, match="ROLE=COLUMN"):
        columns_of(data, "txt=x", CLASSIFIER)


def test_a_column_that_is_nearly_unique_is_no_label(tmp_path):
    data = table(tmp_path / "a.csv", ["text", "label", "mood"], {"label": lambda i: f"R{i}", "mood": lambda i: i % 2})
    assert columns_of(data, None, CLASSIFIER).labels == ("mood",)
    scores = table(tmp_path / "b.csv", ["text", "label"], {"label": lambda i: i / 7})
    assert columns_of(scores, None, CLASSIFIER).labels == ("label",)


@pytest.mark.parametrize("cells, kind, values", [
    (["0.0", "11.0", "", "-1", None, "-1.0"], "class", ["0", "11", None, None, None, None]),
    ([0.0, 1.0, float("nan"), -1, True], "class", ["0", "1", None, None, "1"]),
    (["-1", "1", ""], "class", ["-1", "1", None]),  # two classes
    (["neg ", "pos", " "], "class", ["neg", "pos", None]),
    (["0.5", "-1", "", "3"], "score", [0.5, -1.0, None, 3.0]),
    ([[0, 1, 1], [0, 0, 0]], "several", [("1", "2"), ()]),
    ([["a", "b"], [], None], "several", [("a", "b"), (), None]),
    (["a|b", "b", ""], "several", [("a", "b"), ("b",), None]),
])  # fmt: skip
def test_labels(cells, kind, values):
    found = labels_in([[cell] for cell in cells], ["label"])
    assert (found.kind, found.values) == (kind, values)


def test_labels_of_several_columns_and_of_named_numbers():
    assert labels_in([["1", "0"], [0.0, True], ["", None]], ["a", "b"]).values == [("a",), ("b",), None]
    as_pandas_writes = [["True", "False"], ["False", "false"]]
    assert labels_in(as_pandas_writes, ["a", "b"]).values == [("a",), ()]
    assert labels_in([[1], [0], [-1]], ["label"], ["no", "yes"]).values == ["yes", "no", None]
    with pytest.raises(UsageError, match="'good' stands among labels that are numbers"):
        labels_in([["good"], ["0.5"]], ["label"])
    with pytest.raises(UsageError, match=r"'label' holds \{'name': 'good'\}, which is no label"):
        labels_in([[{"name": "good"}]], ["label"])


CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Anne."}]
SHAREGPT = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Anne."}]


@pytest.mark.parametrize("cells, chat", [
    ([CHAT], False), ([SHAREGPT], False), ([CHAT[:1], CHAT[1:]], True), (["Who?", "Anne."], True),
    (["Who?", "", "Anne."], True),
])  # fmt: skip
def test_chats_of_every_layout_are_written_by_the_template(cells, chat):
    assert document_in(cells, "a", chat, json.dumps) == json.dumps(CHAT)
    assert document_in(cells, "a", chat, lambda said: None) == "Who?\nAnne."


def test_a_template_that_refuses_a_chat_says_where():
    def refuse(said):
        raise ValueError("roles must alternate")

    with pytest.raises(UsageError, match=r"a\.jsonl, row 3: .*roles must alternate"):
        document_in([CHAT], "a.jsonl, row 3", True, refuse)


def test_an_instruction_has_its_input_below_it():
    said = json.loads(document_in(["Translate.", "Hund", "dog"], "a", True, json.dumps))
    assert [turn["content"] for turn in said] == ["Translate.\n\nHund", "dog"]
    assert texts_in(["a", ["b", "c"], None, CHAT], "x") == ["a", "b", "c", "Who?", "Anne."]


def test_no_row_of_a_table_is_left_out_for_its_length(tmp_path):
    rows = ["好", "他怎么申请信用卡", "a", "two\u2028lines", ""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}, ensure_ascii=False) + "\n" for row in rows))
    found = corpus.find(str(tmp_path / "a.jsonl"), "text")
    assert found.texts() == rows[:4]
    assert found.counted == {"rows": 5, "empty": 1}


@pytest.mark.parametrize("names, train, held, test", [
    ("train/a.txt val/a.txt test/a.txt", "train/a.txt", "val/a.txt", "test/a.txt"),
    ("train-00000-of-00002.jsonl train-00001-of-00002.jsonl validation-00000-of-00001.jsonl",
     "train-00000-of-00002.jsonl train-00001-of-00002.jsonl", "validation-00000-of-00001.jsonl", ""),
    ("TRAIN.CSV Test.CSV sample_submission.csv", "TRAIN.CSV", "", "Test.CSV"),
    ("testing.txt guide.txt", "", "", ""),
    ("test.csv", "", "", ""),
])  # fmt: skip
def test_parts_by_name(tmp_path, names, train, held, test):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "some words"}\n' if name.endswith("jsonl") else "text\nsome words\n")
    found = recognise(str(tmp_path))
    held_out = {part: paths(tmp_path, said) for part, said in (("eval", held), ("test", test)) if said}
    assert found.held_out == held_out
    assert not train or found.names == paths(tmp_path, train)


def paths(folder, names: str) -> tuple[str, ...]:
    return tuple(str(folder / name) for name in names.split())


def test_data_in_memory(tmp_path, monkeypatch):
    """Strings that are all files are paths; rows are written as they are."""
    monkeypatch.setenv("LEANSURGEON_CACHE", str(tmp_path / "cache"))
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    for file in files:
        (tmp_path / file).write_text("some words")
    assert in_memory.data(files) == ",".join(files)
    assert recognise(in_memory.data([*files, "more words"])).columns == ("text",)
    rows = [{"anchor": "a", "positive": "b", "negative": "c"}] * 2
    assert recognise(in_memory.data(rows)).columns == ("anchor", "positive", "negative")

    class Frame:
        """As much of a frame of pandas as is asked for: iterating over it gives the names of its columns."""

        columns = ("text", "label")

        def __iter__(self):
            return iter(self.columns)

        def to_dict(self, form):
            return [{"text": "some words", "label": 1}] if form == "records" else {}

    assert recognise(in_memory.data(Frame())).columns == ("text", "label")
