"""config.json of somebody else: read, and every value that anything here or a library relies on checked in one place,
whatever the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from leansurgeon.architectures.tensors import Config
from leansurgeon.checkpoints.foreign import trust, unpacked
from leansurgeon.errors import UnsupportedModel, quote, raised_as
from leansurgeon.reading import jsonfile, modelcard
from leansurgeon.reading.jsonfile import Json

LARGEST = 2**31 - 1
LAYERS = 10_000
STAGES = 64  # numbers in a list that has one for each
CLASSES = 1_000_000  # of which libraries make a dictionary of names


@dataclass(frozen=True)
class ValueKind:
    """What a value must be, in words and as a test; a list of such values too, where a pyramid has one a stage."""

    words: str
    test: Callable[[Any], bool]
    several: bool = False
    branches: bool = False  # a stage may have a list of its own, with 0 for what it lacks

    def fits(self, value: Json) -> bool:
        """Whether a value is of this kind. None says nothing, and always fits."""
        if value is None:
            return True
        items = value if self.several and isinstance(value, list | tuple) else [value]
        return 0 < len(items) <= STAGES and all(item is not None and self.fits_one(item) for item in items)

    def fits_one(self, item: Json) -> bool:
        """Whether an entry of a list is of this kind."""
        if self.branches and isinstance(item, list | tuple):
            return len(item) <= STAGES and all(part == 0 or self.test(part) for part in item)
        return self.test(item)


def whole(least: int, most: int = LARGEST) -> Callable[[Any], bool]:
    """A check for whole numbers from `least` to `most`; booleans are none."""
    return lambda value: type(value) is int and least <= value <= most


def is_number(value: Json) -> bool:
    """Whether the value is a finite number below 1e30; booleans are none."""
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
# Names, or whole numbers, as `id2label` and `label2id` have them.
LABELS = ValueKind(
    "an object of names",
    lambda value: isinstance(value, dict) and all(isinstance(item, str | int) for item in value.values()),
)
OBJECT = ValueKind("an object", lambda value: isinstance(value, dict))

DEPTHS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
    "depth", "depths",
)  # fmt: skip
WIDTHS = (  # each of which is the size of some tensor
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
    (WHOLE, ("max_position_embeddings",)),  # 1200.0, too
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
    """config.json of a model folder. Raises `UnsupportedModel` where there is none, or none that can be used: not JSON,
    values of the wrong kind, a quantised model.
    """
    file = path / "config.json"
    if not file.exists():
        raise unpacked.of_folder(path)
    with raised_as(UnsupportedModel):
        config = jsonfile.read_object(file)
    check(config, path)
    return config


def check(config: Config, path: Path) -> None:
    """Raises `UnsupportedModel` where a config, of the model in `path`, cannot be used: it asks for code or other
    weights, it is quantised, a value is of the wrong kind.
    """
    if not trust.is_allowed():
        trust.refuse_kernels(config, path)
    trust.refuse_loaders(config, path)
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else quantised
        raise UnsupportedModel(
            f"{path} is quantised ({quote(method)}); surgery needs plain weights.",
            modelcard.where_to_get(path, config.get("_name_or_path")),
        )
    check_kinds(config)


def sections(config: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A config and what it holds of others: timm's `model_args`, `text_config` and the like; each with its place."""
    yield where, config
    for key, value in config.items():
        if isinstance(value, Mapping) and (key == "model_args" or key.endswith("_config")):
            yield from sections(value, f"{where}{key}.")


def check_kinds(config: Mapping[str, Any]) -> None:
    """Raises `UnsupportedModel` naming the first key whose value is of another kind than every library has it."""
    for where, values in sections(config):
        for key, value in values.items():
            kind = KINDS.get(key)
            if kind and not kind.fits(value):
                raise UnsupportedModel(f"config.json says {where}{key} = {quote(value)}, which is not {kind.words}.")


def flat(value: Json) -> Iterator[Json]:
    """What lists within lists hold; a value itself."""
    if not isinstance(value, list | tuple):
        yield value
        return
    for part in value:
        yield from flat(part)


def is_built(config: Mapping[str, Any], size: int) -> bool:
    """Whether a tensor of the model's class, built without memory, is so large on one side; True where it cannot be."""
    from leansurgeon.architectures.infer.library import Library, Unbuildable, quietly

    try:
        with quietly():
            model = Library.of(config).build(config, None, "meta")
    except (Unbuildable, UnsupportedModel):
        return True
    return any(side >= size for parameter in model.parameters() for side in parameter.shape)


def check_sizes(config: Mapping[str, Any], shapes: Iterable[tuple[int, ...]]) -> None:
    """Raises `UnsupportedModel`, with both numbers, where the config asks for more layers than there are tensors,
    or for something wider than the widest of them: before any library builds it. What the model's class does not build
    (the text tower of an image classifier, the words of BEiT's pretraining) is not asked for.
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
