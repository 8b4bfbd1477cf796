"""Write surgery.json: where a model comes from."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from leansurgeon.checkpoints import record, whereabouts
from leansurgeon.checkpoints.config import read_config
from leansurgeon.checkpoints.digests import sha256
from leansurgeon.checkpoints.foreign import trust
from leansurgeon.checkpoints.record import FRESH, Origin, PlanRecord, Proof, SurgeryRecord
from leansurgeon.checkpoints.recorded.decided import Decisions
from leansurgeon.checkpoints.source import Source
from leansurgeon.version import __version__


def versions() -> dict[str, str]:
    """Return the installed versions of leansurgeon, Python and the libraries."""
    by_package = {"leansurgeon": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "timm", "safetensors", "numpy"):
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def write_surgery(
    folder: Path,
    source: Source,
    plan: PlanRecord,
    decided: Decisions,
    proof: Proof | None,
    *,
    language: bool = False,
    call: str = "",
    restored: SurgeryRecord | None = None,
) -> SurgeryRecord:
    """Write surgery.json: the source with its hashes, the executed plan, the decisions, and the proof.

    For an exact plan it also holds what undoing needs: the source's config and record. `restored` is the original
    record of a model whose surgery was undone.
    """
    trusted, exact = source.architecture.code, plan.exactness == "exact"
    origin = Origin(
        name=source.name,
        kind=source.kind,
        preset=source.preset.name if source.preset else None,
        sha256={file.name: sha256(file) for file in source.files},
        notes=source.notes,
        code={file.name: sha256(file) for file in trust.code_files(trusted, read_config(trusted))} if trusted else {},
    )
    start = "fresh-attention" if any(step.exactness == "fresh" for step in plan.operators) else "transfer"
    before = source.record.history if source.record else ()
    whereabouts.remember(origin, source.files[0].parent if source.files and source.kind == "folder" else None)
    past = {"source": origin.as_dict(), "operators": [step.as_dict() for step in plan.operators], "seed": plan.seed}
    written = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    return record.write(
        folder,
        SurgeryRecord(
            source=origin,
            plan=plan,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            initialised=FRESH if plan.init == "fresh" or not source.learned else start,
            history=(*before, past),
            decided=decided,
            versions=versions(),
            proof=proof,
            language=language,
            call=call,
            fitted=source.fitted,
            source_config=trust.as_written(source.config) if exact else None,
            source_surgery=source.record if exact else None,
            restored=restored,
            files=tuple(sorted(written | {record.NAME, "README.md"})),
        ),
    )
