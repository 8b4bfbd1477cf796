"""Lines of 80 columns."""

from __future__ import annotations

import pytest

from leansurgeon import words


@pytest.mark.parametrize("unit", ["%", "MiB", "min"])
def test_a_number_keeps_its_unit(unit):
    for length in range(60, 82):
        lines = words.wrap(f"{'x' * length} 98.4 {unit} of it, and 7 more of everything else that there is", "  ")
        assert max(map(len, lines)) <= max(words.WIDTH, length)
        assert any(f"98.4 {unit}" in line for line in lines) and not any("\u00a0" in line for line in lines)


def test_what_is_longer_than_a_line_stays_whole():
    path = "/".join(["folder"] * 20)
    assert path in words.wrap(f"Written to {path} now.")
