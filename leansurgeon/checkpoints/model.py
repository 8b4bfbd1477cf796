"""Models in memory: initialise one from a config, load one for a task, save it so that plain libraries load it again.

Imports torch, transformers and timm.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from leansurgeon import architectures
from leansurgeon.architectures.base import Architecture, Config
from leansurgeon.architectures.foreign import library_builds
from leansurgeon.architectures.infer.library import quietly, words_as_floats
from leansurgeon.architectures.towers import writes_text
from leansurgeon.checkpoints import record
from leansurgeon.checkpoints.config import check_sizes, read_config
from leansurgeon.checkpoints.family import auto_map, convert_config, write_config
from leansurgeon.checkpoints.foreign import companions, trust
from leansurgeon.checkpoints.kind import SUFFIX, class_name, find_used_class, transformers_class
from leansurgeon.checkpoints.publish.durable import give_mode
from leansurgeon.checkpoints.source import complete, tower_of, with_pad_token
from leansurgeon.checkpoints.weights import Weights
from leansurgeon.errors import LeanSurgeonError, UnsupportedModel, UsageError
from leansurgeon.progress import quiet_transformers
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.reading.pooling import Pooling, read_pooling


@dataclass
class Loaded:
    """A model with the information that training, measurement and saving need."""

    model: nn.Module
    architecture: Architecture
    config: Config
    folder: Path
    surgery: record.SurgeryRecord | None
    stored: torch.dtype | None = None  # precision of the weight files, used again when saving; None: as in memory
    _no_cache: dict[str, bool] = field(init=False, repr=False)  # keyword arguments of every forward pass

    def __post_init__(self) -> None:
        # By default, decoders of transformers cache keys and values of every layer, in training too.
        caches = "use_cache" in inspect.signature(self.model.forward).parameters
        self._no_cache = {"use_cache": False} if caches else {}

    def forward(self, batch: Mapping[str, Tensor], model: nn.Module | None = None) -> Tensor:
        """Return the logits of a batch, or the last hidden states of a model without a head.

        `model` may be a wrapper of this one (DDP, compiled). Labels and keys that start with `_` are not passed to the
        model.
        """
        model = model or self.model
        if self.architecture.library == "timm":
            return model(batch["pixel_values"])
        inputs = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("_")}
        said = model(**inputs, **self._no_cache)
        return said[0] if getattr(said, "logits", None) is None else said.logits

    def alone(self) -> Loaded:
        """Return the selected tower of a multi-tower model if the whole model does not run on that tower's input alone.

        Used for measurements. Raises `UnsupportedModel` if the tower does not run by itself.
        """
        architecture = self.architecture
        if not (place := tower_around((self.projections or [""])[0], self.model, architecture)):
            return self
        own = replace(inside(architecture, place), section="")
        return Loaded(self.model.get_submodule(place), own, self.config[architecture.section], self.folder, None)

    def features(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the last hidden states (B, T, D) of the body below any head, after its final norm.

        For a model of several towers they are those of the selected tower; timm's pyramids return (B, ..., D).
        """
        if self.architecture.library == "timm":
            return self.model.forward_features(batch["pixel_values"])
        inputs = {k: v for k, v in batch.items() if k != "labels" and not k.startswith("_")}
        path = tower_around((self.projections or [""])[0], self.model, self.architecture)
        body = self.model.get_submodule(path) if path else self.model.base_model
        quiet = {"use_cache": False} if "use_cache" in inspect.signature(body.forward).parameters else {}
        return body(**inputs, **quiet)[0]

    @cached_property
    def pooling(self) -> Pooling:
        """How the last hidden states are pooled into embeddings."""
        return read_pooling(self.folder)

    @property
    def projections(self) -> list[str]:
        """Module names of the output projections in order, one per attention of a layer."""
        names, paths = [n for n, _ in self.model.named_modules()], []
        stages = self.architecture.shape(self.config).stages
        for i, blocks in [(i, self.architecture.blocks(s)) for s, at in enumerate(stages) for i in range(at.depth)]:
            for path in blocks.projection:
                path = path.format(i=i)
                hits = [n for n in names if n == path or n.endswith("." + path)]
                if len(hits) != 1:
                    raise LeanSurgeonError(f"Layer {i} has {len(hits)} modules named '{path}' where one was expected.")
                paths += hits
        return paths

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in order, over all stages."""
        names = dict(self.model.named_modules())
        modules = []
        for number, stage in enumerate(self.architecture.shape(self.config).stages):
            place = self.architecture.blocks(number)
            template = (*place.projection, place.layer.rstrip("."))[0]  # some families do not declare their projections
            head, _, tail = template.partition("{i}")
            for layer in range(stage.depth):
                ending = f"{head}{layer}"
                path = next(name for name in names if name == ending + tail or name.endswith(f".{ending}{tail}"))
                modules.append(names[path.removesuffix(tail)])
        return modules

    @property
    def info(self) -> JsonObject:
        """Shape, parameters by part, and the surgery that the model went through."""
        shape = self.architecture.shape(self.config)
        # Adapters are not counted: they are merged when the model is saved.
        total = sum(p.numel() for name, p in self.model.named_parameters() if ".lora_" not in name)
        declared = self.architecture.count(self.config, shape)
        parts = {"embeddings": declared.embeddings, "attention": declared.attention, "mlp": declared.mlp}
        return {
            "source": self.surgery.source.name if self.surgery else str(self.folder),
            "shape": shape.as_dict(),
            "parameters": total,
            "init_std": self.init_std,
            "parts": parts | {"rest": total - sum(parts.values())},
            "surgery": self.surgery and self.surgery.as_dict(),
        }

    @property
    def init_std(self) -> float | None:
        """Standard deviation of new weights, if the config gives it."""
        return self.architecture.std(self.config)

    def save(self, folder: Path) -> None:
        """Write weights, config, modelling file, tokenizer files and surgery.json; plain libraries load the folder."""
        save_model(self.model, self.architecture, self.config, folder, self.stored)
        companions.copy(self.folder, folder)
        if self.surgery:
            record.write(folder, self.surgery.as_trained())
        give_mode(folder)


def inside(architecture: Architecture, place: str) -> Architecture:
    """Return the family with module names relative to the part of the model at `place`."""
    stages = (
        replace(blocks, projection=tuple(path.removeprefix(place + ".") for path in blocks.projection))
        for blocks in architecture.stages
    )
    return replace(architecture, stages=tuple(stages))


def tower_around(inside: str, model: nn.Module, architecture: Architecture) -> str:
    """Return the path of the selected tower around `inside`; empty if the whole model runs on that tower's input.

    Raises `UnsupportedModel` if the tower does not run by itself.
    """
    if not architecture.section or writes_text(architecture.section, type(model).__name__):
        return ""
    kind, parts = type(getattr(model.config, architecture.section)), inside.split(".")
    for path in (".".join(parts[:i]) for i in range(1, len(parts))):
        module = model.get_submodule(path)
        main = getattr(module, "main_input_name", "")  # a tower that runs by itself accepts its main input
        if isinstance(getattr(module, "config", None), kind) and main in inspect.signature(module.forward).parameters:
            return path
    tower = architecture.section.removesuffix("_config")
    said = f"The {tower} tower of this {architecture.name} does not run by itself, so it cannot be measured."
    raise UnsupportedModel(said, "`shrink --uncalibrated` and `plan` take it; or measure another tower.")


def initialise(config: Config, architecture: Architecture, seed: int) -> nn.Module:
    """Create a new model by the library's own initialisation, reproducible from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if architecture.library == "timm":
            config, architecture = buildable(config, architecture)
            with library_builds(config["architecture"]):
                return create_timm(config["architecture"], **architecture.flat(config))
        cls = transformers_class(architecture, class_name(config))
        with library_builds(cls.__name__):
            return cls(cls.config_class.from_dict(words_as_floats(config)))


def buildable(config: Config, architecture: Architecture) -> tuple[Config, Architecture]:
    """Return config and family in a form that can be built from constructor arguments (timm's VOLO cannot)."""
    if architecture.rebuilds:
        return config, architecture
    target = architectures.decoupled_form_of(architecture)
    return convert_config(config, architecture, target), target


def entry_module(name: str) -> str:
    """Return the module that registers one of our entry points with timm."""
    if name == architectures.infer.TIMM_LEAN:
        return "leansurgeon.models.timm_any"
    file = architectures.of({"architecture": name}).modelling
    return f"leansurgeon.models.{file.removesuffix('.py')}"


def create_timm(name: str, **kwargs: Any) -> nn.Module:
    """Create a timm model by its name, including those of our own modelling files."""
    import timm

    if name.startswith("leansurgeon_"):  # importing the modelling file registers the entry point
        importlib.import_module(entry_module(name))
    return timm.create_model(name, **kwargs)


def save_model(
    model: nn.Module,
    architecture: Architecture,
    config: Config,
    folder: Path,
    stored: torch.dtype | None = None,
) -> None:
    """Write weights and config as the library itself does.

    `config` is kept and completed by the keys that the library adds. `stored` is the precision to write all
    floating-point weights in.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if architecture.library == "timm":
        tensors = {k: cast(v.detach().cpu(), stored).contiguous() for k, v in model.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_config(folder, config, architecture)
        return
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=None if stored is None else half(model, stored))
    for stray in folder.glob("*.py"):
        stray.unlink()
    said = {} if stored is None else {"dtype": str(stored).removeprefix("torch.")}
    write_config(folder, read_config(folder) | {"architectures": config["architectures"]} | said, architecture)


def cast(tensor: Tensor, stored: torch.dtype | None) -> Tensor:
    """Convert a floating-point tensor to the stored precision; return other tensors unchanged."""
    return tensor if stored is None or not tensor.is_floating_point() else tensor.to(stored)


def half(model: nn.Module, stored: torch.dtype) -> dict[str, Tensor]:
    """Return the state dict in the stored precision; tied tensors stay tied."""
    made, narrow = {}, {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape)
        narrow[name] = made.setdefault(key, cast(tensor.detach(), stored)) if tensor.numel() else tensor
    return narrow


def load(
    folder: Path,
    head: str | None = None,
    overrides: Config | None = None,
    *,
    as_stored: bool = False,
    tower: str | None = None,
) -> Loaded:
    """Load a model folder in fp32 for a task. If it was stored in half precision, it is saved in half precision again.

    `head` is one of `SUFFIX`: a model with another head keeps its body and gets a new one. "features" keeps the model
    as it is, without a head that the files lack; None loads it as it is used (`find_used_class`). `overrides` are
    settings that the task needs: other labels give a new head, and what does not fit raises `UsageError`. `as_stored`
    keeps the precision of the files; `tower` selects a part of a multi-tower model.
    """
    if (folder / "model" / "config.json").exists() and not (folder / "config.json").exists():
        folder = folder / "model"
    config, weights, overrides = read_config(folder), Weights.open(folder), overrides or {}
    check_sizes(config, weights.shapes.values())
    config = complete(config, weights.shapes)
    surgery = record.read_if_whole(folder)
    family = architectures.of(config, tower or tower_of(surgery, config))
    config, architecture = buildable(config, trust.judge_code(family, config, folder))
    config = trust.with_known_classes(config, architecture)
    check_fit(architecture.flat(config), overrides)
    dtypes = {entry.dtype for entry in weights.entries.values() if len(entry.shape) > 1}
    stored = {"BF16": torch.bfloat16, "F16": torch.float16}.get(dtypes.pop()) if len(dtypes) == 1 else None
    dtype = stored if as_stored and stored else torch.float32
    if architecture.library == "timm":
        model, config = load_timm(folder, config, overrides)
        model = model.to(dtype)
    else:
        said = class_name(config)
        if head not in SUFFIX:
            used = find_used_class(folder, config, architecture, trains=head is not None)
            config = config | {"architectures": [used]} if used else config
        model = load_transformers(folder, config, architecture, head, overrides, dtype)
        if class_name(config) != said:
            architecture = inside(architecture, model.base_model_prefix)
        # The written config keeps the original class name, even without its head; a new head changes the class.
        same = head not in SUFFIX or said.endswith(SUFFIX[head]) or writes_text(architecture.section, said)
        config = model.config.to_dict() | {"architectures": [said if same else type(model).__name__]}
    return Loaded(model, architecture, config, folder, surgery, stored)


def check_fit(config: Config, overrides: Config) -> None:
    """Raise `UsageError` if the task's data do not fit the model's fixed sizes."""
    vocab, have = overrides.get("vocab_size"), config.get("vocab_size")
    if vocab and have and vocab > have:
        raise UsageError(
            f"The task's tokenizer has {vocab:,} tokens, and the model's vocabulary holds {have:,}.",
            "Choose a smaller vocab_size in the task.",
        )
    for key, timm_key in (("image_size", "img_size"), ("num_channels", "in_chans")):
        want, have = overrides.get(key), config.get(key, config.get(timm_key))
        have = have[0] if isinstance(have, list | tuple) and len(set(have)) == 1 else have  # timm's square images
        if want and have and want != have:
            raise UsageError(
                f"The task's images have {key} {want}, and the model takes {have}.", "Choose a model or task that fits."
            )


def load_timm(folder: Path, config: Config, overrides: Config) -> tuple[nn.Module, Config]:
    """Load a timm model strictly with its weights; return it with its config. `num_labels` gives it a new head."""
    args = dict(config.get("model_args", {}))
    with library_builds(config["architecture"]):
        model = create_timm(config["architecture"], **args)
        model.load_state_dict(load_file(folder / "model.safetensors"), strict=True)
    labels = overrides.get("num_labels")
    if labels and labels != args.get("num_classes", 1000):
        model.reset_classifier(labels)
        config = config | {"num_classes": labels, "model_args": args | {"num_classes": labels}}
    if (names := overrides.get("id2label")) and len(config.get("label_names") or ()) != len(names):
        config = config | {"label_names": [*names.values()]}
    return model, config


def load_transformers(
    folder: Path,
    config: Config,
    architecture: Architecture,
    head: str | None,
    overrides: Config,
    dtype: torch.dtype,
) -> nn.Module:
    """Load a transformers model with its weights, in its own class or in that for the task `head`."""
    name = class_name(config)
    speaks = head == "causal-lm" and writes_text(architecture.section, name)
    if head in SUFFIX and not name.endswith(SUFFIX[head]) and not speaks:
        if not (own := task_classes(architecture, head)):
            able = ", ".join(other for other in SUFFIX if any(task_classes(architecture, other)))
            raise UnsupportedModel(f"{architecture.name} has no class for {head}.", able and f"It has one for: {able}.")
        name = own[0]
    anew = name != (class_name(config) or name)  # the files hold no weights for this head
    cls = transformers_class(architecture, name)
    extra = {}
    labels = overrides.get("num_labels")
    if labels and (labels != len(config.get("id2label") or {0: 0, 1: 1}) or anew):
        extra = {"num_labels": labels, "ignore_mismatched_sizes": True}
        extra |= {"problem_type": overrides["problem_type"]} if "problem_type" in overrides else {}
    own = config.get("id2label") or {}
    named = any(name != f"LABEL_{number}" for number, name in own.items())
    if overrides.get("id2label") and not (named and len(own) == labels):
        extra |= {"id2label": overrides["id2label"], "label2id": {v: k for k, v in overrides["id2label"].items()}}
        extra.pop("num_labels", None)
    if (padded := with_pad_token(config, folder, name)) is not config:
        extra["pad_token_id"] = padded["pad_token_id"]
    with library_builds(cls.__name__), quiet_transformers():  # hides the report of a new head; we report it
        return cls.from_pretrained(folder, dtype=dtype, **extra)


@dataclass(frozen=True)
class Placement:
    """How the tensors of a file fit the library's class: tensors that are missing, unexpected, or of another size."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    runs: bool = True


def place(
    config: Config, architecture: Architecture, sizes: Mapping[str, tuple[int, ...]], *, run: bool = False
) -> Placement | None:
    """Place tensors of these sizes in the library's class on meta; return None if it cannot be built that way.

    `run` also calls the model on tokens. Tensors that a class ignores by itself (`_keys_to_ignore_on_load_unexpected`)
    do not count as unexpected.
    """
    try:
        with quietly():
            if architecture.library == "timm":
                with torch.device("meta"):
                    model = create_timm(config["architecture"], **architecture.flat(config))
                there = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
                missing, unexpected = tuple(sorted(set(there) - set(sizes))), tuple(sorted(set(sizes) - set(there)))
                mismatched = tuple(sorted(n for n in sizes if n in there and there[n] != tuple(sizes[n])))
            else:
                cls = transformers_class(architecture, class_name(config) or "AutoModel")
                state = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
                model, info = cls.from_pretrained(
                    None,
                    config=cls.config_class.from_dict(words_as_floats(config)),
                    state_dict=state,
                    device_map="meta",
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
                missing, unexpected, mismatched = (
                    tuple(sorted(name if isinstance(name, str) else name[0] for name in info[f"{what}_keys"]))
                    for what in ("missing", "unexpected", "mismatched")
                )
    except Exception:  # libraries raise errors of any type; reloading the result gives the reason
        return None
    runs = True
    if run:
        try:
            with quietly(), torch.no_grad():
                model.eval()(input_ids=torch.zeros(1, 8, dtype=torch.long, device="meta"))
        except Exception:  # as above
            runs = False
    return Placement(missing, unexpected, mismatched, runs)


def task_classes(architecture: Architecture, head: str) -> list[str]:
    """Return the names of the family's classes for a task."""
    if architecture.library == "leansurgeon":
        full = auto_map(architecture.modelling, architecture.model_types[0]).get(f"AutoModel{SUFFIX[head][0]}")
        return [full.split(".")[-1]] if full else []
    from transformers.models.auto import modeling_auto as auto

    table = getattr(auto, f"MODEL_FOR_{head.replace('-', '_').upper()}_MAPPING_NAMES")
    names = table.get(architecture.model_types[0], [])
    return [names] if isinstance(names, str) else list(names)
