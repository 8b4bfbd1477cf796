"""Tables as spreadsheets write them, and columns as people name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from leansurgeon.errors import UsageError
from leansurgeon.reading import tables
from leansurgeon.tasks import disk_cache, user_data


@pytest.mark.parametrize("given", ["text= Review ,label=Stars!", "text=Review,label=Stars!"])
def test_a_column_with_spaces_around_its_name_can_be_named(tmp_path, given):
    file = tmp_path / "reviews.csv"
    file.write_text("Stars!, Review \n" + "1,some words here\n" * 9)
    found = user_data.columns_of(user_data.recognise(str(file)), given)
    assert (found.texts, found.labels) == ((" Review ",), ("Stars!",))


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc, which Linux has")
@pytest.mark.parametrize("name", ["broken.csv", "broken.jsonl", "broken.txt"])
def test_a_file_that_fails_while_it_is_read_is_one_sentence(tmp_path, name):
    """As one on a broken disk does: the process's memory has nothing at its first address."""
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(UsageError, match=name):
        if name.endswith("txt"):
            disk_cache.file_key(tmp_path / name)
        else:
            tables.columns(tmp_path / name)
