"""Cut a trained transformer from Python: plan, look at the plan, cut, load the result with plain transformers.

Run: python examples/shrink_a_checkpoint.py [FOLDER]      without FOLDER a tiny random Llama stands in for a checkpoint
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import leansurgeon


def tiny_checkpoint(folder: Path) -> Path:
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    work = Path(tempfile.mkdtemp())
    source = sys.argv[1] if len(sys.argv) > 1 else tiny_checkpoint(work / "source")
    try:
        layers = leansurgeon.plan(source).before.shape.depth // 2
    except leansurgeon.LeanSurgeonError as error:
        raise SystemExit(str(error)) from None
    print(leansurgeon.plan(source, heads="2x", layers=layers))
    cut = leansurgeon.shrink(source, heads="2x", layers=layers, uncalibrated=True, out=work / "lean", progress=False)

    model = AutoModelForCausalLM.from_pretrained(cut.folder)
    assert sum(p.numel() for p in model.parameters()) == cut.parameters
    print(f"\nplain transformers loads {cut.folder}: {cut.parameters:,} parameters")


if __name__ == "__main__":
    main()
