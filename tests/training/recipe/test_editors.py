"""The JSON schema of recipes: it takes what the reader takes, and refuses structural mistakes where they stand."""

import json
from pathlib import Path

import jsonschema
import pytest

from leansurgeon.errors import UsageError
from leansurgeon.reading import yamlfile
from leansurgeon.training.recipe import reading, shipped
from tests.support.command_line import leansurgeon

SCHEMA = reading.json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
TRAINING = """
name: mine
task: {name: digits}
train: {duration: 1ep, batch: 8, optim: {lr: 1e-3}}
"""
EXPERIMENT = """
name: mine
kind: experiment
source: digits-vit
task: {name: digits}
train: {duration: 1ep, batch: 8, optim: {lr: 1e-3}}
retrain: {duration: 2ep}
arms: {original: , lean: {heads: 8, layers: 3}}
"""


def wrong(text: str) -> list[str]:
    """The paths of what the schema refuses, innermost."""
    errors = list(VALIDATOR.iter_errors(yamlfile.value(text, "a test")))
    return [".".join(map(str, jsonschema.exceptions.best_match([error]).absolute_path)) for error in errors]


@pytest.mark.parametrize("name", shipped.list_shipped())
def test_shipped_recipes_are_valid_and_name_their_schema(name):
    path = shipped.list_shipped()[name]
    assert not list(VALIDATOR.iter_errors(yamlfile.read(path)[0]))
    line = path.read_text().splitlines()[0]
    assert line.startswith(reading.LINE)
    assert (path.parent / line.removeprefix(reading.LINE)).is_file()


def test_the_shipped_schema_is_one_and_what_the_command_prints():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    done = leansurgeon("recipes", "schema")
    assert json.loads(done.stdout) == SCHEMA
    assert (shipped.folder() / shipped.SCHEMA).read_text() == done.stdout, (
        "write it anew: leansurgeon recipes schema > recipes/recipe.schema.json"
    )


MISTAKES = {
    "an unknown key": (TRAINING, "batch: 8", "batchh: 8", "train"),
    "a number out of range": (TRAINING, "batch: 8", "batch: 0", "train.batch"),
    "no such task": (TRAINING, "name: digits", "name: digitz", "task.name"),
    "an experiment's key in a training": (TRAINING, "name: mine", "name: mine\nsource: digits-vit", ""),
    "an unknown key of an arm": (EXPERIMENT, "layers: 3", "layer: 3", "arms.lean"),
    "an unknown key of retrain": (EXPERIMENT, "duration: 2ep", "durration: 2ep", "retrain"),
    "no arms": (EXPERIMENT, "{original: , lean: {heads: 8, layers: 3}}", "{}", "arms"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_found_where_they_stand_and_the_reader_refuses_them_too(name, tmp_path):
    text, old, new, place = MISTAKES[name]
    assert old in text and not wrong(text)
    assert place in wrong(text.replace(old, new))
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(old, new))
    with pytest.raises(UsageError):
        reading.load(str(file))


def test_what_a_base_says_may_be_left_out_and_unknown_keys_may_not():
    assert not wrong("{base: digits-vit, name: mine, train: {batch: 16}}")
    assert wrong("{base: digits-vit, name: mine, train: {batchh: 16}}") == ["train"]


def test_a_copy_elsewhere_names_the_schema_of_this_installation(tmp_path):
    done = leansurgeon("recipes", "copy", "digits-vit", tmp_path / "mine.yaml")
    first, *rest = Path(done.stdout.strip()).read_text().splitlines()
    assert first == reading.LINE + (shipped.folder() / shipped.SCHEMA).as_uri()
    assert rest == shipped.list_shipped()["digits-vit"].read_text().splitlines()[1:]
