"""Judge: compare quality before and after, on the user's data."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from pydantic import Field

from leansurgeon.checkpoints.foreign import companions
from leansurgeon.checkpoints.source import Source, open_source
from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import DataRequest, Seed
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.request import Access, Opt
from leansurgeon.words import wrap


class JudgeRequest(DataRequest, Access):
    """A model, what it is compared with, and on what data."""

    model: Annotated[str, Opt("A cut or retrained model.", positional=True, model=True)]
    lm_eval: Annotated[
        str | None, Opt("Tasks of lm-evaluation-harness: names, or YAML files of your own (extra lm-eval).", "Data")
    ] = None
    against: Annotated[
        str | None,
        Opt("The model to compare with. Default: the one that it was cut from.", "Data", model=True),
    ] = None
    limit: Annotated[
        int | None, Field(ge=2), Opt("Judge on the first documents only, this many of each lm-eval task.", "Data")
    ] = None
    seed: Seed = 0


def judge(request: JudgeRequest, say: Say) -> Answer:
    """Compare MODEL with the model that it was cut from, on your own data: the same samples, with intervals.

    Differences come with a 95 % confidence interval, paired, since both models see the same samples. The result is
    saved in MODEL's surgery.json and its card; `leansurgeon report` and its page show it.

    Raises `UsageError` if there is nothing to judge on or to compare with; and what opening and measuring raise.
    """
    model, against, data, tasks = request.model, request.against, request.data, request.lm_eval
    if not data and not tasks:
        raise UsageError("Nothing to judge on.", "Give --data FILES, --lm-eval TASKS, or both.")
    from leansurgeon.checkpoints.kind import LANGUAGE
    from leansurgeon.checkpoints.proof.report_numbers import sentence
    from leansurgeon.commands.samples import data_to_measure
    from leansurgeon.measure import harness
    from leansurgeon.surgery import judged

    with ExitStack() as keep:
        opened = open_source(model, allow_pickle=request.allow_pickle, keep=keep)
        if opened.folder is None:
            raise UsageError(f"'{model}' is a preset and has no weights to judge.", "Give the folder of a model.")
        origin = source_of(opened, against, keep, allow_pickle=request.allow_pickle)
        comparisons = {}
        if tasks:  # a missing task fails at once
            harness.split_task_names(tasks)
            harness.harness()
        if data:
            refuse_unlike(opened, origin)
            # The source reads the data, unless it was found as a copy of the weights without the tokenizer or processor
            # that the result took from it.
            lacks = set(companions.find_companions(opened.folder)) - set(companions.find_companions(origin.folder))
            by, columns = opened if lacks & set(companions.READING) else origin, request.columns
            sample = data_to_measure(by, data, origin.name, "Judging", None, request.seed, say, columns)
            say(f"Judging on {data} ...")
            how = {"fitted": opened.fitted}
            comparisons[data] = judged.on_data(sample, origin, opened.folder, opened.parameters.total, **how)
        if tasks:
            comparisons |= harness.judge_tasks(tasks, origin.folder, opened.folder, limit=request.limit, say=say)
        language = opened.head in LANGUAGE
        if opened.record and against is None:
            judged.note(opened.folder, opened.record, comparisons, language=language)
            say(f"Kept in {opened.folder}: surgery.json and the model card.")
    results = {name: one.as_dict() for name, one in comparisons.items()}
    lines = [line for name, one in comparisons.items() for line in wrap(f"{name}: {sentence(one, language)}")]
    return Answer({"schema_version": 1, "model": model, "against": origin.name, "judged": results}, "\n".join(lines))


def source_of(opened: Source, against: str | None, keep: ExitStack, *, allow_pickle: bool) -> Source:
    """Return the model to compare with: the one named by --against, else the one that this model was cut from."""
    hint = "Name the model to compare with: --against MODEL."
    if against is None and opened.record_trouble:
        raise UsageError(f"What {opened.name} was cut from is not known: {opened.record_trouble}", hint)
    if against is None and opened.record is None:
        raise UsageError(f"{opened.name} holds no surgery.json, so its source is unknown.", hint)
    if against is None:
        from leansurgeon.training.recipe.teacher import at_hand

        origin = opened.record.source
        place = None if origin.kind == "preset" else at_hand(origin)
        if place is None:
            what = "a preset, which is untrained" if origin.kind == "preset" else "not on this machine"
            raise UsageError(f"{origin.name}, from which it was cut, is {what}.", hint)
        against = place
    other = open_source(against, allow_pickle=allow_pickle, keep=keep)
    if other.folder is None:
        raise UsageError(f"'{against}' is a preset and has no weights to compare with.", hint)
    return other


def refuse_unlike(opened: Source, origin: Source) -> None:
    """Raise `UsageError` if two models have different tokenizers, of whatever size: the same ids are other words to
    each, and losses per token do not compare; or if two classifiers differ in the number or the order of their classes.
    """
    from leansurgeon.measure.data.choose_task import brings_tokenizer, class_names
    from leansurgeon.tasks.classes import match
    from leansurgeon.tasks.text import vocab

    if brings_tokenizer(opened.folder) and brings_tokenizer(origin.folder):
        both = [vocab.load(one.folder) for one in (opened, origin)]
        if not vocab.same_tokens(*both):
            raise UsageError(
                f"{opened.name} and {origin.name} have different tokenizers ({len(both[0]):,} and {len(both[1]):,} "
                "tokens): the same ids mean other words, so their losses cannot be compared.",
                "Compare with a model of the same tokenizer, or by tasks: --lm-eval TASKS.",
            )
    ours, theirs = class_names(opened.config), class_names(origin.config)
    places = list(match(ours, theirs).values())
    other = opened.outputs != origin.outputs or (len(places) == len(ours) and places != sorted(places))
    if opened.outputs and origin.outputs and other:
        has = [f"{', '.join(names[:6]) or 'without names'}" for names in (ours, theirs)]
        raise UsageError(
            f"The outputs of {opened.name} ({opened.outputs}: {has[0]}) are other classes than those of {origin.name} "
            f"({origin.outputs}: {has[1]}), or in another order, so they cannot be compared.",
            "Compare with a model of the same classes in the same order.",
        )


EXAMPLES = ("leansurgeon judge runs/lean --data texts/", "leansurgeon judge runs/lean --lm-eval arc_easy,piqa")
COMMAND = Command("judge", JudgeRequest, judge, EXAMPLES)
