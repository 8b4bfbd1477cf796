"""README.md of a result: a model card that can be published as it is.

Its front matter is the source's (licence, language, library, data sets, tags, ...) with the base model, our tag, and
our measurements as `model-index`, the hub's own form. Evaluations on the source's card describe the source, so they are
not copied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from leansurgeon.architectures.base import Config
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.kind import class_name, find_used_class_in, head_note
from leansurgeon.checkpoints.places import public
from leansurgeon.checkpoints.proof.report_numbers import SEEN, sentence
from leansurgeon.checkpoints.publish.durable import write_durably
from leansurgeon.checkpoints.record import FRESH, Comparison, Origin, SurgeryRecord
from leansurgeon.errors import LeanSurgeonError
from leansurgeon.reading import modelcard
from leansurgeon.reading.files import writable
from leansurgeon.reading.jsonfile import Json, JsonObject, value_at
from leansurgeon.reading.values import text
from leansurgeon.shape import NUMBERS, Shape

TAG = "leansurgeon"
JUDGED = "## On other data"
# Marks around the text of a push, so that the next push can tell it from what people wrote on the card.
BEGIN, END = "<!-- leansurgeon writes what follows, up to its end mark -->", "<!-- end of what leansurgeon writes -->"
OF_THE_SOURCE = ("model-index", "eval_results", "base_model_relation")  # keys that describe the source's own weights
# The hub's task for models of each class.
PIPELINES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
    "ForConditionalGeneration": "text2text-generation",
}
NOTES = {
    "fresh": "The weights are newly initialised: train the model before use.",
    "fresh-attention": "Queries, keys and values are newly initialised, all else is kept: train the model before use.",
    "transfer": "The model was not trained after surgery; unless every step below is exact, retrain it before use.",
    "trained": "The model was trained after surgery.",
}


@dataclass(frozen=True)
class Metric:
    """One figure of a card: the hub's metric type, our words, and the number."""

    kind: str
    name: str
    value: float


@dataclass(frozen=True)
class Measured:
    """Figures on one data set."""

    data: str
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class Training:
    """What a training adds to the card: its figures, and sentences about it."""

    measured: tuple[Measured, ...]
    says: tuple[str, ...]


# -- front matter ----------------------------------------------------------------------------------


def read_front_matter(folder: Path | None) -> tuple[JsonObject, str]:
    """Return the front matter of a source's card and, if it cannot be read, the reason.

    That is no reason to refuse a model.
    """
    if folder is None:
        return {}, ""
    try:
        if (folder / modelcard.CARD).is_file():
            companions.refuse_elsewhere(folder, modelcard.CARD)
        return modelcard.front_matter(folder), ""
    except LeanSurgeonError as error:
        return {}, error.message


def front(
    kept: JsonObject, name: str, base: str | None, config: Config, measured: Sequence[Measured], *, cut: bool
) -> JsonObject:
    """Return the result's front matter: what is `kept` of the source's, plus what this result adds.

    `base` is the source's name on the hub, None if unknown; `cut` says whether anything of the source is left.
    """
    made = {key: value for key, value in kept.items() if key not in OF_THE_SOURCE and value is not None}
    if base and cut:
        made["base_model"] = base
    if made.get("base_model"):
        made["base_model_relation"] = "finetune"
    if "architecture" in config and "model_type" not in config:
        library = "timm"
        pipeline = "image-classification" if config.get("num_classes", 1) else "image-feature-extraction"
    else:
        library, cls = "transformers", class_name(config)
        pipeline = next((word for ending, word in PIPELINES.items() if ending in cls), "feature-extraction")
    made.setdefault("library_name", library)
    made.setdefault("pipeline_tag", pipeline)
    own = ["custom_code", TAG] if config.get("auto_map") else [TAG]
    made["tags"] = [*(tag for tag in tags_of(made) if tag not in ("custom_code", TAG)), *own]
    if index := model_index(name, str(made.get("pipeline_tag", "other")), measured):
        made["model-index"] = index
    return made


def base_of(origin: Origin | None, folder: Path | None, kept: JsonObject) -> str | None:
    """Return the source's name on the hub: as it was given, from the hub's cache, or from its own card.

    None if no name is known; never a path on this machine.
    """
    if origin is not None and origin.kind in ("hub", "timm"):
        return origin.name
    if folder is None or (cached := modelcard.hub_name_of_cache(folder)):
        return cached if folder else None
    return None if TAG in tags_of(kept) else modelcard.own_name(folder)  # a result of ours is not on the hub yet


def tags_of(front: JsonObject) -> list[Json]:
    """Return the tags of a front matter, which may be a list, a single tag or anything else."""
    tags = front.get("tags")
    return tags if isinstance(tags, list) else [tags] if isinstance(tags, str) else []


def model_index(name: str, task: str, measured: Sequence[Measured]) -> list[JsonObject]:
    """Return the figures in the hub's form; empty if there are none."""
    results = [
        {
            "task": {"type": task},
            "dataset": {"name": one.data, "type": re.sub(r"[^\w.-]+", "-", one.data).strip("-.").lower() or "data"},
            "metrics": [{"type": m.kind, "name": m.name, "value": round(m.value, 6)} for m in one.metrics],
        }
        for one in measured
        if one.metrics
    ]
    return [{"name": name, "results": results}] if results else []


def of_comparison(data: str, compared: Comparison | None, language: bool) -> Measured:
    """Return the figures of a proof: perplexity for a language model, else accuracy, each with the source's value."""
    if compared is None or not compared.done:
        return Measured(data, ())
    scores = []
    if compared.loss:
        a, b = compared.loss.source, compared.loss.result
        scores.append(("loss", f"loss (source: {a:.4g})", b))
        if language and max(a, b) < 20:
            scores.append(("perplexity", f"perplexity (source: {math.exp(a):.4g})", math.exp(b)))
    if compared.accuracy:
        scores.append(("accuracy", f"accuracy (source: {compared.accuracy.source:.4g})", compared.accuracy.result))
    if compared.embeddings:
        e = compared.embeddings
        scores.append(("cosine_similarity", "mean cosine of embeddings to the source's", e.cosine))
        scores.append(("spearman", "order of similarities, against the source's", e.rank_correlation))
        scores.append(("nearest_kept", f"share of the {e.nearest} nearest that are kept", e.nearest_kept))
    elif compared.cosine is not None:
        scores.append(("cosine_similarity", "cosine of outputs to the source's", compared.cosine))
    scores += [(name, f"{name} (source: {both.source:.4g})", both.result) for name, both in compared.scores.items()]
    scores.append(("relative_error", "relative error of outputs, against the source's", compared.relative_error))
    scores.append(("max_difference", "largest difference of outputs to the source's", compared.max_difference))
    metrics = (Metric(kind, words, value) for kind, words, value in scores if value is not None)
    return Measured(data, tuple(m for m in metrics if math.isfinite(m.value)))


def list_judged_figures(made: SurgeryRecord) -> list[Measured]:
    """Return the figures on the data that the user named for judging."""
    return [of_comparison(public(data), other, made.language) for data, other in made.judged.items()]


# -- the card --------------------------------------------------------------------------------------


def write_card(
    folder: Path, made: SurgeryRecord | None, name: str, source: Path | None, training: Training | None = None
) -> None:
    """Write the card of the result in `folder`, which already has its config.

    `name` is the title. `source` is the folder whose card is continued: that of the model that was cut, or that the
    training started from. `made` is None if there was no surgery.
    """
    name = writable(name)
    kept, trouble = read_front_matter(source)
    measured = list(training.measured) if training else []
    if made and made.proof and made.initialised != FRESH and not training:  # its proof, and those on other data
        used, compared = made.decided.calibration, made.proof.compared
        kind = compared and compared.data
        of = "" if kind == SEEN else ", held out"
        data = "noise as input" if kind == "noise" else f"{public(used.name if used and used.name else 'data')}{of}"
        measured = [of_comparison(data, compared, made.language), *list_judged_figures(made)]
    base = base_of(made.source if made else None, source, kept)
    config, used = read_config(folder), find_used_class_in(folder)
    note = head_note(class_name(config), used, folder)
    config = config | ({"architectures": [used]} if note else {})
    head = front(kept, name, base, config, measured, cut=made is None or made.plan.init != FRESH)
    if note and "pipeline_tag" not in kept and companions.is_embedder(folder):
        head["pipeline_tag"] = "sentence-similarity"
    lines, trained = [f"# {name}\n"], training is not None
    lines += surgery(made, trained=trained) if made else []
    lines += [f"The front matter of the source's card could not be kept: {trouble}\n"] if trouble else []
    lines += ["## Training\n", "\n\n".join(training.says) + "\n"] if training else []
    if made:  # what the fresh process found when it loaded the result
        proof = made.proof
        proved = "Not reloaded after writing."
        if proof:
            counts = f"{proof.parameters:,} parameters, {proof.tensors}"
            proved = f"Reloaded in a fresh process with `{proof.loaded_with}`: {counts}."
        lines.append(f"## Loading{' before the training' if trained and proof else ''}\n\n{proved}\n")
        if proof and made.plan.init != FRESH:
            lines.append(sentence(proof.compared, language=made.language) + "\n")
    lines += [note + ".\n"] if note else []
    write_durably(folder / modelcard.CARD, text_of(head, "\n".join(lines)))


def adopt(home: Path, folder: Path, base: str | None) -> None:
    """Give a copied model the front matter of the card in `home`, so that results made from the copy keep it.

    `base` is the model's name on the hub.
    """
    kept = read_front_matter(home)[0] | ({"base_model": base} if base else {})
    if kept:
        write_durably(folder / modelcard.CARD, text_of(kept, ""))


def rename(folder: Path, name: str) -> None:
    """Give the card of a result another title, in its front matter too.

    Folders without a card of ours are left alone.
    """
    file = folder / modelcard.CARD
    if not file.is_file():
        return
    name, head, text = writable(name), modelcard.front_matter(folder), modelcard.body(folder)
    if TAG not in (head.get("tags") or []) or not text.startswith("# "):
        return
    for entry in head.get("model-index") or []:
        entry["name"] = name
    rest = text.partition("\n")[2].replace(BEGIN, "").replace(END, "").strip("\n")
    write_durably(file, text_of(head, f"# {name}\n\n{BEGIN}\n{rest}\n{END}\n" if rest else f"# {name}\n"))


def merge_cards(theirs: str, ours: str) -> str:
    """Merge a result's card into the card of a repository.

    What people wrote stays, in front matter and text; what leansurgeon wrote earlier, between its marks, is replaced.
    Raises `LeanSurgeonError` if a card cannot be read.
    """
    (kept, text), (head, new) = (modelcard.parts(card, "the repository") for card in (theirs, ours))
    index = list(head.get("model-index") or [])
    names = {entry["name"] for entry in index}
    index += [e for e in kept.get("model-index") or [] if not (isinstance(e, dict) and e.get("name") in names)]
    of_weights = {key: head[key] for key in ("base_model", "base_model_relation") if key in head}
    made = kept | {key: value for key, value in head.items() if key not in kept} | of_weights
    made |= {"tags": list(dict.fromkeys([*tags_of(kept), *tags_of(head)]))}
    if index:
        made["model-index"] = index
    block, places = new[max(0, new.find(BEGIN)) :].strip(), (text.find(BEGIN), text.find(END))
    if -1 in places:
        return text_of(made, f"{text.rstrip()}\n\n{block}\n" if text.strip() else new)
    return text_of(made, text[: places[0]] + block + text[places[1] + len(END) :])


def judge(folder: Path, made: SurgeryRecord) -> None:
    """Add the judgements of a result to its card: a section of sentences, and figures in the front matter.

    They replace older ones on the same data. A folder without a readable card is left alone.
    """
    try:
        head, text = modelcard.front_matter(folder), modelcard.body(folder)
    except LeanSurgeonError:
        return
    task = str(head.get("pipeline_tag", "other"))
    if new := model_index(text.partition("\n")[0].removeprefix("# "), task, list_judged_figures(made)):
        known = {result["dataset"]["name"] for result in new[0]["results"]}
        older = [entry for entry in head.get("model-index") or [] if isinstance(entry, dict)]
        kept = [r for entry in older for r in entry.get("results") or [] if value_at(r, "dataset", "name") not in known]
        head["model-index"] = [{**new[0], "results": [*kept, *new[0]["results"]]}]
    rest = re.sub(rf"\n*^{JUDGED}\n.*?(?=^## |\Z)", "\n\n", text, flags=re.MULTILINE | re.DOTALL).rstrip("\n")
    lines = [f"- {public(name)}: {sentence(one, made.language)}" for name, one in made.judged.items()]
    said = "Source and result on the same samples."
    write_durably(folder / modelcard.CARD, text_of(head, "\n".join([rest, "", JUDGED, "", said, "", *lines]) + "\n"))


def text_of(head: JsonObject, text: str) -> str:
    """Return front matter and body in the form of the file."""
    said = yaml.safe_dump(dict(head), sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
    return f"---\n{said}---\n\n{text}"


def surgery(made: SurgeryRecord, *, trained: bool) -> list[str]:
    """Describe the model's source, its shape before and after, and the operators.

    The numbers are left out if the record lacks some.
    """
    plan, source = made.plan, made.source
    by = made.versions.get("leansurgeon", "?")
    each = (f"- **{text(step.name)}** ({text(step.exactness)}): {step.says}" for step in plan.operators)
    steps = "\n".join(each) or "- none"
    done = f"## What was done\n\n{steps}\n"
    total = plan.parameters_before.get("total"), plan.parameters_after.get("total")
    if plan.before is None or plan.after is None or not all(total):  # from another version, or damaged
        return [f"Made from `{source.name}` by leansurgeon {by}.\n", done]
    rows = "\n".join(
        f"| {label} | {numbers(plan.before, key)} | {numbers(plan.after, key)} |"
        for key, label in NUMBERS.items()
        if key != "kv_heads"
    )
    used = made.decided.calibration
    data = f" Sample data: {used.says}, SHA-256 `{used.sha256[:16]}`." if used else ""
    change = 100 * (total[1] / total[0] - 1)
    return [
        f"Made from `{source.name}` by leansurgeon {by}: layers {numbers(plan.after, 'depth')}, "
        f"heads {numbers(plan.after, 'heads')}.",
        NOTES.get("trained" if trained else made.initialised or "transfer", NOTES["transfer"]) + "\n",
        f"| | before | after |\n|---|---|---|\n{rows}",
        f"| parameters | {total[0]:,} | {total[1]:,} ({change:+.1f} %) |\n",
        done,
        f"{plan.why}. Seed {plan.seed}.{data} The full record is in `surgery.json`.\n",
    ]


def numbers(shape: Shape, key: str) -> str:
    """Format one number of a shape; those of several stages side by side."""
    return ", ".join(f"{getattr(stage, key):,}" for stage in shape.stages)
