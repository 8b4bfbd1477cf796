"""Word the findings of a verification: one sentence, or the cells of a table."""

from __future__ import annotations

import math

from leansurgeon.checkpoints.record import Comparison, PairedFigure

SEEN = "data that it may have been trained on"  # instead of "held-out data" if that cannot be guaranteed


def perplexity(loss: float) -> str:
    """Format exp of a loss in nats, as a power of e from 20 on."""
    return f"{math.exp(loss):,.1f}" if loss < 20 else f"e^{loss:.0f}"


def difference(both: PairedFigure, form: str, times: float = 1.0, unit: str = "") -> str:
    """Format `; difference +0.101 to +0.117, 95 %`; empty if the interval is not known."""
    if both.low is None or both.high is None:
        return ""
    return f"; difference {times * both.low:{form}} to {times * both.high:{form}}{unit}, 95 %"


def sentence(compared: Comparison | None, language: bool) -> str:
    """Report the comparison in one sentence."""
    if compared is None:
        return "Not compared with the source: give --calibrate DATA to measure what is left of it."
    if not compared.done:
        return f"Not compared with the source: {compared.why}."
    reached = [
        f"{name} {both.result:#.4g} (source {both.source:#.4g}{difference(both, '+.3g')})"
        for name, both in compared.scores.items()
    ]
    if reached and compared.rows is None:
        return f"On {compared.scored or 0:,} documents: {', '.join(reached)}."
    held, of = {"noise": ("", " (noise as input)"), SEEN: ("", f" of {SEEN}")}.get(compared.data, ("held-out ", ""))
    where = f"On {compared.rows or 0:,} {held}outputs{of}"
    known = [
        ("largest difference {:.2g}", compared.max_difference),
        ("relative error {:.2g}", compared.relative_error),
    ]
    if e := compared.embeddings:
        between = "" if e.low is None or e.high is None else f" ({e.low:.4f} to {e.high:.4f}, 95 %)"
        known += [
            (f"cosine of embeddings {{:.4f}}{between}", e.cosine),
            ("1 % of them below {:.3f}", e.first_percentile),
            ("order of their similarities {:.3f} (Spearman)", e.rank_correlation),
            (f"{{:.0f}} % of the {e.nearest} nearest kept", None if e.nearest_kept is None else 100 * e.nearest_kept),
        ]
    else:
        known.append(("cosine {:.4f}", compared.cosine))
    parts = [words.format(value) for words, value in known if value is not None]
    if parts and compared.spread is not None:
        parts[0] += f" where their spread is {compared.spread:.3g}"
    if compared.loss:
        a, b = compared.loss.source, compared.loss.result
        parts.append(f"loss {b:.3f} (source {a:.3f}{difference(compared.loss, '+.3f')})")
        if language:
            parts.append(f"perplexity {perplexity(b)} (source {perplexity(a)})")
        elif compared.accuracy:
            a, b = compared.accuracy.source, compared.accuracy.result
            points = difference(compared.accuracy, "+.1f", 100, " points")
            parts.append(f"accuracy {100 * b:.1f} % (source {100 * a:.1f} %{points}) of {compared.scored or 0:,}")
    return f"{where}: {', '.join(parts + reached)}."
