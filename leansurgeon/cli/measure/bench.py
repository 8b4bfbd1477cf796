"""`leansurgeon bench`: how fast a model is on this machine, with other heads and other attention backends beside it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leansurgeon.cli.common import AllowPickle, AsJson, SourceName, TrustRemoteCode, say
from leansurgeon.errors import UsageError, plural, short
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.measure.costs.bench import BenchRow


def bench(
    model: SourceName,
    sweep_heads: Annotated[
        str | None, typer.Option(help="8,12,24: these heads too, at the model's head_dim and at its width.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a training step and of the large forward pass.")] = 8,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a text sample. Default: what it takes, at most 1024.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32.")
    ] = None,
    backends: Annotated[
        str, typer.Option(help="Attention backends beside torch's choice: all, none, or math,flash,eager,...")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds; medians and quartiles are told.")] = 7,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the GPU alone.")] = False,
    as_json: AsJson = False,
    allow_pickle: AllowPickle = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Step time, latency, throughput and peak memory of MODEL here, with new weights of its shape.

    A model that surgery made is timed against its shape before. On a run folder the result is kept as RUN/bench.json.
    """
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.measure.costs import bench as benches
    from leansurgeon.report.evidence.folder import BENCH
    from leansurgeon.training.runs import folder as runfolder

    sweep = benches.parse_sweep(sweep_heads)
    with ExitStack() as keep:
        source = open_source(model, allow_pickle=allow_pickle, weights=False, keep=keep)
        length = benches.default_load_tokens(source, tokens)
        rivals, skipped = benches.contenders(source, sweep)
        import torch

        from leansurgeon.measure.costs import speed
        from leansurgeon.measure.data import inputs

        wanted = chosen_backends(backends, speed.BACKENDS)
        device = torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")
        precision = precision or ("bf16" if device.type == "cuda" else "fp32")
        if precision not in ("bf16", "fp16", "fp32"):
            raise UsageError(f"--precision {precision}: give bf16, fp16 or fp32.")
        if precision == "fp16" and device.type == "cpu":
            raise UsageError("--precision fp16 is for a GPU.", "Give bf16 or fp32.")
        load = speed.Load(batch, length, precision)
        rows, more = benches.time_contenders(rivals, load, wanted, rounds, device, say)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else f"cpu, {plural(torch.get_num_threads(), 'thread')}"
    remarks = benches.remarks(rows, hopper=cuda and torch.cuda.get_device_capability(device)[0] == 9)
    document = {
        "schema_version": 1,
        "model": source.name,
        "device": name,
        "torch": torch.__version__,
        "load": {"batch": batch, "tokens": length, "precision": precision, "rounds": rounds},
        "unit": "images" if inputs.takes_images(source.config, source.architecture) else "tokens",
        "peak_memory_kind": "cuda allocator peak" if cuda else "live tensors of a step, counted",
        "rows": [row.as_dict() for row in rows],
        "skipped": [*skipped, *more],
        "remarks": remarks,
    }
    if as_json:
        print(json.dumps(document))
    else:
        show(document, rows, source.name)
    if run := runfolder.run_of(model):
        runfolder.write_json(run / BENCH, document)
        say(f"Kept as {run / BENCH}.")


def show(document: dict[str, Any], rows: list[BenchRow], model: str) -> None:
    """The table and what follows from it, in 80 columns."""
    from leansurgeon.measure.costs import bench as benches

    load = document["load"]
    print(benches.table(rows, document["unit"] == "images"))
    text = "" if document["unit"] == "images" else f" of {load['tokens']} tokens"
    lines = wrap(
        f"{short(model, 60)} on {document['device']}: batch {load['batch']}{text}, {load['precision']}, new weights; "
        f"medians of {load['rounds']} interleaved rounds. fwd 1 is the latency of one sample. Peak: "
        f"{document['peak_memory_kind']}."
    )
    for sentence in (*document["skipped"], *document["remarks"]):
        lines += wrap(f"- {sentence}", indent="  ")
    print("\n" + "\n".join(lines))


def chosen_backends(text: str, known: tuple[str, ...]) -> list[str]:
    """Backends by their names; `all` are those beside torch's own choice."""
    if text in ("all", "none"):
        return [b for b in known if b != "auto"] if text == "all" else []
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise UsageError(f"--backends {unknown[0]}: known are {', '.join(known[1:])}.", "Or give all or none.")
    return [word for word in dict.fromkeys(words) if word != "auto"]
