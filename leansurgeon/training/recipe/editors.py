"""The JSON schema of recipe files, by which editors complete keys and underline mistakes while one types. No torch.

A file that names a `base` may leave out what the base says, so in it nothing is required; nor is it in `retrain` and
`debug`, which are laid upon other blocks.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path

from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.tasks import TASKS
from leansurgeon.training.recipe import shipped
from leansurgeon.training.recipe.schema import ExperimentRecipe, TrainingRecipe

REF = "#/$defs/"
PARTIAL = "Partial"
LINE = "# yaml-language-server: $schema="


def json_schema() -> JsonObject:
    """The schema of a recipe file as it is written: a training, an experiment, or what is laid upon a `base`."""
    whole: JsonObject = {}
    for model in (TrainingRecipe, ExperimentRecipe):
        described = model.model_json_schema(ref_template=REF + "{model}")
        whole |= described.pop("$defs")
        whole[model.__name__] = described
    whole["TaskChoice"]["properties"]["name"]["enum"] = list(TASKS)
    arms = whole["ExperimentRecipe"]["properties"]["arms"]
    arms["additionalProperties"] = {"anyOf": [arms["additionalProperties"], {"type": "null"}]}  # `original:`
    parts = {PARTIAL + name: partial(part) for name, part in whole.items()}
    based = copy.deepcopy(parts[PARTIAL + "ExperimentRecipe"])
    based["properties"] = parts[PARTIAL + "TrainingRecipe"]["properties"] | based["properties"]
    based["properties"]["kind"] = {"enum": ["training", "experiment"]}
    based["properties"]["base"] = {"type": "string", "description": "A shipped base or recipe, or a file beside this."}
    experiment = whole["ExperimentRecipe"]["properties"]
    experiment["retrain"] = {"$ref": f"{REF}{PARTIAL}Train"}
    experiment["debug"] = {"$ref": f"{REF}Based"}
    based["properties"] |= {key: experiment[key] for key in ("retrain", "debug")}
    kind = {"if": {"properties": {"kind": {"const": "experiment"}}, "required": ["kind"]}}
    kind |= {"then": {"$ref": f"{REF}ExperimentRecipe"}, "else": {"$ref": f"{REF}TrainingRecipe"}}
    used = whole | parts | {"Based": based}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "leansurgeon recipe",
        "type": "object",
        "if": {"required": ["base"]},
        "then": {"$ref": f"{REF}Based"},
        "else": kind,
        "$defs": {name: used[name] for name in sorted(reached(used, ["Based", "ExperimentRecipe", "TrainingRecipe"]))},
    }


def partial(part: Json) -> Json:
    """The same part of a schema with nothing required, here and in the parts that it refers to."""
    if isinstance(part, list):
        return [partial(item) for item in part]
    if not isinstance(part, dict):
        return part
    kept = {key: partial(value) for key, value in part.items() if key != "required"}
    if "$ref" in kept:
        kept["$ref"] = kept["$ref"].replace(REF, REF + PARTIAL)
    return kept


def reached(parts: dict[str, Json], names: list[str]) -> set[str]:
    """The parts that are referred to, directly or through others."""
    seen: set[str] = set()
    left = list(names)
    while left:
        if (name := left.pop()) not in seen:
            seen.add(name)
            left += re.findall(r"'#/\$defs/(\w+)'", str(parts[name]))
    return seen


def copied(text: str, target: Path) -> str:
    """The text of a shipped recipe for a copy elsewhere: its line for editors leads to the schema that lies here."""
    home = shipped.folder()
    if home is None or target.resolve().parent == home:
        return text
    return re.sub(f"^{re.escape(LINE)}.*$", lambda _: f"{LINE}{(home / shipped.SCHEMA).as_uri()}", text, flags=re.M)
