"""What a proof found, as a person reads it: one sentence, or the cells of a table."""

from __future__ import annotations

import math
from typing import Any


def of_comparison(name: str, compared: dict[str, Any], language: bool) -> dict[str, str]:
    """Cells of one starting point. Perplexity for language models, else accuracy; empty where nothing is scored."""
    row = {"start": name}
    if "loss" in compared:
        loss = compared["loss"]["result"]
        row["loss"] = f"{loss:.3f}"
        if language:
            row["perplexity"] = perplexity(loss)
        else:
            row["accuracy"] = f"{100 * compared['accuracy']['result']:.1f} %"
    if "embeddings" in compared:
        row["cosine of embeddings"] = f"{compared['embeddings']['cosine']:.4f}"
        row["1st percentile"] = f"{compared['embeddings']['first_percentile']:.4f}"
    elif "cosine" in compared:
        row["cosine of outputs"] = f"{compared['cosine']:.4f}"
    if "relative_error" in compared:
        row["relative error"] = f"{compared['relative_error']:.4f}"
    return row


def perplexity(loss: float) -> str:
    return f"{math.exp(loss):,.1f}" if loss < 20 else f"e^{loss:.0f}"


def sentence(compared: dict[str, Any] | None, language: bool) -> str:
    """The proof in one sentence."""
    if compared is None:
        return "Not compared with the source: give --calibrate DATA to measure what is left of it."
    if not compared["done"]:
        return f"Not compared with the source: {compared['why']}."
    where = f"On {compared['rows']:,} {'held-out ' if compared['data'] != 'noise' else ''}outputs"
    where += " (noise as input)" if compared["data"] == "noise" else ""
    parts = [f"largest difference {compared['max_difference']:.2g} where their spread is {compared['spread']:.3g}"]
    parts.append(f"relative error {compared['relative_error']:.2g}")
    if "embeddings" in compared:
        parts.append(f"cosine of embeddings {compared['embeddings']['cosine']:.4f}")
    else:
        parts.append(f"cosine {compared['cosine']:.4f}")
    if "loss" in compared:
        a, b = compared["loss"]["source"], compared["loss"]["result"]
        parts.append(f"loss {b:.3f} (source {a:.3f})")
        if language:
            parts.append(f"perplexity {perplexity(b)} (source {perplexity(a)})")
        else:
            a, b = compared["accuracy"]["source"], compared["accuracy"]["result"]
            parts.append(f"accuracy {100 * b:.1f} % (source {100 * a:.1f} %) of {compared['scored']:,}")
    return f"{where}: {', '.join(parts)}."
