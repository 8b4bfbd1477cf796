"""Small random models of the library: built from a config, saved and reloaded under the names of files.

Inference works on these models only. Tensors are identified by their names in files, which in transformers differ from
the names in memory: `state_in_file` is what `save_pretrained` would write, `reload` what `from_pretrained` makes of it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from leansurgeon.architectures.foreign import library_builds
from leansurgeon.architectures.infer import inputs
from leansurgeon.architectures.tensors import Config
from leansurgeon.errors import UnsupportedModel
from leansurgeon.progress import change_setting, quiet_transformers

LARGEST = 60_000_000  # largest model that inference builds, in parameters
# The class of a family whose config names none: the first of these mappings that has one.
MAPPINGS = (
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


# Reasons why a library fails on a small model; they are meant for developers, not for users.
REFUSED = "its library refuses such a config"
UNBUILT = "its library does not build it so"
UNLOADED = "its library does not load it so"
UNRUN = "it does not run so"
FAILED = (REFUSED, UNBUILT, UNLOADED, UNRUN)


class Unbuildable(Exception):
    """The library makes no running model of a config; the text gives the reason, the cause is the library's error."""


@contextlib.contextmanager
def raising(why: str) -> Iterator[None]:
    """Turn whatever the library raises in this block into an `Unbuildable` with the reason `why`."""
    try:
        yield
    except Exception as error:
        raise Unbuildable(why) from error


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silence the libraries while small models are tried."""
    with (
        change_setting(logging.disable, logging.CRITICAL, lambda: logging.root.manager.disable),
        quiet_transformers(),
        warnings.catch_warnings(),
        change_setting(write_to, io.StringIO(), lambda: sys.stdout),
    ):
        warnings.simplefilter("ignore")
        yield


def write_to(stream: TextIO) -> None:
    """Redirect the process's standard output."""
    sys.stdout = stream


def config_class(model_type: str) -> type:
    """Return the config class of a type. Raises `UnsupportedModel` if this version of transformers has none."""
    import transformers
    from transformers import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]
    except (KeyError, ImportError, AttributeError):
        raise UnsupportedModel(
            f"'{model_type}' is an architecture that neither leansurgeon nor transformers {transformers.__version__} "
            "knows.",
            "A newer transformers may know it; a family of your own is one declaration (see architectures/families).",
        ) from None


def class_name(model_type: str) -> str | None:
    """Return the model class of a type for configs that name none."""
    from transformers.models.auto import modeling_auto as auto

    candidates = [getattr(auto, name, {}).get(model_type) for name in MAPPINGS]
    names = [f if isinstance(f, str) else f[0] for f in candidates if f]
    return next((name for name in names if takes(name, model_type)), next(iter(names), None)) or own_class(model_type)


def own_class(model_type: str) -> str | None:
    """Return the class of a type that no mapping lists, such as a part of a model.

    It is a class in the library's file for the type that takes its configs, preferably a whole model.
    """
    import transformers

    config = config_class(model_type)
    try:
        room = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return None
    kinds = [getattr(transformers, name, None) for name in vars(room) if not name.endswith("PreTrainedModel")]
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)]
    fit = [kind.__name__ for kind in models if kind.config_class is config]
    return min(fit, key=lambda name: (not name.endswith(("Model", "Transformer", "Encoder")), len(name)), default=None)


def takes(name: str, model_type: str) -> bool:
    """Return whether a class takes configs of this type (some mappings list the class of a part of it)."""
    import transformers

    try:
        return getattr(transformers, name).config_class is config_class(model_type)
    except (ImportError, AttributeError, RuntimeError):
        return False


def model_class(config: Config) -> type[nn.Module]:
    """Return the library's class for a `config.json`. Raises `UnsupportedModel`."""
    import transformers

    name = (config.get("architectures") or [None])[0] or class_name(config["model_type"])
    cls = getattr(transformers, name, None) if name else None
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        raise UnsupportedModel(
            f"transformers {transformers.__version__} has no model class {name or ''} for '{config['model_type']}'."
        )
    return cls


def whole(config: Config) -> Config:
    """Return a config with every key that the library adds. Raises `UnsupportedModel` if the library refuses it."""
    of_type = config_class(config["model_type"])
    with library_builds(of_type.__name__):
        made = of_type.from_dict(plain(config))
        return {k: floats_as_words(v) for k, v in made.to_dict().items() if k != "transformers_version"}


def plain(config: Config) -> Config:
    """Return a config in the form that the library's classes accept."""
    return {k: words_as_floats(v) for k, v in config.items() if k not in ("torch_dtype", "dtype", "auto_map")}


def words_as_floats(value: Any) -> Any:
    """Return a copy with infinity and NaN, which JSON lacks and transformers writes as `{"__float__": ...}`."""
    if isinstance(value, dict):
        return (
            float(value["__float__"])
            if set(value) == {"__float__"}
            else {k: words_as_floats(v) for k, v in value.items()}
        )
    return [words_as_floats(v) for v in value] if isinstance(value, list | tuple) else value


def floats_as_words(value: Any) -> Any:
    """Invert `words_as_floats`."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": {math.inf: "Infinity", -math.inf: "-Infinity"}.get(value, "NaN")}
    if isinstance(value, dict):
        return {k: floats_as_words(v) for k, v in value.items()}
    return [floats_as_words(v) for v in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Library:
    """One class of the library. Configs are dictionaries as in `config.json`.

    With a `section` they are that part of the config `outer`, which stays unchanged: one tower of a multi-tower model.
    """

    cls: type[nn.Module]
    outer: Config = field(default_factory=dict)
    section: str = ""

    @classmethod
    def of(cls, config: Config) -> Library:
        return cls(model_class(config))

    def join_config(self, config: Config) -> Config:
        """Return the config of the whole model."""
        return {**self.outer, self.section: dict(config)} if self.section else dict(config)

    def settings(self, config: Config) -> Any:
        """Return the config as an object of the library. Raises `Unbuildable`."""
        config = self.join_config(config)
        with raising(REFUSED):
            return with_plain_attention(config_class(config["model_type"]).from_dict(plain(config)))

    def build(self, config: Config, seed: int | None = 0, device: str = "cpu") -> nn.Module:
        """Build a model in eval mode, fp32, with random weights (`seed=None` keeps the library's initialisation).

        Raises `Unbuildable`.
        """
        made = self.settings(config)
        with raising(UNBUILT), torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(0)
            model = self.cls(made).float().eval()
        if seed is not None:
            perturb(model, seed)
        return model

    def state_in_file(self, model: nn.Module) -> dict[str, Tensor]:
        """Return what a file of this model holds, by the names in the file."""
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        state = model.state_dict()
        for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
            state.pop(name, None)
        state = remove_tied_weights_from_state_dict(state, model)
        return {name: tensor.detach() for name, tensor in revert_weight_conversion(model, state).items()}

    def example(self, model: nn.Module, config: Config) -> dict[str, Tensor]:
        """Return inputs that a model of this config runs on."""
        return inputs.example(model, self.join_config(config))

    def tied_names(self, model: nn.Module) -> list[str]:
        """Return the names in memory of tensors that are tied to others."""
        return sorted(getattr(model, "all_tied_weights_keys", None) or {})

    def load_class(self, settings: Any, **how: Any) -> Any:
        return self.cls.from_pretrained(None, config=settings, **how)

    def reload(self, config: Config, state: Mapping[str, Tensor]) -> nn.Module:
        """Load such a file with `from_pretrained`.

        Raises `Unbuildable` if a tensor is unexpected, missing, or of another size.
        """
        made = self.settings(config)
        with raising(UNLOADED):
            model, info = self.load_class(
                made,
                state_dict={k: v.contiguous() for k, v in state.items()},
                output_loading_info=True,
                attn_implementation="eager",
                dtype=torch.float32,
            )
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[what]:
                first_one = min(map(str, info[what]))
                raise Unbuildable(f"{len(info[what])} {what.replace('_', ' ')}, the first {first_one}")
        return model.eval()


def with_plain_attention(made: Any) -> Any:
    """Set eager attention and no cache in a config and its parts."""
    made._attn_implementation, made.use_cache = "eager", False
    for part in vars(made).values():
        if hasattr(part, "_attn_implementation"):
            part._attn_implementation = "eager"
    return made


@torch.no_grad()
def memory_names(library: Library, model: nn.Module) -> dict[str, str]:
    """Return names in memory by names in files; for a tensor merged from several files' tensors, one of them."""
    numbered = copy.deepcopy(model)
    names = list(numbered.state_dict())
    for i, tensor in enumerate(numbered.state_dict().values()):
        tensor.fill_(i)
    numbers = {name: int(t.flatten()[0]) for name, t in library.state_in_file(numbered).items() if t.numel()}
    return {name: names[i] for name, i in numbers.items() if i < len(names)}


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Add random values to every saved parameter, so that nothing is equal, zero or one by initialisation alone.

    Parameters that the library neither saves nor loads (Marian's positions) are not changed.
    """
    generator = torch.Generator().manual_seed(seed)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and name not in unsaved:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * noise.to(parameter.dtype))


@torch.no_grad()
def outputs(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """Return logits, or the first output of a model without a head. Raises `Unbuildable`."""
    with raising(UNRUN):
        torch.manual_seed(0)
        cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
        return first(model(**given, **cache)).float()


def first(output: Any) -> Tensor:
    """Return the main tensor of an output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        for key in ("logits", "last_hidden_state"):
            if isinstance(output.get(key), Tensor):
                return output[key]
        output = tuple(output.values())
    parts = (first(part) if isinstance(part, tuple | list) else part for part in output)
    return next(part for part in parts if isinstance(part, Tensor) and part.is_floating_point())


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the spread of `a`; infinity for other shapes or non-finite values."""
    if a.shape != b.shape or not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    return float((a - b).abs().max() / a.std().clamp(min=1e-6))
