"""OPT: a decoder with learned positions (two spare rows) and ReLU; pre-norm but for the 350M model."""

from leansurgeon.architectures.base import Architecture, Keys, Tensor, derive

ATTENTION = (
    Tensor("self_attn.q_proj.weight", "q", "q width"),
    Tensor("self_attn.q_proj.bias", "q", "q", when="enable_bias"),
    Tensor("self_attn.k_proj.weight", "k", "kv width"),
    Tensor("self_attn.k_proj.bias", "k", "kv", when="enable_bias"),
    Tensor("self_attn.v_proj.weight", "v", "kv width"),
    Tensor("self_attn.v_proj.bias", "v", "kv", when="enable_bias"),
    Tensor("self_attn.out_proj.weight", "o", "width q"),
    Tensor("self_attn.out_proj.bias", "o", "width", when="enable_bias"),
)

OPT = Architecture(
    name="opt",
    library="transformers",
    model_types=("opt",),
    when="do_layer_norm_before",
    keys=Keys("num_hidden_layers", "num_attention_heads", "hidden_size", mlp_dim="ffn_dim"),
    prefixes=("model.decoder.", "decoder.", ""),
    layer="layers.{i}.",
    block=(
        *ATTENTION,
        Tensor("self_attn_layer_norm.weight", "norm", "width", when="layer_norm_elementwise_affine"),
        Tensor("self_attn_layer_norm.bias", "norm", "width", when="layer_norm_elementwise_affine"),
        Tensor("fc1.weight", "up", "mlp width"),
        Tensor("fc1.bias", "up", "mlp", when="enable_bias"),
        Tensor("fc2.weight", "down", "width mlp"),
        Tensor("fc2.bias", "down", "width", when="enable_bias"),
        Tensor("final_layer_norm.weight", "norm", "width", when="layer_norm_elementwise_affine"),
        Tensor("final_layer_norm.bias", "norm", "width", when="layer_norm_elementwise_affine"),
    ),
    outer=(
        Tensor("embed_tokens.weight", "embedding", "vocab embedding"),
        Tensor("embed_positions.weight", "embedding", "positions width"),
        Tensor("project_in.weight", "embedding", "width embedding", when="projected"),
        Tensor("project_out.weight", "head", "embedding width", when="projected"),
        Tensor("final_layer_norm.weight", "norm", "width", when="final_norm"),
        Tensor("final_layer_norm.bias", "norm", "width", when="final_norm"),
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
