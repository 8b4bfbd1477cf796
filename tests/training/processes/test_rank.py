"""Which process of its group this one is is asked in one place."""

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.progress import command_screen
from leansurgeon.rank import group_variables, is_first_here, is_worker, rank
from leansurgeon.training.processes import launch

GROUP = {"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("said", "number", "worker", "first"),
    [
        ({}, 0, False, True),
        (GROUP | {"RANK": "0", "LOCAL_RANK": "0"}, 0, True, True),
        (GROUP | {"RANK": "3", "LOCAL_RANK": "0"}, 3, True, True),
        (GROUP | {"RANK": "2", "LOCAL_RANK": "1"}, 2, True, False),
    ],
)
def test_the_environment_says_which_process_this_is(monkeypatch, said, number, worker, first):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert (rank(), is_worker(), is_first_here()) == (number, worker, first)
    assert command_screen().quiet == (number > 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK", "MASTER_ADDR", "MASTER_PORT"]),
        ({"LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "its WORLD_SIZE is 1"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=''"]),
        (GROUP | {"RANK": "two"}, ["RANK='two'"]),
        (GROUP | {"RANK": "4"}, ["RANK=4", "its WORLD_SIZE is 4"]),
        (GROUP | {"RANK": "1", "MASTER_PORT": "0"}, ["MASTER_PORT='0'"]),
        (GROUP | {"RANK": "1", "MASTER_ADDR": ""}, ["MASTER_ADDR"]),
    ],
)
def test_what_cannot_be_is_one_sentence_of_a_lone_process(change, named, monkeypatch):
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    assert rank() == 0 and not is_worker()
    with pytest.raises(UsageError) as refused:
        launch.group_size()
    assert all(word in refused.value.message for word in named)
    assert f"unset {' '.join(group_variables())}" in refused.value.hint
