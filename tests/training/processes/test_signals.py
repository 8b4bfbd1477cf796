"""A signal ends what is done also where errors are expected."""

import os
import signal
from types import SimpleNamespace

import pytest

from leansurgeon.errors import Stopped
from leansurgeon.search import outcome as search
from leansurgeon.training.processes.signals import raising


def test_a_signal_in_a_memory_rehearsal_is_no_model_without_memory(monkeypatch):
    """A model whose memory cannot be predicted is said and passed over; a signal meanwhile is not such a model."""
    monkeypatch.setattr(search, "training_memory", lambda *rest: os.kill(os.getpid(), signal.SIGTERM))
    candidate, unknown = SimpleNamespace(name="a", shape=None), {"a": SimpleNamespace(memory=None)}
    with pytest.raises(Stopped), raising("Stopped."):
        search.with_memory(None, [candidate], unknown, None)
