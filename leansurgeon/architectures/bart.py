"""BART and mBART: an encoder and a decoder with config keys of their own, so their heads may differ.

The library derives head_dim from the width, the same in both stacks; the decoupled forms have one for each. A
decoder layer attends to itself and to the encoder's output; both attentions have the decoder's heads. BART normalises
after each part, mBART before it and at the end.
"""

from dataclasses import replace

from leansurgeon.architectures.base import Architecture, Keys, Tensor, derive
from leansurgeon.architectures.lean import lean, of_transformers
from leansurgeon.architectures.tensors import Blocks, attention, linear, norm


def part(name: str, group: int = 0) -> tuple[Tensor, ...]:
    """An attention with its norm."""
    return (*attention(f"{name}.", "q_proj k_proj v_proj out_proj", group=group), *norm(f"{name}_layer_norm"))


def stack(side: str) -> tuple[Tensor, ...]:
    """What an encoder or decoder has outside its blocks."""
    return (
        Tensor(f"{side}.embed_positions.weight", "embedding", "positions width"),
        *norm(f"{side}.layernorm_embedding"),
    )


def keys(side: str) -> Keys:
    """The config keys of the encoder or the decoder."""
    return Keys(f"{side}_layers", f"{side}_attention_heads", "d_model", mlp_dim=f"{side}_ffn_dim")


FEED_FORWARD = (
    *linear("fc1", "up", "mlp", "width"),
    *linear("fc2", "down", "width", "mlp"),
    *norm("final_layer_norm"),
)

BART = of_transformers(
    "bart",
    keys=keys("encoder"),
    stages=(
        Blocks(
            "encoder.layers.{i}.",
            (*part("self_attn"), *FEED_FORWARD),
            ("encoder.layers.{i}.self_attn.out_proj",),
            keys("encoder"),
        ),
        Blocks(
            "decoder.layers.{i}.",
            (*part("self_attn"), *part("encoder_attn", group=1), *FEED_FORWARD),
            ("decoder.layers.{i}.self_attn.out_proj", "decoder.layers.{i}.encoder_attn.out_proj"),
            keys("decoder"),
        ),
    ),
    prefixes=("model.", ""),
    outer=(
        Tensor("shared.weight", "embedding", "vocab width"),
        *stack("encoder"),
        *stack("decoder"),
        Tensor("/final_logits_bias", "buffer", "1 vocab", when="generates"),
    ),
    sizes={"vocab": "vocab_size", "positions": lambda c: c["max_position_embeddings"] + 2},
    switches={"generates": lambda c: (c.get("architectures") or [""])[0].endswith("ForConditionalGeneration")},
    tied=("lm_head.weight",),
    # Copies of the one embedding in early files.
    unused={"": tuple(f"{prefix}{side}.embed_tokens." for prefix in ("model.", "") for side in ("encoder", "decoder"))},
    # Other names of the library for the encoder's numbers, which would overrule them.
    forget=("num_hidden_layers", "num_attention_heads"),
    norm="post",
    init_std="init_std",
    decoupled="leansurgeon_bart",
)

MBART = derive(
    BART,
    name="mbart",
    model_types=("mbart",),
    outer=(*BART.outer, *norm("encoder.layer_norm"), *norm("decoder.layer_norm")),
    norm="pre",
    decoupled="leansurgeon_mbart",
)


def with_head_dims(of: Architecture, prefix: str) -> Architecture:
    """The decoupled form: a head_dim for each stack."""
    heads = ("Model", "ForConditionalGeneration", "ForSequenceClassification", "ForQuestionAnswering")
    return lean(
        of,
        "decoupled_bart.py",
        keys=replace(of.keys, head_dim="encoder_head_dim"),
        stages=tuple(
            replace(blocks, keys=replace(blocks.keys, head_dim=f"{side}_head_dim"))
            for side, blocks in zip(("encoder", "decoder"), of.stages, strict=True)
        ),
        classes={f"{prefix}{head}": f"Lean{prefix}{head}" for head in heads},
    )


LEAN_BART = with_head_dims(BART, "Bart")
LEAN_MBART = with_head_dims(MBART, "MBart")
