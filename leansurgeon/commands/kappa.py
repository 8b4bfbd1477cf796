"""Kappa: how well conditioned the attention of a model is on sample data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from leansurgeon.commands.command import Answer, Command
from leansurgeon.commands.options import DataRequest, Seed
from leansurgeon.errors import UsageError
from leansurgeon.progress import Say
from leansurgeon.reading.jsonfile import JsonObject
from leansurgeon.request import Access, ModelName, Opt


class KappaRequest(DataRequest, Access):
    """A model, and how it is measured."""

    model: ModelName
    samples: Annotated[int, Field(ge=1), Opt("Held-out samples to measure on, at most.", "Data")] = 256
    probes: Annotated[int, Field(ge=0), Opt("Directions in which each block's Jacobian is tried; 0 leaves it out.")] = (
        16
    )
    seed: Seed = 0


@dataclass(frozen=True)
class Kappa(Answer):
    """Condition numbers of every layer's attention, in `document["layers"]`."""

    @property
    def layers(self) -> list[JsonObject]:
        """The values layer by layer."""
        return list(self.document["layers"])


def kappa(request: KappaRequest, say: Say) -> Kappa:
    """Measure condition numbers of MODEL's attention blocks, raw and invariant under a change of basis.

    Per sample, real tokens only, spectrum in fp64; a layer whose blocks lack rank shows a lower bound. For a run's
    folder, without --data, the result is saved there as kappa.json; `leansurgeon report` shows it if the training did
    not measure kappa. `--data RUN` measures another model on the data of a run, whose folder keeps the result too.

    >>> import leansurgeon, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> cut = leansurgeon.shrink("digits-vit", layers=2, out=f"{folder}/lean", proof=False, progress=False)
    >>> found = leansurgeon.kappa(cut, "task:digits", samples=8, probes=0, progress=False)
    >>> len(found.layers)
    2

    Raises `UsageError` for a preset or missing data, `UnsupportedModel` for a source that cannot be read.
    """
    from leansurgeon.checkpoints.source import open_source
    from leansurgeon.commands.samples import data_to_measure
    from leansurgeon.report.runs import KAPPA, kappa_name
    from leansurgeon.report.tables.kappa import describe
    from leansurgeon.training.runs.folder import find_run, keep_beside

    model, data = request.model, request.data
    opened = open_source(model, allow_pickle=request.allow_pickle)
    if opened.weights is None:
        raise UsageError(
            f"'{model}' is a preset without weights, so there is no attention to measure yet.",
            f"`leansurgeon shrink {model} --init fresh -o FOLDER` makes a model of it; give that folder.",
        )
    if not opened.learned:
        say(f"{opened.name} was initialised and never trained: its kappa is that of random weights.")
    # Read as few of the samples for fitting as possible.
    sample = data_to_measure(opened, data, model, "Kappa", 2, request.seed, say, request.columns)
    from leansurgeon.measure.kappa.study import study

    document = study(opened, sample, samples=request.samples, probes=request.probes, say=say)
    own = find_run(model)
    if run := find_run(data) if data else own:  # the run's own data, so a report can show the result
        keep_beside(run / (KAPPA if run == own else kappa_name(Path(model))), document, say)
    return Kappa(document, "\n".join(describe(document)))


COMMAND = Command("kappa", KappaRequest, kappa, ("leansurgeon kappa my-model --data texts/",), shows=True)
