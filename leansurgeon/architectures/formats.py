"""File formats of other programs that have no place for a head_dim of its own, by family."""

from __future__ import annotations

GGUF, CTRANSLATE2 = "GGUF (llama.cpp)", "CTranslate2"
OURS = "leansurgeon_"  # before the name of a family that has heads of its own size by a modelling file of ours
# What each knows of the families that have such heads only by a file of ours.
KNOWN = {GGUF: ("bert", "roberta", "gpt2"), CTRANSLATE2: ("bert", "roberta", "gpt2", "bart", "mbart")}
# Families with a head_dim in their config, which CTranslate2's converter does not read (tests/clients hold it).
UNREAD = {CTRANSLATE2: ("llama", "qwen2", "t5", "mt5")}
