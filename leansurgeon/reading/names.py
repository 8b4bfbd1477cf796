"""Names of the files that libraries put next to weights, as transformers and sentence-transformers have them."""

from __future__ import annotations

# One of these is a tokenizer's vocabulary; `merges.txt` and the others only add to one.
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt", "vocab.json",
    "sentencepiece.model", "spm.model", "spm_char.model", "source.spm", "target.spm", "bpe.codes", "dict.txt",
    "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json", "prophetnet.tokenizer",
)  # fmt: skip
TOKENIZER = (
    *VOCABULARIES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "normalizer.json", "emoji.json", "word_shape.json", "word_pronunciation.json", "byte_maps.json",
)  # fmt: skip
TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja")
PROCESSOR = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
GENERATION = "generation_config.json"
SENTENCES = (
    "modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "1_Pooling/config.json",
)  # fmt: skip
TERMS = tuple(
    f"{name}{ending}"
    for name in ("LICENSE", "LICENCE", "license", "NOTICE", "Notice", "COPYING", "USE_POLICY")
    for ending in ("", ".txt", ".md")
)
