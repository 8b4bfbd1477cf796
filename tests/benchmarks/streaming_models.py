"""Synthetic Llama checkpoints for the streaming benchmarks, written without building a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from leansurgeon import architectures
from leansurgeon.checkpoints.weights import RAW, TensorOut, from_float32, write

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64,
    "vocab_size": 20_000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": False, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def llama(folder: Path, dtype: str = "F32", **changes) -> Path:
    """A checkpoint of 1.4 GB in fp32, filled with noise; `changes` are config keys."""
    config = CONFIG | changes
    architecture = architectures.of(config)
    block = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)

    def noise(shape) -> np.ndarray:
        size = int(np.prod(shape))
        return from_float32(np.resize(block, size), dtype).reshape(shape)

    specs = list(architecture.tensors(config))
    tied = config["tie_word_embeddings"]
    specs = [s for s in specs if not (tied and s.name == "lm_head.weight")]
    folder.mkdir(parents=True)
    write(
        folder, [TensorOut(s.name, dtype, s.shape, make=lambda s=s: noise(s.shape).astype(RAW[dtype])) for s in specs]
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder
