"""Read a config.json of unknown origin and check every value that this package or a library relies on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leansurgeon.architectures.tensors import Config
from leansurgeon.checkpoints.foreign import trust, unpacked
from leansurgeon.errors import UnsupportedModel, quote, raised_as
from leansurgeon.reading import jsonfile
from leansurgeon.reading.jsonfile import Json

LARGEST = 2**31 - 1
LAYERS = 10_000
STAGES = 64  # entries of a list that has one per stage
CLASSES = 1_000_000  # libraries make a dictionary of class names


@dataclass(frozen=True)
class ValueKind:
    """The kind of value a key must have, in words and as a test; `several` allows a list of them, one per stage."""

    words: str
    test: Callable[[Any], bool]
    several: bool = False
    branches: bool = False  # a stage may have its own list, with 0 for a missing branch

    def fits(self, value: Json) -> bool:
        """Return whether a value is of this kind. None counts as unset and always fits."""
        if value is None:
            return True
        items = value if self.several and isinstance(value, list | tuple) else [value]
        return 0 < len(items) <= STAGES and all(item is not None and self.fits_one(item) for item in items)

    def fits_one(self, item: Json) -> bool:
        """Return whether an entry of a list is of this kind."""
        if self.branches and isinstance(item, list | tuple):
            return len(item) <= STAGES and all(part == 0 or self.test(part) for part in item)
        return self.test(item)


def whole(least: int, most: int = LARGEST) -> Callable[[Any], bool]:
    """Return a test for integers from `least` to `most`; booleans fail it."""
    return lambda value: type(value) is int and least <= value <= most


def is_number(value: Json) -> bool:
    """Return whether the value is a finite number below 1e30; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e30


DEPTH = ValueKind(f"a whole number from 1 to {LAYERS:,}", whole(1, LAYERS), several=True, branches=True)
COUNT = ValueKind(f"a whole number from 1 to {LARGEST:,}", whole(1), several=True)
COUNT_OR_NONE = ValueKind(f"a whole number from 0 to {LARGEST:,}", whole(0), several=True)
NUMBER = ValueKind("a finite number", is_number, several=True)
ONE_COUNT, ONE_COUNT_OR_NONE, ONE_NUMBER = (replace(kind, several=False) for kind in (COUNT, COUNT_OR_NONE, NUMBER))
WHOLE = replace(ONE_COUNT, test=lambda value: is_number(value) and value % 1 == 0 and ONE_COUNT.test(int(value)))
SWITCH = ValueKind("true or false", lambda value: isinstance(value, bool) or value in (0, 1))
TOKEN = ValueKind(
    "the number of a token", lambda value: all(map(whole(-1), value if isinstance(value, list) else [value]))
)
TEXT = ValueKind("a text", lambda value: isinstance(value, str))
TEXTS = ValueKind("a list of texts", lambda value: isinstance(value, list) and all(map(TEXT.test, value)))
# Names, or integers: the forms of `id2label` and `label2id`.
LABELS = ValueKind(
    "an object of names",
    lambda value: isinstance(value, dict) and all(isinstance(item, str | int) for item in value.values()),
)
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))

DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
    "depth", "depths",
)  # fmt: skip
WIDTHS = (  # each is the size of some tensor
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "intermediate_size", "ffn_dim", "n_inner", "d_ff",
    "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "vocab_size", "embedding_size", "word_embed_proj_dim",
)  # fmt: skip
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
    "num_key_value_heads", "head_dim", "d_kv",
)  # fmt: skip
BY_KIND: tuple[tuple[ValueKind, tuple[str, ...]], ...] = (
    (DEPTH, DEPTHS),
    (COUNT, (*WIDTHS, *HEADS, "conv_kernel_size", "image_size", "img_size", "patch_size")),
    (ONE_COUNT, (
        "n_positions", "block_size", "num_channels", "in_chans", "relative_attention_num_buckets", "num_landmarks",
        "global_attn_every_n_layers", "relative_attention_max_distance",
    )),
    (WHOLE, ("max_position_embeddings",)),  # may be 1200.0
    (ONE_COUNT_OR_NONE, (
        "type_vocab_size", "num_register_tokens", "segment_means_seq_len", "sliding_window", "local_attention",
        "max_window_layers",
    )),
    (COUNT_OR_NONE, ("window_size",)),
    (ValueKind(f"a whole number from 0 to {CLASSES:,}", whole(0, CLASSES)), ("num_labels", "num_classes")),
    (ONE_NUMBER, (
        "layer_norm_eps", "layer_norm_epsilon", "rms_norm_eps", "norm_eps", "initializer_range",
        "initializer_factor", "init_std", "rope_theta", "hidden_dropout_prob", "attention_probs_dropout_prob",
        "attention_dropout", "dropout", "embd_pdrop", "attn_pdrop", "resid_pdrop", "classifier_dropout",
        "layerscale_value", "partial_rotary_factor", "logits_scaling", "attention_multiplier",
        "query_pre_attn_scalar",
    )),
    (replace(NUMBER, branches=True), ("mlp_ratio", "mlp_ratios")),
    (SWITCH, (
        "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_bias", "use_cache",
        "is_encoder_decoder", "is_decoder", "add_cross_attention", "scale_decoder_outputs", "use_gated_mlp",
        "do_layer_norm_before", "layer_norm_elementwise_affine", "scale_attn_by_inverse_layer_idx",
        "use_sliding_window", "output_attentions", "output_hidden_states", "return_dict",
    )),
    (replace(SWITCH, several=True), ("qkv_bias",)),
    (TOKEN, (
        "pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "decoder_start_token_id",
    )),
    (TEXT, (
        "model_type", "architecture", "hidden_act", "activation_function", "feed_forward_proj", "problem_type",
        "dtype", "torch_dtype", "position_embedding_type", "global_pool",
    )),
    (TEXTS, ("architectures", "layer_types")),
    (LABELS, ("id2label", "label2id")),
    (OBJECT, ("model_args", "pretrained_cfg", "rope_scaling", "rope_parameters", "auto_map", "arch", "vision_config")),
)  # fmt: skip
KINDS = {name: kind for kind, names in BY_KIND for name in names}


def read_config(path: Path) -> Config:
    """Read config.json of a model folder.

    Raises `UnsupportedModel` if it is missing or unusable: not JSON, values of the wrong kind, a quantised model.
    """
    file = path / "config.json"
    if not file.exists():
        raise unpacked.of_folder(path)
    with raised_as(UnsupportedModel):
        config = jsonfile.read_object(file)
    check(config, path)
    return config


def check(config: Config, path: Path) -> None:
    """Raise `UnsupportedModel` if the config of the model in `path` cannot be used.

    It is refused if it asks for code or other weights, if the model is quantised, or if a value is of the wrong kind.
    """
    if not trust.is_allowed():
        trust.refuse_kernels(config, path)
    trust.refuse_loaders(config, path)
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(
            f"{path} is quantised ({quote(method)}); surgery needs plain weights.",
            "Take the model that it was made from; its model card should name it.",
        )
    check_kinds(config)


def sections(config: Config, where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield a config and those nested in it (timm's `model_args`, `text_config`, ...), each with its key path."""
    yield where, config
    for key, value in config.items():
        if isinstance(value, Mapping) and (key == "model_args" or key.endswith("_config")):
            yield from sections(value, f"{where}{key}.")


def check_kinds(config: Config) -> None:
    """Raise `UnsupportedModel` for the first key whose value has a kind that no library accepts."""
    for where, values in sections(config):
        for key, value in values.items():
            kind = KINDS.get(key)
            if kind and not kind.fits(value):
                raise UnsupportedModel(f"config.json says {where}{key} = {quote(value)}, which is not {kind.words}.")


def flat(value: Json) -> Iterator[Json]:
    """Yield the items of nested lists, or the value itself if it is no list."""
    if not isinstance(value, list | tuple):
        yield value
        return
    for part in value:
        yield from flat(part)


def is_built(config: Config, size: int) -> bool:
    """Return whether some tensor of the model's class, built on meta, has a side of at least `size`.

    Returns True if the class cannot be built.
    """
    from leansurgeon.architectures.infer.library import Library, Unbuildable, quietly

    try:
        with quietly():
            model = Library.of(config).build(config, None, "meta")
    except (Unbuildable, UnsupportedModel):
        return True
    return any(side >= size for parameter in model.parameters() for side in parameter.shape)


def check_sizes(config: Config, shapes: Iterable[tuple[int, ...]]) -> None:
    """Raise `UnsupportedModel` if the config asks for more layers or larger sizes than the tensors have.

    The error gives both numbers. This runs before any library builds the model. Sizes that the model's class does not
    build (the text tower of an image classifier, the vocabulary of BEiT's pretraining) are ignored.
    """
    shapes = list(shapes)
    widest = max((size for shape in shapes for size in shape), default=0)
    for where, values in sections(config):
        for key, value in values.items():
            numbers = [number for number in flat(value) if number]
            said = f"config.json says {where}{key} = {quote(value)}"
            if key in DEPTHS and sum(numbers) > len(shapes):
                raise UnsupportedModel(
                    f"{said}, and the weights hold {len(shapes):,} tensors.", "The config does not fit its weights."
                )
            if key in (*WIDTHS, *HEADS) and (largest := max(numbers, default=0)) > widest:
                if "model_type" in config and (where or "image_size" in values) and not is_built(config, largest):
                    continue
                raise UnsupportedModel(
                    f"{said}, and the largest size of any tensor is {widest:,}.", "The config does not fit its weights."
                )
