"""Rules that declarations refer to (`@patches`): values derived from several config keys."""

from __future__ import annotations

from math import ceil, sqrt
from typing import Any

from leansurgeon.architectures.tensors import Config

# -- what models accept -------------------------------------------------------------------------------


def one(config: Config) -> int:
    """Return the number of special tokens: a class token."""
    return 1


def two(config: Config) -> int:
    """Return the number of special tokens: a class token and a distillation token."""
    return 2


def class_and_registers(config: Config) -> int:
    return 1 + config.get("num_register_tokens", 0)


def class_token(config: Config) -> int:
    """Return the number of class tokens; only timm's ViT may have none."""
    return int(bool(config.get("class_token", True)))


def up_to_padding(config: Config) -> int:
    """Return the number of skipped positions: RoBERTa's first position is after that of the padding token."""
    return config.get("pad_token_id", 1) + 1


def segmented(config: Config) -> int | None:
    """Return the only length that Nystromformer's segments fit; None if there are as many landmarks as tokens.

    The attention is then an ordinary one.
    """
    tokens = config.get("segment_means_seq_len")
    return None if tokens == config.get("num_landmarks") else tokens


# -- sizes and switches -------------------------------------------------------------------------------


def spare_positions(config: Config) -> int:
    """Return the rows of a position table with two spare ones."""
    return config["max_position_embeddings"] + 2


def labels(config: Config) -> int:
    """Return the number of classes; transformers omits id2label if there are two."""
    return len(config.get("id2label") or {0: 0, 1: 1})


def patches(config: Config) -> int:
    """Return the number of image patches, without class tokens."""
    return (config.get("image_size", 224) // config.get("patch_size", 16)) ** 2


def patches_and_class(config: Config) -> int:
    return patches(config) + 1


def patches_and_two(config: Config) -> int:
    return patches(config) + 2


def is_narrow(config: Config) -> bool:
    """Return whether ELECTRA's embeddings are narrower than the model."""
    return config["embedding_size"] != config["hidden_size"]


def opt_embedding(config: Config) -> int:
    return config.get("word_embed_proj_dim") or config["hidden_size"]


def opt_projects(config: Config) -> bool:
    return opt_embedding(config) != config["hidden_size"]


def opt_final_norm(config: Config) -> bool:
    return (
        config["do_layer_norm_before"]
        and config["layer_norm_elementwise_affine"]
        and not config.get("_remove_final_layer_norm")
    )


def gate_bias(config: Config) -> bool:
    return config.get("use_gated_mlp") and config["mlp_bias"]


def generates(config: Config) -> bool:
    """Return whether the model's class is BART's for generation."""
    return (config.get("architectures") or [""])[0].endswith("ForConditionalGeneration")


def has_decoder(config: Config) -> bool:
    """Return whether the class of a T5 has a decoder."""
    return not (config.get("architectures") or [""])[0].endswith(("EncoderModel", "ForTokenClassification"))


def is_gated(config: Config) -> bool:
    return str(config.get("feed_forward_proj", "relu")).startswith("gated")


def t5_is_tied(config: Config) -> bool:
    """Return whether T5's output is tied to its embedding.

    The first T5 scales its output and ties it; v1.1 does neither. transformers 5 writes `tie_word_embeddings` true into
    every config, so the scaling tells them apart.
    """
    return config.get("tie_word_embeddings") is not False and config.get("scale_decoder_outputs") is not False


def never(config: Config) -> bool:
    return False


def layer_types(config: Config) -> list[str]:
    """Return the attention type of ModernBERT's layers, for a file that gives only the interval."""
    every = config.get("global_attn_every_n_layers", 3)
    return ["sliding_attention" if i % every else "full_attention" for i in range(config["num_hidden_layers"])]


# Per-layer lists that a file may omit because the library derives them from the layer index.


def windows_from_above(config: Config) -> list[str]:
    """Return Qwen's layer types: windows from a certain layer on."""
    if not config.get("use_sliding_window") or config.get("sliding_window", 4096) is None:
        return []
    first = config.get("max_window_layers", 28)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(config["num_hidden_layers"])]


def windows_by_pattern(config: Config) -> list[str]:
    """Return Gemma 3's layer types: full attention in every n-th layer only."""
    every = config.get("sliding_window_pattern", 6)
    return ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])]


def rotary_by_interval(config: Config) -> list[int]:
    """Return which layers of SmolLM3 have rotary positions (1): all but every n-th."""
    every = config.get("no_rope_layer_interval", 4)
    return [int((i + 1) % every != 0) for i in range(config["num_hidden_layers"])]


def pooled(config: Config) -> int:
    """Return the input width of the Long Range Arena's head: one text, or two with their product and difference."""
    return config["hidden_size"] * (4 if config.get("dual_input") else 1)


# -- scales and new weights ---------------------------------------------------------------------------


def unscaled(config: Config) -> float:
    """Return 1: scores are not divided by the root of head_dim."""
    return 1.0


def gpt2_scale(config: Config) -> float | None:
    return 1.0 if config.get("scale_attn_weights") is False else None


def clip_std(config: Config) -> float:
    """Return the standard deviation of CLIP's q, k and v, scaled by width and depth."""
    factor = config.get("initializer_factor", 1.0)
    return factor * config["hidden_size"] ** -0.5 * (2 * config["num_hidden_layers"]) ** -0.5


def xavier(config: Config) -> float:
    """Return the standard deviation of Xavier initialisation for a square matrix (SigLIP)."""
    return sqrt(1 / config["hidden_size"])


def t5_std(config: Config) -> float:
    """Return T5's standard deviation for a matrix that reads the residual stream."""
    return config.get("initializer_factor", 1.0) / sqrt(config["d_model"])


def t5_query_std(config: Config) -> float:
    """Return T5's standard deviation for queries, which start smaller instead of scores being divided."""
    return t5_std(config) / sqrt(config["d_kv"])


# -- timm ---------------------------------------------------------------------------------------------


def pair(value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Return height and width of an image or patch; timm allows one number for both."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def patch_height(config: Config) -> int:
    return pair(config["patch_size"])[0]


def patch_width(config: Config) -> int:
    return pair(config["patch_size"])[1]


def grid(config: Config) -> tuple[int, int]:
    """Return rows and columns of patches."""
    (height, width), (down, right) = pair(config["img_size"]), pair(config["patch_size"])
    return height // down, width // right


def cells(config: Config) -> int:
    """Return the number of patches of an image."""
    rows, columns = grid(config)
    return rows * columns


def tokens(config: Config) -> int:
    """Return the rows of the position table: patches and the class token."""
    return cells(config) + class_token(config)


def beit_offsets(config: Config) -> int:
    """Return the rows of BEiT's table: relative positions of patches, and three for the class token."""
    rows, columns = grid(config)
    return (2 * rows - 1) * (2 * columns - 1) + 3


def swin_offsets(config: Config) -> list[int]:
    """Return the relative positions within a window, by stage; timm shrinks a window that does not fit the image."""
    counts = []
    for stage in range(4):
        sides = [min(-(-side // 2**stage), config["window_size"]) for side in grid(config)]
        counts.append((2 * sides[0] - 1) * (2 * sides[1] - 1))
    return counts


def pixel_rows(config: Config) -> int:
    """Return the rows of pixels in a patch of TNT."""
    return ceil(patch_height(config) / config["first_stride"])


def pixel_columns(config: Config) -> int:
    return ceil(patch_width(config) / config["first_stride"])


def pixels(config: Config) -> int:
    return pixel_rows(config) * pixel_columns(config)


def inner_mlp(config: Config) -> int:
    """Return the width of the MLP of TNT's inner transformer, which timm fixes."""
    return 4 * config["inner_dim"]


def xcit_stem0(config: Config) -> int:
    return config["embed_dim"] * 2 // config["patch_size"]


def xcit_stem1(config: Config) -> int:
    return config["embed_dim"] * 4 // config["patch_size"]


def xcit_stem2(config: Config) -> int:
    return config["embed_dim"] * 8 // config["patch_size"]


def volo_grid(config: Config) -> int:
    """Return the rows (and columns) of tokens after the pooling."""
    return config["img_size"] // config["patch_size"] // config["pooling_scale"]


def volo_patch(config: Config) -> int:
    return config["patch_size"] // 2


def class_inner(config: Config) -> int:
    """Return the inner width of the class attention: timm's is the width, ours has its own heads and head_dim."""
    heads = config.get("cls_num_heads") or config["num_heads"]
    return heads * config["cls_head_dim"] if config.get("cls_head_dim") else config["embed_dim"]


def cait_class_mlp(config: Config) -> int:
    return int(config["embed_dim"] * config["mlp_ratio_token_only"])


def xcit_class_mlp(config: Config) -> int:
    return int(config["embed_dim"] * config.get("cls_mlp_ratio", config.get("mlp_ratio", 4)))


def last_ratio(config: Config) -> float:
    """Return the MLP ratio of VOLO's last stage."""
    ratio = config.get("mlp_ratio", 3)
    return ratio[-1] if isinstance(ratio, list | tuple) else ratio


def volo_class_mlp(config: Config) -> int:
    return int(config["embed_dims"][-1] * config.get("cls_mlp_ratio", last_ratio(config)))


def keep_class_attention(config: Config, **said: Any) -> Config:
    """Convert a timm config to one of ours that keeps the class attention unchanged.

    What timm derives from other arguments gets arguments of its own.
    """
    config["model_args"] |= {key: value for key, value in said.items() if key not in config["model_args"]}
    return config


def adopt_cait(config: Config) -> Config:
    return keep_class_attention(config, cls_num_heads=config["model_args"]["num_heads"])


def adopt_xcit(config: Config) -> Config:
    args = config["model_args"]
    return keep_class_attention(config, cls_num_heads=args["num_heads"], cls_mlp_ratio=args.get("mlp_ratio", 4))


def adopt_volo(config: Config) -> Config:
    args = config["model_args"]
    return keep_class_attention(config, cls_num_heads=args["num_heads"][-1], cls_mlp_ratio=last_ratio(args))
