"""Formats of other programs without a place for a head_dim of its own, or for layers in another order, by family."""

from __future__ import annotations

GGUF, CTRANSLATE2 = "GGUF (llama.cpp)", "CTranslate2"
OURS = "leansurgeon_"  # before the name of a family that has heads of its own size by a modelling file of ours
# What each knows of the families that have such heads only by a file of ours.
KNOWN = {GGUF: ("bert", "roberta", "gpt2"), CTRANSLATE2: ("bert", "roberta", "gpt2", "bart", "mbart")}
# Families with a head_dim in their config, which CTranslate2's converter does not read (tests/clients hold it).
UNREAD = {CTRANSLATE2: ("llama", "qwen2", "t5", "mt5")}
# Families whose every so many-th layer is of another kind, which the program counts by itself: the config key that says
# it of every layer, its value there, what such a layer is called, and how many (llama-model.cpp, its hparams).
FULL = ("layer_types", "full_attention", "one with full attention")
PATTERNS = {
    GGUF: {
        "smollm3": ("no_rope_layers", 0, "one without rotary positions", 4),
        "gemma2": (*FULL, 2),
        "gemma3_text": (*FULL, 6),
        "cohere2": (*FULL, 4),
        "gpt_oss": (*FULL, 2),
    }
}
