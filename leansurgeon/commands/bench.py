"""Bench: time a model on this machine, also with other numbers of heads and other attention backends."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

from pydantic import Field

from leansurgeon.commands.command import Answer, Command
from leansurgeon.errors import UsageError, plural, short
from leansurgeon.progress import Say
from leansurgeon.request import Access, Opt, SourceName
from leansurgeon.words import wrap


class BenchRequest(Access):
    """A model, the load it is timed under, and what it is compared with."""

    model: SourceName
    sweep_heads: Annotated[
        str | None, Opt("8,12,24: these heads too, at the model's head_dim and at its width.", "Shape")
    ] = None
    batch: Annotated[int, Field(ge=1), Opt("Samples of a training step and of the large forward pass.")] = 8
    tokens: Annotated[
        int | None, Field(ge=1), Opt("Tokens of a text sample. Default: what it takes, at most 1024.")
    ] = None
    precision: Annotated[str | None, Opt("bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32.")] = None
    backends: Annotated[str, Opt("Attention backends beside torch's choice: all, none, or math,flash,eager,...")] = (
        "all"
    )
    rounds: Annotated[int, Field(ge=2), Opt("Interleaved rounds; shows medians and quartiles.")] = 7
    cpu: Annotated[bool, Opt("Do not use the GPU.")] = False


def bench(request: BenchRequest, say: Say) -> Answer:
    """Measure step time, latency, throughput and peak memory of MODEL on this machine, with new weights of its shape.

    A model that surgery made is also timed at its shape before. For a run folder, the result is saved as
    RUN/bench.json.

    Raises `UsageError` for an impossible load, `OutOfMemory`, and what opening raises.
    """
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure.costs import bench as benches
    from leansurgeon.measure.data import inputs
    from leansurgeon.report.runs import BENCH
    from leansurgeon.training.runs import folder as runfolder

    sweep = benches.parse_sweep(request.sweep_heads)
    with ExitStack() as keep:
        source = open_source(request.model, allow_pickle=request.allow_pickle, weights=False, keep=keep)
        length = inputs.sample_tokens(request.tokens, source.config, source.architecture)
        rivals, skipped = benches.contenders(source, sweep)
        import torch

        from leansurgeon.measure.costs import speed
        from leansurgeon.measure.costs.memory import Setting

        backends = choose_backends(request.backends, speed.BACKENDS)
        device = torch.device("cuda" if torch.cuda.is_available() and not request.cpu else "cpu")
        precision = request.precision or ("bf16" if device.type == "cuda" else "fp32")
        if precision not in ("bf16", "fp16", "fp32"):
            raise UsageError(f"--precision {precision}: give bf16, fp16 or fp32.")
        if precision == "fp16" and device.type == "cpu":
            raise UsageError("--precision fp16 is for a GPU.", "Give bf16 or fp32.")
        load = Setting(request.batch, length, precision)
        rows, more = benches.time_contenders(rivals, load, backends, request.rounds, device, say)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"cpu, {plural(torch.get_num_threads(), 'thread')}"
    document = {
        "schema_version": 1,
        "model": source.name,
        "device": name,
        "torch": torch.__version__,
        "load": {"batch": request.batch, "tokens": length, "precision": precision, "rounds": request.rounds},
        "unit": "images" if inputs.takes_images(source.config, source.architecture) else "tokens",
        "peak_memory_kind": "cuda allocator peak" if cuda else "live tensors of a step, counted",
        "rows": [row.as_dict() for row in rows],
        "skipped": [*skipped, *more],
        "remarks": benches.remarks(rows),
    }
    if run := runfolder.find_run(request.model):
        runfolder.write_json(run / BENCH, document)
        say(f"Kept as {run / BENCH}.")
    images = document["unit"] == "images"
    lines = wrap(
        f"{short(source.name, 60)} on {name}: batch {request.batch}{'' if images else f' of {length} tokens'}, "
        f"{precision}, new weights; medians of {request.rounds} interleaved rounds. fwd 1 is the latency of one "
        f"sample. Peak: {document['peak_memory_kind']}."
    )
    for sentence in (*document["skipped"], *document["remarks"]):
        lines += wrap(f"- {sentence}", indent="  ")
    return Answer(document, "\n".join([benches.table(rows, images), "", *lines]))


def choose_backends(text: str, known: tuple[str, ...]) -> list[str]:
    """Return backends by name; `all` means all except torch's default choice. Raises `UsageError`."""
    if text in ("all", "none"):
        return [b for b in known if b != "auto"] if text == "all" else []
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise UsageError(f"--backends {unknown[0]}: known are {', '.join(known[1:])}.", "Or give all or none.")
    return [word for word in dict.fromkeys(words) if word != "auto"]


COMMAND = Command("bench", BenchRequest, bench, ("leansurgeon bench digits-vit --sweep-heads 4,8",), shows=True)
