"""Undo: restore the source's shape and bits from a result of exact operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import DryRun, Force
from leansurgeon.progress import Say
from leansurgeon.request import Opt, Trust
from leansurgeon.words import wrap


class UndoRequest(Trust):
    """A result, and where to write its source."""

    model: Annotated[str, Opt("A folder that leansurgeon has written.", positional=True)]
    out: Annotated[Path, Opt("Folder to write.", "Output", ("--out", "-o"))]
    dry_run: DryRun = False
    force: Force = False


def undo(request: UndoRequest, say: Say) -> Answer:
    """Take back what exact operators did to MODEL (add-heads, split-heads, widen-mlp), bit for bit.

    The recorded SHA-256 of the source's file is the proof. A file with other bytes is reloaded and compared instead.
    A cut that removed something cannot be undone, nor can a model that was trained after surgery.

    Raises `UsageError` for what cannot be undone, and what opening and writing raise.
    """
    from leansurgeon.checkpoints.publish.output import check_apart, hold_output
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.tables.cut import plan_table
    from leansurgeon.surgery.undo import carry_out, plan_undo

    source = open_source(request.model)
    steps, out = plan_undo(source), request.out
    made = None
    if not request.dry_run:
        with hold_output(out, force=request.force):
            check_apart(out, source.folder)
            made = carry_out(steps, out, force=request.force, say=say)
    verified = made and made.decided.verified
    document = {
        "schema_version": 1,
        "dry_run": request.dry_run,
        "out": made and str(out),
        "plan": steps.plan.as_dict(),
        "verified": verified and verified.as_dict(),
        "proof": made and made.proof and made.proof.as_dict(),
    }
    end = "Dry run: nothing was written."
    if made and verified.by == "reload":
        compared = made.proof.compared
        differ = f"outputs differ from the undone model's by at most {compared.max_difference:.2g}"
        differ += f" where their spread is {compared.spread:.2g}"
        end = f"Written to {out}; its bytes are not those of {verified.source}'s files, so it was reloaded with "
        end += f"{made.proof.loaded_with}: {differ if compared.done else compared.why}."
    elif made:
        end = f"Written to {out}: bit for bit the tensors of {verified.source} (the file has the recorded SHA-256)."
    return Answer(document, f"{plan_table(steps.plan)}\n\n" + "\n".join(wrap(end)))


COMMAND = Command("undo", UndoRequest, undo, ("leansurgeon undo runs/wide -o back",))
