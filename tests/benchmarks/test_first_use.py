"""What the first command on a family that nobody declared costs beyond loading the library, and what the second does.

Seconds are those of the processor, so that what else runs on the machine counts for little.

Run: pytest tests/benchmarks/test_first_use.py -m benchmark --override-ini addopts= -s
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

MOST = 5.0  # seconds
CACHED = 1.0
# Numbers as published: Granite 3.1 2B, OLMo 7B, Phi-3 mini, GPT-J 6B (heads by the modelling file), wav2vec 2.0 base.
CONFIGS = {
    "granite": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 49155, "architectures": ["GraniteForCausalLM"]},
    "olmo": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 50304, "architectures": ["OlmoForCausalLM"]},
    "phi3": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"vocab_size": 32064, "architectures": ["Phi3ForCausalLM"]},
    "gptj": {"n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400, "architectures": ["GPTJForCausalLM"]},
    "wav2vec2": {"architectures": ["Wav2Vec2ForCTC"]},
}
ASK = """
import json, sys, time
import torch, transformers
torch.set_num_threads(1)
from leansurgeon.architectures import infer
config = json.loads(sys.argv[1])
from leansurgeon.architectures.infer import library
library.model_class(config)  # what loading the model costs in any case
before = time.process_time()
made = infer.architecture(infer.complete_config(config))
print(json.dumps([time.process_time() - before, sorted(made.refused)]))
"""


def asked(config: dict, cache: str) -> tuple[float, list[str]]:
    env = os.environ | {"LEANSURGEON_CACHE": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(config)], env=env, capture_output=True, text=True, check=True
    )
    return tuple(json.loads(done.stdout))


@pytest.mark.benchmark
@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_family_is_inferred_within_seconds_and_then_cached(model_type, tmp_path):
    config = {"model_type": model_type} | CONFIGS[model_type]
    first, refused = asked(config, str(tmp_path))
    again, same = asked(config, str(tmp_path))
    print(f"{model_type:>10}  {first:5.2f} s, then {again:5.2f} s   refused: {', '.join(refused) or 'nothing'}")
    assert first < MOST and again < CACHED and refused == same == []
