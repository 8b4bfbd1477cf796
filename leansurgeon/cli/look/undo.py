"""`leansurgeon undo`: the source's shape and bits back out of a result of exact operators."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leansurgeon.cli import completion
from leansurgeon.cli.common import AsJson, Force, TrustRemoteCode, say
from leansurgeon.words import wrap

if TYPE_CHECKING:
    from leansurgeon.checkpoints.record import SurgeryRecord


def undo(
    model: Annotated[
        str, typer.Argument(autocompletion=completion.models, help="A folder that leansurgeon has written.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    as_json: AsJson = False,
    force: Force = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Take back what exact operators did to MODEL (add-heads, split-heads, widen-mlp), bit for bit.

    The result is compared with the source where that is at hand, else it is reloaded. What has forgotten something
    cannot be undone, and a model that was trained after surgery neither.
    """
    from leansurgeon.checkpoints.publish.output import check_apart, held
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.report.tables.plan import plan_table
    from leansurgeon.surgery.write.undo import carry_out, plan_undo

    source = open_source(model)
    steps = plan_undo(source)
    record = None
    if not dry_run:
        with held(out, force=force):
            check_apart(out, source.folder)
            record = carry_out(steps, out, force=force, say=say)
    verified = record.decided.verified if record else None
    if as_json:
        document = {"schema_version": 1, "dry_run": dry_run, "out": None if dry_run else str(out)}
        document |= {
            "plan": steps.plan.as_dict(),
            "verified": verified and verified.as_dict(),
            "proof": record and record.proof and record.proof.as_dict(),
        }
        print(json.dumps(document))
        return
    print(plan_table(steps.plan))
    print("\n" + "\n".join(wrap(closing(out, record) if record else "Dry run: nothing was written.")))


def closing(out: Path, record: SurgeryRecord) -> str:
    """The closing sentence: where it is, and what it was held against."""
    verified, proof = record.decided.verified, record.proof
    if verified.by == "reload":
        compared = proof.compared
        comparison = (
            f"outputs differ from the undone model's by at most {compared.max_difference:.2g} where their spread "
            f"is {compared.spread:.2g}"
            if compared.done
            else compared.why
        )
        return (
            f"Written to {out}; {verified.source} is not at hand or has changed, so the result was reloaded with "
            f"{proof.loaded_with}: {comparison}."
        )
    how = "the file has the recorded SHA-256" if verified.by == "sha256" else "compared tensor by tensor"
    left = len(verified.left_out or ())
    also = f" {left} tensors that the model does not read were left out by shrink." if left else ""
    return f"Written to {out}: bit for bit the tensors of {verified.source} ({how}).{also}"
