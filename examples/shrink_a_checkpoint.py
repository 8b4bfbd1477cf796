"""Cut a trained transformer from Python: plan, look at the plan, carry it out, load the result with plain transformers.

Run: python examples/shrink_a_checkpoint.py [FOLDER]      without FOLDER a tiny random Llama stands in for a checkpoint
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from leansurgeon.checkpoints import open_source
from leansurgeon.report.tables.plan import plan_table
from leansurgeon.surgery.plan.planning import plan
from leansurgeon.surgery.plan.wanted import Wanted
from leansurgeon.surgery.shrink import carry_out


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
    source = open_source(sys.argv[1] if len(sys.argv) > 1 else str(tiny_checkpoint(work / "source")))
    steps = plan(source, Wanted(heads="2x", layers=str(source.shape.depth // 2)), seed=0)
    print(plan_table(steps))
    carry_out(steps, work / "lean")

    model = AutoModelForCausalLM.from_pretrained(work / "lean")
    assert sum(p.numel() for p in model.parameters()) == steps.parameters_after.total
    print(f"\nplain transformers loads {work / 'lean'}: {steps.parameters_after.total:,} parameters")


if __name__ == "__main__":
    main()
