"""Formats of other programs that cannot store a head_dim, or layers in another order, by family."""

from __future__ import annotations

GGUF, CTRANSLATE2 = "GGUF (llama.cpp)", "CTranslate2"
OURS = "leansurgeon_"  # prefix of families that get their own head_dim from one of our modelling files
# Families, among those with such a modelling file, that each format knows in their original form.
KNOWN = {GGUF: ("bert", "roberta", "gpt2"), CTRANSLATE2: ("bert", "roberta", "gpt2", "bart", "mbart")}
# Families with a head_dim in their config that CTranslate2's converter does not read (tested in tests/clients).
UNREAD = {CTRANSLATE2: ("llama", "qwen2", "t5", "mt5")}
# Families with a special layer at a fixed interval, which the program computes itself: the config key that marks such
# layers, its value for them, what they are called, and the interval (llama-model.cpp, its hparams).
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
