"""Make the user's config small while keeping every flag; inference works on the result.

Numbers are recognised by their names in transformers (`attribute_map` translates a family's own). Sizes are chosen so
that no two axes have the same length by chance.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from leansurgeon.architectures.infer.inputs import VOCAB
from leansurgeon.architectures.limits import (
    BEHIND_LAYERS,
    BY_LAYER,
    FROM_END,
    HIDDEN_STATES,
    ONCE_EACH,
    TAPS,
    of_single_layers,
    within,
)
from leansurgeon.architectures.tensors import Config, is_count

DEPTH = 5
LEAST_MLP = 16  # units; this many are removed to see the effect
LEAST = 2  # a single layer cannot be told from a single module
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "depth",
    "encoder_layers",
    "decoder_layers",
    "encoder_num_layers",
    "num_transformer_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
    "text_encoder_layers",
    "num_blocks",
    "encoder_depth",
    "num_encoder_blocks",
)
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "attention_heads",
    "decoder_num_attention_heads",
    "encoder_num_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
)
KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "kv_heads",
    "encoder_num_key_value_heads",
    "decoder_num_key_value_heads",
)
WIDTHS = (
    "hidden_size",
    "d_model",
    "n_embd",
    "embed_dim",
    "embedding_size",
    "dim",
    "emb_dim",
    "decoder_hidden_size",
    "encoder_hidden_size",
    "hidden_width",
    "width",
    "embed_size",
    "n_embed",
    "input_hidden_size",
    "embedding_dim",
    "word_embed_proj_dim",
    "rnn_hidden_size",
    "attention_hidden_size",
    "encoder_hidden_dim",
    "qkv_dim",
    "output_hidden_size",
    "out_hidden_size",
    "projection_size",
    "patch_embeds_hidden_size",
)
HEAD_DIMS = ("head_dim", "d_kv", "attention_head_dim", "kv_channels", "attention_head_size", "d_head", "swa_head_dim")
MLPS = (
    "intermediate_size",
    "ffn_dim",
    "d_ff",
    "n_inner",
    "ffn_hidden_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "mlp_dim",
    "d_inner",
    "hidden_dim",
    "feed_forward_dim",
    "feedforward_size",
    "ff_dim",
    "linear_units",
    "inner_dim",
    "decoder_intermediate_size",
    "encoder_intermediate_size",
    "dense_intermediate_size",
    "ffn_intermediate_size",
    "feed_forward_size",
    "intermediate_dim",
    "dff",
    "dim_ff",
    "ffn_size",
)
EXPERT_MLPS = (
    "moe_intermediate_size",
    "expert_ffn_hidden_size",
    "expert_hidden_size",
    "moe_ffn_hidden_size",
    "expert_dim",
)
SHARED_MLPS = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
CHOSEN = (
    "num_experts_per_tok",
    "moe_topk",
    "moe_k",
    "num_experts_per_token",
    "top_k_experts",
    "experts_per_token",
)
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "max_target_positions",
    "seq_length",
    "original_max_position_embeddings",
    "initial_context_length",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
    "model_max_length",
    "max_2d_position_embeddings",
    "num_position_embeddings",
)
WINDOWS = ("sliding_window", "window_size", "attention_window_size", "local_attention", "attention_chunk_size")
MAMBA_HEADS = ("mamba_n_heads", "mamba_num_heads", "num_mamba_heads")  # times the size of each: the expanded width
MAMBA_DIMS, MAMBA_DIM = ("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16
# Lists of layer indices; they depend on which layers are kept.
INDEX_LISTS = (
    "attn_layer_indices",
    "mlp_only_layers",
    "full_attn_idxs",
    "cross_attention_layers",
    "global_attn_layers",
    "dense_layers",
    "fullatt_block_indexes",
    "moe_layers",
)
SMALL = {
    **dict.fromkeys(MLPS, 112),
    **dict.fromkeys(EXPERT_MLPS, 40),
    **dict.fromkeys(SHARED_MLPS, 56),
    **dict.fromkeys(EXPERTS, 4),
    **dict.fromkeys(CHOSEN, 2),
    **dict.fromkeys(POSITIONS, 64),
    **dict.fromkeys(WINDOWS, 8),
    "n_group": 2,
    "topk_group": 1,
    "num_expert_group": 2,
    "num_expert_groups": 2,
    # Low-rank attention
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "qk_head_dim": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 8,
    # State-space and linear layers
    "linear_num_value_heads": 12,
    "mamba_d_state": 8,
    "state_size": 8,
    "ssm_state_size": 8,
    "mamba_dt_rank": 8,
    "time_step_rank": 8,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "linear_num_key_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "lru_width": 96,
    # Others that are large by default
    "attention_window": 4,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 12,
    "altup_num_inputs": 2,
    "num_mel_bins": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 32,
    "codebook_size": 32,
    "projection_dim": 64,
    "n_mels": 16,
    "proj_codevector_dim": 32,
    "num_codevectors_per_group": 8,
    "codevector_dim": 32,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_global_layers": 2,
    "mm_tokens_per_image": 4,
    "moe_num_shared_experts": 1,
    "audio_vocab_size": VOCAB,
    "max_source_positions": 32,
    "relation_transformer_layers": 1,
}
# Values for keys that default configs leave open and models need.
OPEN = {**dict.fromkeys(CHOSEN, 2), **dict.fromkeys(EXPERTS, 4), "vocab_size": VOCAB}
# These determine how many features an image or a sound becomes.
GEOMETRY = (
    "image_size",
    "img_size",
    "mm_tokens_per_image",
    "num_mel_bins",
    "n_mels",
    "max_source_positions",
    "temporal_patch_size",
    "spatial_merge_size",
)
ROTARY = ("rope_parameters", "rope_scaling")
IDS = ("_token_id", "_token_index", "_id", "_token_ids")


ATTEMPTS = 7


def aliases(config: Config) -> dict[str, str]:
    """Return transformers' names by a family's own names."""
    from leansurgeon.architectures.infer.library import config_class

    try:
        return {own: general for general, own in (config_class(config["model_type"]).attribute_map or {}).items()}
    except Exception:
        return {}


def shrunk(config: Config, attempt: int, *, geometry: bool = False) -> Config:
    """Return a small config with the flags of `config`, which is complete (`library.whole`).

    With `geometry` it yields as many features for an image or a sound of real size as the real model.

    Later attempts relax what a family may require: 1 keeps key/value heads equal to the heads, 2 also leaves head_dim
    to the library, 3 also keeps windows and positions, 4 takes widths divisible by powers of two, 5 sets a head_dim
    that the config leaves open, 6 keeps the present one, 7 takes two layers of every kind.
    """
    c = copy.deepcopy(config)
    width = (c.get("text_config") or {}).get("hidden_size")
    fits = [p for p in (c, c.get("vision_config") or {}) if width and p.get("projection_dim") == width]
    names = aliases(c) if "model_type" in c else {}
    sizes = Sizes(c, names, attempt, GEOMETRY if geometry else ())
    for key, value in c.items():
        if isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            c[key] = shrunk(value, attempt, geometry=geometry)
        elif key not in ("id2label", "label2id"):
            c[key] = sizes.of(key, names.get(key, key), value)
    depth = next((c[k] for k in c if names.get(k, k) in LAYERS and isinstance(c[k], int)), None)
    if sizes.depth and depth:
        pick_layers(c, sizes.depth, depth, of_each=2 if attempt == 7 else 1)
        move_listeners(c, depth)
    seen = next((v for k, v in (c.get("vision_config") or {}).items() if k in LAYERS), None)
    if seen:
        c |= {k: within(c[k], seen) for k in HIDDEN_STATES if c.get(k) is not None}
    for part in fits:  # projections into the text are as wide as the text model
        (c if part is c else c["vision_config"])["projection_dim"] = c["text_config"]["hidden_size"]
    for key in ("stage_names", "out_features", "out_indices"):
        c.pop(key, None)
    return c


class Sizes:
    """Maps the numbers of one config to small ones."""

    def __init__(self, c: Config, names: Mapping[str, str], attempt: int, kept: tuple[str, ...] = ()) -> None:
        self.attempt, self.kept = attempt, kept
        self.c = {names.get(k, k): v for k, v in c.items()}
        self.heads, self.depth, self.was_wide = map(self.first, (HEADS, LAYERS, WIDTHS))
        self.width, self.n_heads, self.head_dim, self.kv = (128, 4, 16, 2) if attempt == 4 else (96, 6, 8, 3)
        # Value of keys for the size of a head.
        self.own_dim = self.head_dim if attempt in (0, 1, 5) else self.width // self.n_heads
        self.stages = len(c["depths"]) if isinstance(c.get("depths"), list | tuple) else 0
        self.growth = 2 ** max(0, self.stages - 1)  # width of a pyramid's last stage over that of the first

    def first(self, names: tuple[str, ...]) -> int | None:
        """Return the first integer that the config has under one of these names."""
        return next((self.c[k] for k in names if isinstance(self.c.get(k), int)), None)

    def of(self, key: str, name: str, value: Any) -> Any:
        if value is None and (name in OPEN or (self.attempt == 5 and name in HEAD_DIMS)):
            return OPEN.get(name, self.head_dim)
        if key.endswith(IDS) and (is_count(value) or isinstance(value, list)):
            return token(value)
        if name.endswith("rope_parameters") or name == "rope_scaling":
            if self.attempt == 6:
                return value
            if self.attempt and isinstance(value, dict) and "mrope_section" not in value and "rope_type" in value:
                value = value | {"mrope_section": [0, 0, 0]}  # the library's default fits real sizes only
            return rope(value, self.own_dim)
        if name == BY_LAYER and isinstance(value, dict):
            return {number: self.of_layer(entry) for number, entry in value.items()}
        if isinstance(value, list | tuple) and value and len(value) == self.depth and name in (*SMALL, *MLPS):
            return [self.of(key, name, entry) for entry in value]
        if not is_count(value) or key in self.kept or (name == "num_mel_bins" and "spec_size" in self.c):
            return value  # spectrograms that are cut to images keep their height
        if name in LAYERS:
            return min(max(value, LEAST), DEPTH)
        if name in HEADS:
            return self.n_heads
        if name in KV_HEADS:
            own = 1 if value == 1 else self.kv
            return self.n_heads if value > 1 and (value == self.heads or self.attempt in (1, 2, 3)) else own
        if name in WIDTHS:
            firsts = (self.c.get("embed_dim"), self.c.get("patch_embeds_hidden_size"))
            return self.width * (self.growth if value / self.growth in firsts else 1)  # a pyramid's last stage is wider
        if name in HEAD_DIMS:
            return value if self.attempt == 6 else self.own_dim
        if name.endswith("vocab_size"):
            return VOCAB
        if name in ("image_size", "img_size"):
            patch = self.c.get("patch_size")  # four patches a side in the last stage
            return min(value, 4 * (patch if isinstance(patch, int) else 16) * self.growth)
        if name in MAMBA_DIMS:
            return MAMBA_DIM
        if name in MAMBA_HEADS or name == "mamba_d_ssm":
            inner = self.width * (self.c.get("mamba_expand") or self.c.get("expand") or 2)
            return inner // MAMBA_DIM if name in MAMBA_HEADS else inner
        if name == "window_size" and self.stages:
            return min(value, 2)
        if name == FROM_END and self.depth and self.depth > DEPTH:
            return max(1, value * DEPTH // self.depth)
        if value == self.was_wide and name not in SMALL and ("hidden" in name or name.endswith(("_dim", "_width"))):
            return self.width
        if name == "window_size" and "spatial_merge_size" in self.c:  # in pixels: two merged patches
            return 2 * min(self.c["spatial_merge_size"], SMALL["spatial_merge_size"]) * self.c["patch_size"]
        if name == "rotary_dim":
            return 4
        if name in (*MLPS, *EXPERT_MLPS, *SHARED_MLPS) and value <= LEAST_MLP:
            return SMALL[name]
        if name in SMALL and value > SMALL[name]:
            return value if self.attempt >= 3 and ("position" in name or "window" in name) else SMALL[name]
        return value

    def of_layer(self, entry: Mapping[str, Any]) -> Config:
        """Scale down a layer's own settings by the same factor: its heads may be twice as wide as other layers'."""

        def small(key: str, value: Any) -> Any:
            """Return the small number of all layers, times the ratio of this layer's number to theirs."""
            usual = self.c.get(key)
            if type(value) is not int or type(usual) is not int or not usual or value % usual:
                return self.of(key, key, value)
            return self.of(key, key, usual) * (value // usual)

        return {key: small(key, value) for key, value in entry.items()}


def token(value: Any) -> Any:
    """Map a token id into the small vocabulary."""
    if isinstance(value, list):
        return [token(v) for v in value]
    return VOCAB - 1 - value % 7 if is_count(value) and value >= VOCAB else value


def rope(value: Any, head_dim: int) -> Any:
    """Return rotary parameters whose lists fit a head of `head_dim`."""
    if not isinstance(value, dict):
        return value
    scaled = {k: rope(v, head_dim) for k, v in value.items()}
    half = int(head_dim * (scaled.get("partial_rotary_factor") or 1.0)) // 2  # pairs of entries that are rotated
    if isinstance(scaled.get("mrope_section"), list):
        count = len(scaled["mrope_section"])
        scaled["mrope_section"] = [half - (count - 1) * (half // count), *[half // count] * (count - 1)]
    for key in ("long_factor", "short_factor"):
        if isinstance(scaled.get(key), list):
            scaled[key] = scaled[key][:half]
    if isinstance(scaled.get("original_max_position_embeddings"), int):
        scaled["original_max_position_embeddings"] = min(scaled["original_max_position_embeddings"], 64)
    return scaled


def per_layer(c: Config, depth: int) -> Iterator[str]:
    """Yield keys of lists with one entry per layer.

    Having the length of the depth is not enough: the list holds words or switches, or its name says so, or the type's
    default config has no list of another length there.
    """
    usual = lists_of_other_lengths(c.get("model_type"))
    for key, value in c.items():
        if not isinstance(value, list | tuple) or len(value) != depth or key in (*TAPS, *INDEX_LISTS):
            continue
        said = "layer" in key or "types" in key or "pattern" in key or all(isinstance(v, str | bool) for v in value)
        if said or (usual is not None and key not in usual and all(map(is_number, value))):
            yield key


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def lists_of_other_lengths(model_type: str | None) -> set[str] | None:
    """Return keys of lists in a type's default config that are not as long as its depth; None without such a config."""
    from leansurgeon.architectures.infer.library import config_class

    try:
        usual = config_class(model_type)().to_dict()
    except Exception:
        return None
    depths = {usual[key] for key in usual if key in LAYERS and isinstance(usual[key], int)}
    return {key for key, value in usual.items() if isinstance(value, list | tuple) and len(value) not in depths}


def pick_layers(c: Config, before: int, after: int, of_each: int) -> None:
    """Shorten the per-layer lists so that every kind of layer occurs, in its order; repeat a single layer.

    Each kind occurs `of_each` times if there are that many.
    """
    lists = {key: c[key] for key in per_layer(c, before)}
    chosen = list(range(before))
    if after > before == 1:
        chosen *= after
        lists.pop("architectures", None)
    elif after < before:
        apart = [of_single_layers(c, [i]) for i in chosen]
        kinds = [repr([*(values[i] for values in lists.values()), apart[i]]) for i in chosen]
        picked = [i for i in chosen if kinds[:i].count(kinds[i]) < of_each][:after]
        chosen = sorted([*picked, *(i for i in chosen if i not in picked)][:after])
    c |= {key: [values[i] for i in chosen] for key, values in lists.items()} | of_single_layers(c, chosen)


def move_listeners(c: Config, depth: int) -> None:
    """Move lists of layer indices to the corresponding parts of a model of another depth."""
    for key in (*TAPS, *INDEX_LISTS):
        value = c.get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) for v in value):
            continue
        if key in HIDDEN_STATES:
            c[key] = within(value, depth)
        elif any(v >= depth for v in value):
            count = min(len(value), depth - 1)
            c[key] = [max(1, (i + 1) * depth // (count + 1)) for i in range(count)]
            if key in BEHIND_LAYERS and key not in ONCE_EACH:
                c[key] += [c[key][-1]] * (len(value) - count)
    if "vision_output_dim" in c and isinstance(taken := c.get("intermediate_layers_indices"), list):
        c["vision_output_dim"] = c["hidden_size"] * (1 + len(taken))
