"""Find, read, check and write recipe files, and generate their JSON schema, with which editors complete keys and
underline mistakes. No torch here.

A recipe may name another file as its `base` and is merged over it mapping by mapping; the shipped recipes share common
settings in this way (`recipes/bases`). A mistake is reported in one sentence with file, line, key and the nearest known
key.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema

from leansurgeon import tasks
from leansurgeon.errors import UsageError, did_you_mean
from leansurgeon.reading import files, yamlfile
from leansurgeon.reading.jsonfile import Json, JsonObject
from leansurgeon.training.recipe.schema import ExperimentRecipe, Recipe, Train, TrainingRecipe, merge
from leansurgeon.training.recipe.shipped import SCHEMA, bases, folder, list_shipped


def find(name_or_path: str) -> Path:
    """Return the file of a shipped recipe's name or of a path. Raises `UsageError` with the nearest name."""
    known = list_shipped() | bases()
    path = Path(name_or_path)
    if name_or_path in known and not path.is_file():
        return known[name_or_path]
    if path.suffix in (".yaml", ".yml") or "/" in name_or_path or path.is_file():
        return path
    raise UsageError(
        f"There is no recipe {name_or_path!r}{did_you_mean(name_or_path, known)}.",
        "`leansurgeon recipes list` shows the shipped recipes; a path to a .yaml file works too.",
    )


def text_of(path: Path) -> str:
    """Return the text of a recipe file, comments included. Raises `UsageError` if it cannot be read."""
    return files.read_text(path, yamlfile.LIMIT)


def load(name_or_path: str, sets: Sequence[str] = (), *, debug: bool = False) -> Recipe:
    """Read and check a recipe; `sets` are `a.b=c` overrides, applied after the `debug` block if `debug` is set.

    Raises `UsageError` (exit code 2) with the file, the line, the key, and the key that was probably meant.
    """
    path = find(name_or_path)
    raw, places = _read(path)
    if debug and not raw.get("debug"):
        raise UsageError(f"{path} has no `debug` block, so there is no --debug variant of it.")
    if debug:
        raw = {key: value for key, value in merge(raw, raw["debug"]).items() if key != "debug"}
    return _check(with_sets(raw, sets), _Source(str(path), places, sets=sets, over=("debug",) if debug else ()))


def _read(path: Path, above: tuple[Path, ...] = ()) -> tuple[JsonObject, Places]:
    """Return the keys of a file merged over those of its `base`, and where each was written; `above` are the files on
    the way.

    `base` is the name of a shipped base or recipe, or a path relative to the file.
    """
    if not path.exists():
        raise UsageError(f"There is no recipe file {path}.", "`leansurgeon recipes list` shows the shipped ones.")
    raw, lines = yamlfile.read(path)
    if not isinstance(raw, dict):
        raise UsageError(f"{path}: a recipe is a mapping of keys such as `name`, `task` and `train`.")
    places = {key: f"{path}, line {line}" for key, line in lines.items()}
    if "base" not in raw:
        return raw, places
    name, where = raw["base"], places[("base",)]
    own = {key: value for key, value in raw.items() if key != "base"}
    known = bases() | list_shipped()
    beside = path.parent / str(name)
    other = known.get(str(name)) or (beside if beside.is_file() else None)
    if other is None:
        near = did_you_mean(str(name), known)
        raise UsageError(f"{where}: `base`: there is no recipe {name!r}{near}, and no such file beside this one.")
    if other.resolve() in (*above, path.resolve()):
        raise UsageError(f"{where}: `base`: {name!r} is based on this recipe itself.")
    below, written = _read(other, (*above, path.resolve()))
    return merge(below, own), written | places


def load_training(name_or_path: str, sets: Sequence[str] = (), *, transferred: bool = True) -> TrainingRecipe:
    """Like `load`, but return an experiment's training (`retrain` merged over `train` if `transferred`), with `sets`
    applied.
    """
    recipe = load(name_or_path)
    if isinstance(recipe, TrainingRecipe):
        return load(name_or_path, sets)
    training = recipe.training(transferred=transferred)
    return check_recipe(plain(training), sets, str(find(name_or_path))) if sets else training


def check_recipe(raw: JsonObject, sets: Sequence[str], where: str) -> Recipe:
    """Check a recipe that was not read from a file, with `sets` applied; `where` names it in errors."""
    return _check(with_sets(raw, sets), _Source(where, {}, sets=sets))


def dump(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that `load` reads back to the same value."""
    return yaml.safe_dump(plain(recipe), sort_keys=False, allow_unicode=True, width=110)


def brief(recipe: Recipe) -> str:
    """Return the recipe's non-default values as YAML for a person, in lines that fit a terminal."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=70)


def plain(recipe: Recipe) -> JsonObject:
    """Return the recipe as plain values, without unset ones; `measure: null` has a meaning and stays."""
    values = recipe.model_dump(mode="json", exclude_none=True)
    if recipe.measure is None or recipe.measure.kappa is None:
        left = values.get("measure")
        values["measure"] = left | {"kappa": None} if left else None
    return values


Places = dict[tuple[str, ...], str]  # key path -> "FILE, line N"


@dataclass(frozen=True)
class _Source:
    """Where a key was written: in a line of a file, in its `debug` block, or in a `--set`."""

    file: str
    places: Places
    sets: Sequence[str] = ()
    over: tuple[str, ...] = ()

    def of(self, path: tuple[str, ...]) -> str:
        """Return where `path` was written; if `--set` changed keys below it, all of those."""
        below = []
        for text in reversed(self.sets):
            keys = tuple(text.partition("=")[0].strip().split("."))
            if keys == path[: len(keys)]:
                return f"--set {text}"
            if path == keys[: len(path)]:
                below.insert(0, f"--set {text}")
        if below:
            return " ".join(below)
        around = [(*self.over, *path), *(path[:length] for length in range(len(path), 0, -1))]
        return next((self.places[key] for key in around if key in self.places), self.file)


def with_sets(raw: JsonObject, sets: Sequence[str]) -> JsonObject:
    for text in sets:
        key, equals, value = text.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise UsageError(f"--set {text}: write it as key.key=value, for example --set train.optim.lr=1e-3.")
        if parts[0] in Train.model_fields and parts[0] not in TrainingRecipe.model_fields:
            raise UsageError(f"--set {text}: unknown key `{key}` (did you mean 'train.{key}'?).")
        nested: Any = yamlfile.value(value, f"--set {text}")
        for part in reversed(parts):
            nested = {part: nested}
        raw = merge(raw, nested)
    return raw


def _check(raw: JsonObject, source: _Source) -> Recipe:
    """Return the recipe that `raw` describes, after checking its `retrain` block and task options too."""
    kind = raw.get("kind", "training")
    models = {"training": TrainingRecipe, "experiment": ExperimentRecipe}
    if not isinstance(kind, str) or kind not in models:
        raise UsageError(f"{source.of(('kind',))}: kind is `training` or `experiment`, and {kind!r} is neither.")
    recipe = _validate(models[kind], raw, (), source)
    chosen = {("task",): recipe.task}
    if isinstance(recipe, ExperimentRecipe):
        _validate(Train, merge(raw["train"], recipe.retrain), ("retrain",), source)
        for name, arm in recipe.arms.items():
            _validate(Train, merge(raw["train"], arm.train or {}), ("arms", name, "train"), source)
        chosen |= {("arms", name, "task"): recipe.task_of(name) for name, arm in recipe.arms.items() if arm.task}
    for path, task in chosen.items():
        try:
            tasks.make(task.name, task.options)
        except UsageError as error:
            raise UsageError(f"{source.of(path)}: {error.message}", error.hint) from None
    return recipe


def _validate(model: type[BaseModel], raw: Any, prefix: tuple[str, ...], source: _Source) -> Any:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _sentence(error, model, prefix, source) from None


def _sentence(error: ValidationError, model: type[BaseModel], prefix: tuple[str, ...], source: _Source) -> UsageError:
    """Return the first mistake as one sentence. Unknown keys go first: they often cause the missing ones."""
    mistake = min(error.errors(include_url=False), key=lambda item: item["type"] != "extra_forbidden")
    path, kind = (*prefix, *_keys(mistake["loc"])), mistake["type"]
    name = ".".join(path)
    if kind == "extra_forbidden":
        known = list(getattr(_model_at(model, mistake["loc"][:-1]), "model_fields", ()))
        near = did_you_mean(path[-1], known) or (f" (known: {', '.join(known)})" if known else "")
        return UsageError(f"{source.of(path)}: unknown key `{name}`{near}.")
    if kind == "missing":
        return UsageError(f"{source.of(path)}: `{name}` is missing.")
    if kind == "value_error":
        text = str(mistake["ctx"]["error"])
    elif kind == "model_type":
        keys = ", ".join(_model_at(model, mistake["loc"]).model_fields)
        text = f"takes keys ({keys}), and {mistake['input']!r} was given"
    else:
        given = mistake["input"]
        text = mistake["msg"].replace("Input should be", "must be")
        text = text[0].lower() + text[1:] + ("" if isinstance(given, dict) else f", and {given!r} was given")
    return UsageError(f"{source.of(path)}: {f'`{name}`: ' if name else ''}{text}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model inside `Model`, `Model | None` or `dict[str, Model]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in typing.get_args(annotation) if (model := _model_in(inner))), None)


def _model_at(model: type[BaseModel] | None, loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    for key in loc:
        if model is None or key not in model.model_fields:
            continue  # an arm's name: a key of a dict of models
        model = _model_in(model.model_fields[key].annotation)
    return model


def _keys(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return pydantic's location without what it adds for unions (`arms.lean.heads.int` -> `arms.lean.heads`)."""
    keys: list[str] = []
    for part in loc:
        if isinstance(part, str) and (part in ("int", "str", "float") or "[" in part):
            break
        keys.append(str(part))
    return tuple(keys)


REF = "#/$defs/"
LINE = "# yaml-language-server: $schema="


def json_schema() -> JsonObject:
    """Return the schema of a recipe file as written: a training, an experiment, or a file with a `base`. It requires
    no key: a base may hold it.
    """
    _, made = models_json_schema([(TrainingRecipe, "validation"), (ExperimentRecipe, "validation")])
    parts = without_required(made["$defs"])
    parts["TaskChoice"]["properties"]["name"]["enum"] = list(tasks.TASKS)
    training, experiment = (parts[name]["properties"] for name in ("TrainingRecipe", "ExperimentRecipe"))
    arms = experiment["arms"]
    arms["additionalProperties"] = {"anyOf": [arms["additionalProperties"], {"type": "null"}]}  # `original:`
    experiment["retrain"] = {"$ref": f"{REF}Train"}
    experiment["debug"] = {"$ref": f"{REF}Based"}
    base = {"type": "string", "description": "A shipped base or recipe, or a file beside this."}
    kinds = {"kind": {"enum": ["training", "experiment"]}}
    parts["Based"] = parts["ExperimentRecipe"] | {"properties": training | experiment | kinds | {"base": base}}
    kind = {"if": {"properties": {"kind": {"const": "experiment"}}, "required": ["kind"]}}
    kind |= {"then": {"$ref": f"{REF}ExperimentRecipe"}, "else": {"$ref": f"{REF}TrainingRecipe"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "leansurgeon recipe",
        "type": "object",
        "if": {"required": ["base"]},
        "then": {"$ref": f"{REF}Based"},
        "else": kind,
        "$defs": parts,
    }


def without_required(part: Json) -> Json:
    """Return the same part of a schema with nothing required."""
    if isinstance(part, list):
        return [without_required(item) for item in part]
    if not isinstance(part, dict):
        return part
    return {key: without_required(value) for key, value in part.items() if key != "required"}


def copy_text(text: str, target: Path) -> str:
    """Return the text of a shipped recipe for a copy elsewhere, with its schema line pointing to the
    installed schema.
    """
    home = folder()
    if home is None or target.resolve().parent == home:
        return text
    return re.sub(f"^{re.escape(LINE)}.*$", lambda _: f"{LINE}{(home / SCHEMA).as_uri()}", text, flags=re.M)
