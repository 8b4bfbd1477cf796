"""OPT: a decoder with learned positions (two spare rows) and ReLU; pre-norm but for the 350M model."""

from leansurgeon.architectures.base import Keys, Tensor, derive
from leansurgeon.architectures.lean import of_transformers
from leansurgeon.architectures.tensors import attention, linear, norm

OPT = of_transformers(
    "opt",
    when="do_layer_norm_before",
    keys=Keys("num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="ffn_dim"),
    prefixes=("model.decoder.", "decoder.", ""),
    layer="layers.{i}.",
    block=(
        *attention("self_attn.", "q_proj k_proj v_proj out_proj", bias="enable_bias"),
        *norm("self_attn_layer_norm", when="layer_norm_elementwise_affine"),
        *linear("fc1", "up", "mlp", "width", bias="enable_bias"),
        *linear("fc2", "down", "width", "mlp", bias="enable_bias"),
        *norm("final_layer_norm", when="layer_norm_elementwise_affine"),
    ),
    outer=(
        Tensor("embed_tokens.weight", "embedding", "vocab embedding"),
        Tensor("embed_positions.weight", "embedding", "positions width"),
        Tensor("project_in.weight", "embedding", "width embedding", when="projected"),
        Tensor("project_out.weight", "head", "embedding width", when="projected"),
        *norm("final_layer_norm", when="final_norm"),
    ),
    sizes={
        "vocab": "vocab_size",
        "positions": lambda c: c["max_position_embeddings"] + 2,
        "embedding": lambda c: c.get("word_embed_proj_dim") or c["hidden_size"],
    },
    switches={
        "projected": lambda c: (c.get("word_embed_proj_dim") or c["hidden_size"]) != c["hidden_size"],
        "final_norm": lambda c: (
            c["do_layer_norm_before"] and c["layer_norm_elementwise_affine"] and not c.get("_remove_final_layer_norm")
        ),
    },
    defaults={"enable_bias": True, "layer_norm_elementwise_affine": True, "do_layer_norm_before": True},
    projection="layers.{i}.self_attn.out_proj",
    tied=("lm_head.weight",),
    norm="pre",
    causal=True,
    init_std="init_std",
)

OPT_POST_NORM = derive(OPT, name="opt_post_norm", when="!do_layer_norm_before", norm="post")
