"""What a cut, a healed and a plainly trained model still share with their source, on text that none of them has seen.

    python examples/healing/judge_models.py SOURCE MODEL [MODEL ...] --text held.txt [--text other.txt ...]

Language models: perplexity in windows of 512 tokens, as a ratio to the source's. Encoders: what the proof of `shrink`
says, which is the cosine of mean-pooled embeddings (mean and first percentile), the rank correlation of pairwise
similarities and the share of the ten nearest kept. `--held` takes of the first text only what every command holds out
by its content: blocks of it for a language model, sentences for an encoder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from leansurgeon.checkpoints.proof.reload_check import differences
from leansurgeon.tasks import splits
from leansurgeon.tasks.text import corpus, files

WINDOW, LONGEST = 512, 128  # tokens of a window, and of a sentence


def main() -> None:
    asked = arguments()
    config = json.loads((Path(asked.source) / "config.json").read_text())
    causal = config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel"))
    tokenizer = AutoTokenizer.from_pretrained(asked.source)
    texts = {Path(name).name: files.read(Path(name)) for name in asked.text}
    if causal:
        first = next(iter(texts))
        if asked.held:
            held = corpus.split_documents({"train": corpus.find(asked.text[0], "text")})[1]["test"]()
            texts[first] = "".join(held)
        samples = {name: windows(text, tokenizer, asked.samples) for name, text in texts.items()}
        rows = perplexities(asked.source, asked.models, samples, asked.bf16)
    else:
        samples = {
            name: lines(text, asked.held and n == 0, asked.samples) for n, (name, text) in enumerate(texts.items())
        }
        rows = likeness(asked.source, asked.models, samples, tokenizer)
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))


def windows(text: str, tokenizer, count: int) -> torch.Tensor:
    """(windows, tokens), evenly spread over the text."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    whole = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return whole[np.linspace(0, len(whole) - 1, min(count, len(whole))).round().astype(int)]


@torch.no_grad()
def perplexities(source: str, models: list[str], samples: dict[str, torch.Tensor], bf16: bool) -> list[dict]:
    """A row for every model: perplexity on every text, and the ratio to the source's."""
    rows, base = [], {}
    for name in [source, *models]:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        row = {"model": name}
        for text, ids in samples.items():
            losses = []
            for piece in ids.split(1):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    logits = model(input_ids=piece).logits[0, :-1].float()
                losses.append(F.cross_entropy(logits, piece[0, 1:]).item())
            value = math.exp(sum(losses) / len(losses))
            base.setdefault(text, value)
            row |= {f"{text} ({len(ids)} x {WINDOW})": f"{value:.2f}", f"{text} ratio": f"{value / base[text]:.3f}"}
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def lines(text: str, held: bool, count: int) -> list[str]:
    """Sentences of a text: a random choice of all, or of those that every command holds out."""
    every = corpus.sentences(text)
    if held:
        ids = [*map(splits.hash_text, every)]
        every = [every[row] for row in splits.split_by_content(ids).rows["test"]]
    order = np.random.default_rng(0).permutation(len(every))[:count]
    return [every[i] for i in np.sort(order)]


@torch.no_grad()
def likeness(source: str, models: list[str], samples: dict[str, list[str]], tokenizer) -> list[dict]:
    """A row for every model: what the proof says of its embeddings beside the source's."""
    rows = []
    kept = {text: outputs(source, found, tokenizer) for text, found in samples.items()}
    for name in models:
        row = {"model": name}
        for text, found in samples.items():
            made = differences(kept[text], outputs(name, found, tokenizer))["embeddings"]
            row |= {
                f"{text} ({len(found)}) cosine": f"{made['cosine']:.4f}",
                "1 %" + f" {text}": f"{made['first_percentile']:.3f}",
                f"rank {text}": f"{made['rank_correlation']:.3f}",
                f"nearest {text}": f"{100 * made['nearest_kept']:.1f} %",
            }
        rows.append(row)
    return rows


def outputs(name: str, found: list[str], tokenizer) -> list[torch.Tensor]:
    """States of all real tokens (tokens, width) and mean-pooled embeddings (sentences, width)."""
    model = AutoModel.from_pretrained(name, dtype=torch.float32).eval()
    states, pooled = [], []
    for start in range(0, len(found), 32):
        batch = tokenizer(
            found[start : start + 32], padding=True, truncation=True, max_length=LONGEST, return_tensors="pt"
        )
        state = model(**batch).last_hidden_state
        mask = batch["attention_mask"].bool()
        states.append(state[mask])
        weights = mask[..., None].to(state.dtype)
        pooled.append((state * weights).sum(1) / weights.sum(1))
    return [torch.cat(states), torch.cat(pooled)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--samples", type=int, default=32, help="windows or sentences of each text")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="matrix products in bf16, of all models alike")
    return parser.parse_args()


if __name__ == "__main__":
    main()
