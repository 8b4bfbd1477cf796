"""T5, Flan-T5 and mT5: an encoder and a decoder, both pre-norm, whose heads may have any size (`d_kv`).

Both stacks have one `num_heads` in the config, so they change together. Positions are a table of relative distances
with one column a head; the first layer of a stack holds it, and every layer of the stack reads it. So all layers of a
stack keep the same heads, and the table stays with the stack whichever layers go.
"""

from math import sqrt

from leansurgeon.architectures.base import Config, Keys, Tensor, derive
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import Blocks, attention

ENCODER = Keys("num_layers", "num_heads", "d_model", mlp_dim="d_ff", head_dim="d_kv")
DECODER = Keys("num_decoder_layers", "num_heads", "d_model", mlp_dim="d_ff", head_dim="d_kv", depth_like="num_layers")
ENCODER_ONLY = ("EncoderModel", "ForTokenClassification")


def feed_forward(number: int) -> tuple[Tensor, ...]:
    """The MLP of a layer, the part of this number, and its norm."""
    name = f"layer.{number}.DenseReluDense"
    return (
        Tensor(f"{name}.wi.weight", "up", "mlp width", when="!gated"),
        Tensor(f"{name}.wi_0.weight", "gate", "mlp width", when="gated"),
        Tensor(f"{name}.wi_1.weight", "up", "mlp width", when="gated"),
        Tensor(f"{name}.wo.weight", "down", "width mlp"),
        Tensor(f"layer.{number}.layer_norm.weight", "norm", "width"),
    )


SELF_ATTENTION = (
    *attention("layer.0.SelfAttention.", "q k v o", bias=False),
    Tensor("layer.0.SelfAttention.relative_attention_bias.weight", "head_param", "distances heads", in_others=False),
    Tensor("layer.0.layer_norm.weight", "norm", "width"),
)
CROSS_ATTENTION = (
    *attention("layer.1.EncDecAttention.", "q k v o", bias=False, group=1),
    Tensor("layer.1.layer_norm.weight", "norm", "width"),
)


def has_decoder(config: Config) -> bool:
    """Whether the model's class has a decoder."""
    return not (config.get("architectures") or [""])[0].endswith(ENCODER_ONLY)


def is_tied(config: Config) -> bool:
    """The first T5 scales its output and ties it to the embedding; v1.1 does neither. transformers 5 writes
    `tie_word_embeddings` true into every config, so the scaling is what tells them apart.
    """
    return config.get("tie_word_embeddings") is not False and config.get("scale_decoder_outputs") is not False


def natural(config: Config) -> float:
    """T5's standard deviation for a matrix that reads the residual stream."""
    return config.get("initializer_factor", 1.0) / sqrt(config["d_model"])


T5 = of_transformers(
    "t5",
    keys=ENCODER,
    stages=(
        Blocks(
            "encoder.block.{i}.",
            (*SELF_ATTENTION, *feed_forward(1)),
            ("encoder.block.{i}.layer.0.SelfAttention.o",),
            ENCODER,
        ),
        Blocks(
            "decoder.block.{i}.",
            (*SELF_ATTENTION, *CROSS_ATTENTION, *feed_forward(2)),
            ("decoder.block.{i}.layer.0.SelfAttention.o", "decoder.block.{i}.layer.1.EncDecAttention.o"),
            DECODER,
            when="decoder",
        ),
    ),
    prefixes=("", "transformer."),
    outer=(
        Tensor("shared.weight", "embedding", "vocab width"),
        Tensor("encoder.final_layer_norm.weight", "norm", "width"),
        Tensor("decoder.final_layer_norm.weight", "norm", "width", when="decoder"),
    ),
    sizes={"vocab": "vocab_size", "distances": "relative_attention_num_buckets"},
    switches={
        "decoder": has_decoder,
        "gated": lambda c: str(c.get("feed_forward_proj", "relu")).startswith("gated"),
        "tied": is_tied,
    },
    defaults={"relative_attention_num_buckets": 32},
    tied=("lm_head.weight",),
    tied_when="tied",
    ties_new=True,
    # Early files carry a table that no class reads, and copies of the one embedding.
    unused={
        "": (
            "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
            "encoder.embed_tokens.",
            "decoder.embed_tokens.",
        )
    },
    # Other names of the library for the same numbers, which would overrule them.
    forget=("num_hidden_layers", "num_attention_heads", "head_dim"),
    norm="pre",
    positions="relative",
    # Scores are not divided by the root of head_dim; queries start as much smaller.
    init_std={"q": lambda c: natural(c) / sqrt(c["d_kv"]), "": natural},
    score_scale=lambda c: 1.0,
)

# mT5's library class says of every config that its output is tied; a head that differs from the embedding stays apart.
MT5 = derive(T5, name="mt5", model_types=("mt5",), switches={**T5.switches, "tied": lambda c: False})
