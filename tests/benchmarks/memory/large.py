"""The peak of a calibrated cut of a large model of random weights, block by block, in a process of its own.

    python -m tests.benchmarks.memory.large                   # 3.2 billion parameters (6.4 GB in bf16), 28 to 24 layers
    python -m tests.benchmarks.memory.large --size 7b         # 15 GB on disk, 30 GB in fp32: more than memory
    python -m tests.benchmarks.memory.large --heal local      # and the local fit, whose span is trained in fp32

Random weights say nothing about quality; time and memory are those of a real model of the shape, with as many tokens
to fit and to guard as `shrink` takes by default (--tokens 2048 for a first look). Left out are the choice of layers,
which are named here, so that one candidate is walked (a contest walks several, and holds one block and the states of
its trial besides); reading and tokenising text; and the proof, in a process of its own. The span of the local fit may
stop growing sooner than a real model's, whose guard gains more. Printed is one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from leansurgeon.measure.data.calibration import TOKENS
from tests.benchmarks.streaming_models import llama
from tests.benchmarks.test_streaming import anonymous

SIZES = {  # Llama 3.2 3B, and one of the width of Llama 3.1 8B
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "tie_word_embeddings": True},
    "7b": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32_000, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1_000, "tie_word_embeddings": True},
}  # fmt: skip
CUT = """
import sys, resource
from pathlib import Path
import torch
from leansurgeon.checkpoints.source import open_source
from leansurgeon.measure.data.calibration import Calibration
from leansurgeon.surgery.method import Method
from leansurgeon.surgery.planning import plan
from leansurgeon.surgery.requested_shape import RequestedShape
from leansurgeon.surgery.shrink import carry_out, decide

folder, out, keep, heal, tokens = sys.argv[1:]
source = open_source(folder)
count = max(2, int(tokens) // 512)
draws = torch.Generator().manual_seed(0)
guard = max(1, count // 4)
ids = torch.randint(0, 1_000, (count + guard + 1, 1, min(512, int(tokens) // 2)), generator=draws)
batches = [{"input_ids": x, "labels": x} for x in ids]
data = Calibration("noise", "noise", "-", batches[:count], batches[count:-1], batches[-1:])
layers = str(len(keep.split(",")))
steps = plan(source, RequestedShape(layers=layers), 0, Method(keep=keep, heal=heal), calibrated=True)
record = carry_out(decide(steps, data, print), Path(out), check=False)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def measure(
    size: str, lose: int, start: int | None, heal: str, tokens: int, place: Path
) -> dict[str, float | str | int]:
    """Make the model where it is not there, cut it, and tell the most that the process held: `peak` counts the pages of
    the file that it had mapped, which the system takes back; `anonymous` is what cannot be taken back.
    """
    folder, out = place / f"llama-{size}", place / f"llama-{size}-cut"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        llama(folder, "BF16", **SIZES[size])
    shutil.rmtree(out, ignore_errors=True)
    depth = SIZES[size]["num_hidden_layers"]
    start = (depth - lose) // 2 if start is None else start
    keep = ",".join(str(i) for i in range(depth) if not start <= i < start + lose)
    begun = time.perf_counter()
    command = [sys.executable, "-c", CUT, str(folder), str(out), keep, heal, str(tokens)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    held = 0
    while process.poll() is None:
        held = max(held, anonymous(process.pid))
        time.sleep(0.02)
    said = process.stdout.read().splitlines()
    if process.returncode:
        raise SystemExit(f"The cut ended with {process.returncode}.")
    disk = sum(f.stat().st_size for f in folder.iterdir())
    shutil.rmtree(out)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"model": size, "disk": disk, "layers": depth - lose, "start": start, "heal": heal, "tokens": tokens,
            "anonymous": held, "peak": int(said[-1].split()[1]), "machine": memory,
            "seconds": time.perf_counter() - begun}  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="3b")
    parser.add_argument("--lose", type=int, default=4, help="layers")
    late = (
        "the first layer that goes; the middle ones if not said. All behind are refitted, so a late one takes less time"
    )
    parser.add_argument("--start", type=int, help=late)
    parser.add_argument("--heal", choices=("none", "closed", "local"), default="closed")
    parser.add_argument("--tokens", type=int, default=TOKENS.fit, help="to fit to; a quarter as many guard")
    parser.add_argument("--folder", type=Path, default=Path("large"), help="where the model is made; it stays there")
    asked = parser.parse_args(words)
    found = measure(asked.size, asked.lose, asked.start, asked.heal, asked.tokens, asked.folder)
    print(json.dumps(found))
    told = ", ".join(f"{key} {found[key] / 2**30:.2f} GiB" for key in ("disk", "anonymous", "peak", "machine"))
    print(f"{told}; {found['seconds']:.0f} s")


if __name__ == "__main__":
    main()
