"""Open a SOURCE, a preset, folder, run, hub id or `timm/NAME`, as a `Source` with config, family and lazy tensors.

preset name      an architecture without weights
folder           config.json + safetensors (for a run folder, its `model/` is opened)
timm/NAME        a timm model with its published weights
org/name         a model of the hub, downloaded to the usual cache
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from leansurgeon import architectures
from leansurgeon.architectures import infer, towers
from leansurgeon.architectures.base import Architecture, Config, TensorSpec
from leansurgeon.architectures.match import AHEAD, match
from leansurgeon.architectures.presets import PRESETS, Preset
from leansurgeon.architectures.tensors import count_parameters
from leansurgeon.checkpoints.config import check_sizes, read_config
from leansurgeon.checkpoints.digests import Identity, has_changed, identity
from leansurgeon.checkpoints.foreign import companions, converted, trust, unpacked
from leansurgeon.checkpoints.kind import LANGUAGE, SUFFIX, class_name, find_used_class, head_note
from leansurgeon.checkpoints.publish.durable import passing, scratch
from leansurgeon.checkpoints.record import DamagedRecord, SurgeryRecord
from leansurgeon.checkpoints.record import read as read_record
from leansurgeon.checkpoints.weights import Weights, same_bytes
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError, did_you_mean, plural
from leansurgeon.reading.files import in_home
from leansurgeon.shape import ParameterCount, Shape


@dataclass(frozen=True)
class Source:
    """A model that surgery starts from. `weights` is None for a preset."""

    name: str
    kind: str  # preset | folder | hub | timm
    config: Config
    architecture: Architecture
    specs: tuple[TensorSpec, ...]
    folder: Path | None = None
    weights: Weights | None = None
    preset: Preset | None = None
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()  # the user's weight files, before any conversion
    record: SurgeryRecord | None = field(default=None, compare=False)  # its surgery.json, if there is one
    record_trouble: str = ""  # why its surgery.json cannot be read
    # State of its files when they were opened.
    seen: Mapping[Path, Identity] = field(default_factory=dict, repr=False, compare=False)
    held: ExitStack | None = field(default=None, repr=False, compare=False)  # temporary folders of converted weights

    @property
    def shape(self) -> Shape:
        """Layers, heads, head_dim and MLP, read from the config."""
        return self.architecture.shape(self.config)

    @property
    def flat_config(self) -> Config:
        """The keys of the config that describe the model itself."""
        return self.architecture.flat(self.config)

    @property
    def parameters(self) -> ParameterCount:
        """Parameters by part of the model; tied tensors and buffers are not counted."""
        return count_parameters(self.specs)

    @property
    def tower(self) -> str | None:
        """The selected tower of a multi-tower model."""
        return towers.of_section(self.architecture.section)

    @property
    def learned(self) -> bool:
        """Whether the weights have learned anything; those of presets and of untrained fresh models have not."""
        return self.weights is not None and (self.record is None or self.record.learned)

    @property
    def fitted(self) -> tuple[Mapping[str, Any], ...]:
        """The splits of the data that earlier cuts and trainings of ours fitted the weights on."""
        return tuple(self.record.all_fitted) if self.record else ()

    @cached_property
    def used_config(self) -> Config:
        """The config of the model as it is used (`find_used_class`).

        Loads the library's class, so this takes a moment.
        """
        name = find_used_class(self.folder, self.config, self.architecture)
        return self.config | {"architectures": [name]} if name else self.config

    @property
    def has_head(self) -> bool:
        """Whether the head that config.json names is in the files and is used."""
        return class_name(self.used_config) == class_name(self.config)

    @property
    def head_note(self) -> tuple[str, ...]:
        """A note for the user if the head that config.json names is not used."""
        note = head_note(class_name(self.config), class_name(self.used_config), self.folder)
        return (note,) if note else ()

    @property
    def head(self) -> str:
        """The head that a task must have for this model: one of `SUFFIX`, or "features".

        It is "features" if the model has no head, or one that no task has. A classifier whose head is missing in its
        files keeps its kind, so that it can be trained (`outputs` is 0).
        """
        name = class_name(self.config)
        if self.architecture.library == "timm":
            return "image-classification" if self.outputs else "features"
        speaks = towers.writes_text(self.architecture.section, name)
        kind = "causal-lm" if speaks else next((k for k, ends in SUFFIX.items() if name.endswith(ends)), "features")
        if kind == "features" or self.has_head:
            return kind
        return "features" if kind in LANGUAGE or companions.is_embedder(self.folder) else kind

    @property
    def outputs(self) -> int:
        """Number of classes (or values) of the classifier; 0 if there is none, or none that was trained."""
        if self.architecture.library == "timm":
            both = (self.flat_config, self.config)
            return next((c["num_classes"] for c in both if c.get("num_classes") is not None), 1000)
        name = class_name(self.config)
        if not any(head in name for head in ("ForImageClassification", "ForSequenceClassification")):
            return 0
        # transformers omits a number of labels of two from the config.
        return self.config.get("num_labels") or len(self.config.get("id2label") or "01") if self.has_head else 0

    @property
    def policy(self) -> str | None:
        """The head policy of the preset, also for a folder that was made from one."""
        return self.preset.policy if self.preset else None

    @property
    def pad_note(self) -> tuple[str, ...]:
        """The note about padding with a token that config.json does not name."""
        return tuple(note for note in self.notes if note.startswith(NO_PAD))

    @property
    def slug(self) -> str:
        """A name that is valid in a folder name."""
        return self.name.rstrip("/").split("/")[-1] if self.kind != "preset" else self.name.replace("/", "-")


def open_source(
    source: str,
    *,
    allow_pickle: bool = False,
    config_changes: Config | None = None,
    weights: bool = True,
    keep: ExitStack | None = None,
    tower: str | None = None,
) -> Source:
    """Resolve SOURCE.

    `config_changes` overrides config keys of a preset; `weights=False` opens only the shape of a timm or preset source;
    `tower` selects the part of a multi-tower model that surgery is for.

    A checkpoint that has to be converted is converted into a temporary folder that lives as long as the Source (or as
    `keep`, for callers that need it gone at a certain point). Raises `UsageError` for an unknown name and
    `UnsupportedModel` for a source that cannot be read.
    """
    held, tower = keep or ExitStack(), tower or towers.chosen_tower()
    if tower and (source in PRESETS or source.startswith("timm/")):
        raise UsageError(f"--tower {tower}: {source} has one tower only.")
    if config_changes and source not in PRESETS:
        raise UsageError(f"Config keys can be changed for presets only, and '{source}' is none.")
    path = in_home(source)
    if source in PRESETS:
        preset, changes = PRESETS[source], config_changes or {}
        architecture = architectures.load_families()[preset.family]
        config = deepcopy(preset.config)
        flat = architecture.flat(config)
        if unknown := [key for key in changes if key not in flat and key not in ("id2label", "label2id")]:
            near = did_you_mean(unknown[0], flat)
            raise UsageError(f"The preset '{source}' has no config key '{unknown[0]}'{near}.")
        flat.update(changes)
        opened = Source(source, "preset", config, architecture, tuple(architecture.tensors(config)), preset=preset)
    elif source.startswith("timm/"):
        opened = from_timm(source.removeprefix("timm/"), weights, held)
    elif os.path.isdir(path):  # not `path.is_dir()`, which raises for invalid file names
        name = path.name if passing(path) else source  # for a model in memory, saved in a scratch folder
        opened = from_folder(path, name=name, allow_pickle=allow_pickle, keep=held, tower=tower)
    elif os.path.isfile(path):
        raise unpacked.of_file(path)
    else:
        near = did_you_mean(source, PRESETS)
        looks_like_path = source.startswith((".", "/", "~")) or source.count("/") > 1
        if near or looks_like_path:
            what = "There is no folder" if looks_like_path and not near else "There is no preset or folder"
            raise UsageError(f"{what} '{source}'{near}.", "Presets: " + ", ".join(PRESETS) + ".")
        opened = from_hub(source, allow_pickle, held, tower)
    return replace(opened, held=held) if keep is None else opened


NO_PAD = "config.json names no pad token"


def from_folder(
    path: Path,
    *,
    name: str,
    kind: str = "folder",
    allow_pickle: bool = False,
    keep: ExitStack,
    tower: str | None = None,
) -> Source:
    """Open a model folder for reading; temporary folders live as long as `keep`."""
    if (path / "model" / "config.json").exists() and not (path / "config.json").exists():
        path = path / "model"  # a run folder
    kinds = ("config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.pt", "*.pth")
    there = sorted({file for kind in kinds for file in path.glob(kind) if file.is_file()})
    seen = {file: identity(file) for file in there}  # before the first of them is read
    original, config = path, read_config(path)
    notes = (f"revision {path.name}",) if kind == "hub" and path.parent.name == "snapshots" else ()
    record, trouble = None, ""
    try:
        record = read_record(path)
    except DamagedRecord as error:  # no reason to refuse the model
        trouble = error.message
        notes += (trouble,)
    files = ()
    if not list(path.glob("*.safetensors")) and not (path / "model.safetensors.index.json").exists():
        path, files = converted.from_pickle(path, allow_pickle, keep)
        notes += ("read from a pickle",)
    weights = Weights.open(path)
    files = files or tuple(weights.files)
    if converted.is_crammed_bert(config, weights.shapes):
        path = converted.from_crammed_bert(config, weights, keep)
        companions.copy(original, path, also=("README.md",))
        config, weights = read_config(path), Weights.open(path)
        notes += ("converted from the published Crammed BERT layout",)
    check_sizes(config, weights.shapes.values())
    config = complete(config, weights.shapes)
    filled = with_pad_token(config, original)
    if filled is not config:
        config, notes = filled, (*notes, f"{NO_PAD}: texts are filled up with token {filled['pad_token_id']}")

    def find_family() -> Architecture:
        return trust.judge_code(architectures.of(config, tower or tower_of(record, config)), config, original)

    architecture = find_family()
    config = trust.with_known_classes(config, architecture)
    weights = weights.rename_endings(architecture.renames)
    specs = match(architecture, config, weights.shapes)
    if (other := own_output(specs, weights)) and architecture.tied_when == "tie_word_embeddings":
        notes += (f"'{other}' differs from the embedding that it is declared to share, so both are kept",)
        for part in (config, architecture.flat(config)):
            part |= {"tie_word_embeddings": False}
        architecture = find_family()
        specs = match(architecture, config, weights.shapes)
    refuse_whole_numbers(specs, weights)
    have = {spec.name for spec in specs}
    if len(have) < len(weights.entries):
        notes += (describe_unread([name for name in weights.entries if name not in have], config),)
        flat = architecture.flat(config)
        flat |= {key: 0 for key in AHEAD if flat.get(key)}  # the layers that it counts are among the tensors left out
    return Source(
        name,
        kind,
        config,
        architecture,
        specs,
        path,
        weights,
        PRESETS.get(record.source.preset or "") if record else None,
        notes,
        files=files,
        record=record,
        record_trouble=trouble,
        seen=seen,
    )


def describe_unread(names: Sequence[str], config: Config) -> str:
    """Describe tensors in the files that the model's class does not read."""
    cls = (config.get("architectures") or ["the model"])[0]
    said = "tensors that {} does not read are" if len(names) > 1 else "tensor that {} does not read is"
    return f"{len(names):,} {said.format(cls)} left out, the first '{names[0]}'"


def own_output(specs: Sequence[TensorSpec], weights: Weights) -> str | None:
    """Return an output matrix that differs from the embedding it is said to be tied to; the library keeps both."""
    tables = [weights.entries[spec.name] for spec in specs if spec.role == "embedding"]
    for spec in specs:
        entry = weights.entries[spec.name]
        alike = [table for table in tables if table.shape == entry.shape and len(entry.shape) == 2]
        if spec.role == "tied" and alike and not any(same_bytes(table, entry) for table in alike):
            return spec.name
    return None


@contextmanager
def watch_for_changes(source: Source) -> Iterator[None]:
    """Raise `LeanSurgeonError` if a file of the source changes while the block runs, whatever the block raises."""
    try:
        yield
    except Exception as error:
        refuse_changed(source, error)
        raise
    refuse_changed(source)


def refuse_changed(source: Source, cause: Exception | None = None) -> None:
    """Raise `LeanSurgeonError` if a file of the source was written to since it was opened."""
    for file, before in source.seen.items():
        if has_changed(file, before):
            raise LeanSurgeonError(
                f"{file} has changed since it was opened, so what was read mixes two versions.",
                "Nothing was kept. Run the command again once nothing writes to it.",
            ) from cause


def refuse_whole_numbers(specs: Sequence[TensorSpec], weights: Weights) -> None:
    """Raise `UnsupportedModel` if parameters are stored as integers: a quantised model whose config does not say so."""
    name = next(
        (s.name for s in specs if s.counted and weights.entries[s.name].dtype.startswith(("I", "U", "BOOL"))), None
    )
    if name:
        raise UnsupportedModel(
            f"'{name}' is stored in {weights.entries[name].dtype}: the model is quantised, and surgery needs plain "
            "weights.",
            "Take the model that it was made from; its model card should name it.",
        )


def ask_tower(source: Source, named: str | None) -> None:
    """Raise `UsageError` with the towers of a model if it has several and none was selected."""
    if not source.architecture.section or named or towers.chosen_tower() or (source.record and source.record.tower):
        return
    from leansurgeon.architectures.infer import library, tiny

    try:
        with library.quietly():
            full = library.whole(source.config)
            model = library.Library.of(full).build(full, None, "meta")
    except (library.Unbuildable, UnsupportedModel):
        return
    kinds, there = {type(module.config) for module in model.modules() if hasattr(module, "config")}, {}
    for key, part in vars(model.config).items():
        layers = next((n for name in tiny.LAYERS if isinstance(n := getattr(part, name, None), int)), None)
        if layers and type(part) in kinds and (tower := towers.of_section(key)):
            there[tower] = layers
    if len(there) > 1:
        each = ", ".join(f"{tower} ({plural(layers, 'layer')})" for tower, layers in there.items())
        raise UsageError(f"{source.name} has several towers: {each}.", f"Choose one: --tower {next(iter(there))}.")


def tower_of(record: SurgeryRecord | None, config: Config) -> str | None:
    """Return the selected tower: the user's choice, else the one that earlier surgery was for.

    The latter makes later commands use the same tower of a result.
    """
    if chosen := towers.chosen_tower():
        return chosen
    return record.tower if record and not architectures.find_declared(config) else None


def complete(config: Config, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Config:
    """Return the config completed with the library's defaults for families that were not declared.

    A timm config gets the constructor's arguments; many on the hub omit some or all, since the name implies them. The
    preprocessing of images stays as in the file, since weights of one name differ in it. `shapes` of the weights reveal
    a variant that uses a declared family's name.
    """
    if "architecture" not in config or "model_type" in config:  # not a timm config
        model_type = config.get("model_type")
        inferred = model_type and not architectures.find_declared(config)
        return infer.complete_config(config) if inferred and architectures.is_transformers_type(model_type) else config
    given = {"num_classes": config.get("num_classes", 1000)} | (config.get("model_args") or {})
    whole = config | {"model_args": given}
    if infer.is_inferred(config):
        return whole
    family = architectures.find_declared(config)
    if family and config.get("model_args"):
        try:
            declared = {spec.name: spec.shape for spec in family.tensors(whole)}
            if shapes is None or declared == {name: tuple(size) for name, size in shapes.items()}:
                return whole
        except LeanSurgeonError:
            pass  # the file lists only differences from the model of that name
    built, said = timm_config(config["architecture"], given), config.get("pretrained_cfg") or config
    pixels = {key: said[key] for key in ("mean", "std", "interpolation", "crop_pct") if said.get(key)}
    return built | {"pretrained_cfg": built["pretrained_cfg"] | pixels}


def with_pad_token(config: Config, folder: Path, name: str | None = None) -> Config:
    """Return the config of a text classifier that is a decoder, with a pad token.

    The class (`name`, or the config's own) finds the last token of a text by it, and without one it accepts no batch of
    several texts. It is the tokenizer's pad token or, if that has none, the end token.
    """
    name = name or class_name(config)
    if not name.endswith("ForSequenceClassification") or config.get("pad_token_id") is not None:
        return config
    from transformers import AutoTokenizer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING or CONFIG_MAPPING[model_type]().pad_token_id is not None:
        return config  # the library has a default
    try:
        own = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception:  # no tokenizer, or a damaged one, which reading texts will report
        own = None
    ends = config.get("eos_token_id")
    ids = [*([own.pad_token_id, own.eos_token_id] if own else []), ends[0] if isinstance(ends, list) and ends else ends]
    pad = next((number for number in ids if isinstance(number, int)), None)
    return config if pad is None else config | {"pad_token_id": pad}


def timm_config(name: str, args: Config | None = None) -> Config:
    """Return the complete config of a timm model by its name, with `args` passed to its constructor.

    Raises `UnsupportedModel` for an unknown name.
    """
    from leansurgeon.architectures import timm_models

    model = timm_models.skeleton(name, args)
    family = architectures.find_declared({"architecture": name.split(".")[0]})
    covered = family and timm_models.source_config(family, name, model, args)
    return covered or infer.timm_config(name, args)


def from_timm(name: str, weights: bool, keep: ExitStack) -> Source:
    """Open a timm model by its name; without `weights` only its architecture."""
    config = timm_config(name)
    architecture = architectures.of(config)
    if not weights:
        return Source(f"timm/{name}", "timm", config, architecture, tuple(architecture.tensors(config)))
    import timm
    from safetensors.torch import save_file

    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:
        raise UnsupportedModel(
            f"The published weights of timm/{name} cannot be downloaded here ({type(error).__name__}).",
            "Without network, --init fresh starts from its architecture; or give a folder with the weights.",
        ) from None
    folder = keep.enter_context(scratch())
    tensors = {k: v.contiguous() for k, v in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return from_folder(folder, name=f"timm/{name}", kind="timm", keep=keep)


def from_hub(name: str, allow_pickle: bool, keep: ExitStack, tower: str | None = None) -> Source:
    """Open a model of the Hugging Face hub, downloaded or from its cache."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*", "NOTICE"]
    patterns += ["*.bin"] if allow_pickle else []
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        why, what = f"the hub does not give it ({type(error).__name__})", "Check the name and the network"
        if isinstance(error, LocalEntryNotFoundError):
            why = "the hub cannot be reached"
        if constants.is_offline_mode():
            why = "not in the hub's cache. The hub was not asked, since HF_HUB_OFFLINE is set"
            what = "Take HF_HUB_OFFLINE away"
        raise UnsupportedModel(
            f"'{name}' is neither a preset nor a folder, and {why}.",
            f"{what}, or download it elsewhere and give its folder.",
        ) from None
    return from_folder(folder, name=name, kind="hub", allow_pickle=allow_pickle, keep=keep, tower=tower)
