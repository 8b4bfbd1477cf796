"""Which output each class of the data is: by name, by number, as the user says, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from leansurgeon.errors import UsageError
from leansurgeon.tasks.classes import StoredClasses, map_classes

STARS = [f"{n} star{'s' * (n > 1)}" for n in range(1, 6)]
NLI = ["contradiction", "entailment", "neutral"]
TEN = ["tshirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"]


@pytest.mark.parametrize(
    ("labels", "own", "names", "says"),
    [
        (["Bag", "COAT", "t_shirt"], ["bag", "coat", "T-shirt"], ["Bag", "COAT", "t_shirt"], "by name"),
        (["terrier", "tench"], ["tench, Tinca tinca", "terrier"], ["tench", "terrier"], "by name"),
        (["1", "2", "3", "4"], STARS, ["1", "2", "3", "4", "5 stars"], "by name"),
        (["0", "1", "2", "3", "4"], STARS, list("01234"), "are read as 1 star, 2 stars"),
        (["0", "1", "2"], NLI, list("012"), "0, 1, 2 are read as contradiction, entailment, neutral"),
        (["LABEL_2", "LABEL_0"], [], ["LABEL_0", "LABEL_1", "LABEL_2"], "by number"),
        (["0", "3"], TEN, ["0", *TEN[1:3], "3", *TEN[4:]], "by number"),
        (["class_1", "class_10", "class_2"], [], ["class_1", "class_2", "class_10"], "by number"),
        (["grade 2", "grade 1"], ["1", "2", "3"], ["grade 1", "grade 2", "3"], "by name"),
        (["10 - 19", "3_9"], ["0-2", "3-9", "10-19"], ["0-2", "3_9", "10 - 19"], "by name"),
        (["pos", "neg"], ["NEGATIVE", "POSITIVE"], ["neg", "pos"], "neg, pos are read as NEGATIVE, POSITIVE"),
        (["neutral", "positive"], ["neg", "neu", "pos"], ["neg", "neutral", "positive"], "by how their names begin"),
        (["1", "-1"], ["harmless", "toxic"], ["-1", "1"], "-1, 1 are read as harmless, toxic"),
        (["True", "False"], ["true", "false"], ["True", "False"], "by name"),
    ],
)
def test_classes_are_the_outputs_that_are_called_so(labels, own, names, says):
    found = map_classes(labels, own, len(names))
    assert (list(found.names), found.new_head) == (names, False) and says in found.says


@pytest.mark.parametrize(
    "labels",
    [["ship", "car"], [str(n) for n in range(12)], [str(n) for n in range(1, 12)], ["site 3", "site 4"]],
)
def test_other_classes_need_a_new_head_and_say_whose_names_go(labels):
    found = map_classes(labels, TEN, 10)
    assert found.new_head and list(found.names) == labels and "tshirt" in found.says


def test_a_model_without_names_asks_which_output_is_which():
    with pytest.raises(UsageError, match="does not say what its 2 outputs are called") as caught:
        map_classes(["a", "b, c"], [], 2)
    assert '--classes a,"b, c"' in caught.value.hint and "task.class_names" in caught.value.hint
    assert list(map_classes(["a", "b"], [], 2, ["b", "a"]).names) == ["b", "a"]
    # Data that numbers its classes itself says it, too.
    found = map_classes(["b", "a"], [], 2, ordered=True)
    assert list(found.names) == ["b", "a"] and "the model names none" in found.says
    assert map_classes(["a", "b", "c"], [], 2).new_head


def test_names_of_which_some_are_known_are_refused_with_what_helps():
    with pytest.raises(UsageError, match=r"\b9 of the data's 10\b.*\bbags\b.*'bag'") as caught:
        map_classes(["bags" if name == "bag" else name for name in TEN], TEN, 10)
    assert "--classes" in caught.value.hint


@pytest.mark.parametrize(
    ("labels", "given", "names"),
    [
        (["0", "1", "2"], ["entailment", "neutral", "contradiction"], ["2", "0", "1"]),  # the hub's order
        (["1", "2", "3"], ["entailment", "neutral", "contradiction"], ["3", "1", "2"]),
        (["a", "b", "c"], ["c", "a", "b"], ["c", "a", "b"]),
        (["0", "1", "2"], ["1", "2", "0"], ["1", "2", "0"]),
        (["0", "1", "2"], ["x", "y", "z"], ["0", "1", "2"]),
    ],
)
def test_the_user_says_which_is_which(labels, given, names):
    assert list(map_classes(labels, NLI, 3, given).names) == names


def test_the_user_is_told_of_classes_that_were_forgotten_and_may_ask_for_a_new_head():
    with pytest.raises(UsageError, match=r"\bc\b"):
        map_classes(["a", "b", "c"], NLI, 3, ["a", "b"])
    assert map_classes(["a", "b", "c"], NLI, 3, ["new"]).new_head
    with pytest.raises(UsageError, match=r"'A' and 'a'.*\ba\b"):
        map_classes(["A", "a"], ["a", "b"], 2)


def test_stored_classes_become_outputs():
    stored = StoredClasses(["x", "y", "z"], np.array([0, 2, -100]), ["z", "w", "x"])
    assert stored.labels == ["x", "z"] and stored.outputs_of(np.array([2, 0, -100])).tolist() == [0, 2, -100]
    with pytest.raises(UsageError, match="x"):
        StoredClasses(["x", "y"], np.array([0, 1]), ["y", "w"])
