"""Words of messages."""

from __future__ import annotations

import pytest

from leansurgeon import errors
from leansurgeon.errors import UsageError, plural


@pytest.mark.parametrize(
    ("n", "says"), [(0, "0 layers"), (1, "1 layer"), (1200, "1,200 layers"), ("1/2", "1/2 layers")]
)
def test_one_is_singular(n, says):
    assert plural(n, "layer") == says


def test_messages_are_readable_whatever_they_quote():
    error = UsageError(f"There is no preset '{'a' * 5000}'\x1b[31m\0\ud800.", "b" * 10_000)
    assert len(error.message) < 300 and len(error.hint) < 300
    assert (error.message + error.hint).isprintable()
    assert len(UsageError("word " * 10_000).message) <= errors.SENTENCE


@pytest.mark.parametrize("value", [{"a": [[0] * 1000] * 1000}, "x" * 5000, 10**4000, [[[[[[[[1]]]]]]]]])
def test_quoted_values_are_cut(value):
    assert len(errors.quote(value)) <= 60
