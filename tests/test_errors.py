"""Words of messages."""

from __future__ import annotations

import pytest

from leansurgeon.errors import plural


@pytest.mark.parametrize(
    ("n", "says"),
    [(0, "0 layers"), (1, "1 layer"), (1200, "1,200 layers"), ("1", "1 layer"), ("1/2", "1/2 layers")],
)
def test_one_is_singular(n, says):
    assert plural(n, "layer") == says
