"""Tables as spreadsheets write them, and columns as people name them."""

from __future__ import annotations

import pytest

from leansurgeon.reading import tables
from leansurgeon.tasks import user_data


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_table_is_read_by_the_mark_of_its_header(tmp_path, mark):
    file = tmp_path / "reviews.csv"
    rows = [("text", "label"), ("good, I say", "1"), ("bad; I say", "0")]
    file.write_text("".join(f'"{text}"{mark}{label}\n' for text, label in rows), encoding="utf-8-sig")
    assert tables.columns(file) == ("text", "label")
    assert [values for _, values in tables.read(file, ["label", "text"])] == [[label, text] for text, label in rows[1:]]


@pytest.mark.parametrize("given", ["text= Review ,label=Stars!", "text=Review,label=Stars!"])
def test_a_column_with_spaces_around_its_name_can_be_named(tmp_path, given):
    file = tmp_path / "reviews.csv"
    file.write_text("Stars!, Review \n" + "1,some words here\n" * 9)
    found = user_data.columns_of(user_data.recognise(str(file)), given)
    assert found == {"text": " Review ", "label": "Stars!"}
