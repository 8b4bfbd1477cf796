"""A run folder that is deleted or replaced under its training ends it in an error, and nothing is written there."""

from __future__ import annotations

import shutil

import pytest

from leansurgeon.errors import RunFolderReplaced
from leansurgeon.training.loop import train
from tests.support.training_standin import Words, recipe, word_model


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_training_without_its_folder_ends_in_an_error(split, replaced, tmp_path):
    folder = tmp_path / "run"

    class Deleting(Words):
        seen = 0

        def batch(self, of, indices, **rest):
            self.seen += of == split and folder.exists()
            if self.seen == 6:
                shutil.rmtree(folder)
                self.seen += 1
                if replaced:
                    folder.mkdir()
            return super().batch(of, indices, **rest)

    options = {"loaded": word_model(), "task": Deleting(), "cpu": True, "say": lambda text: None}
    settings = {"log_every": 100, "checkpoint": {"every": "2st"}}
    with pytest.raises(RunFolderReplaced) as error:
        train(recipe(**settings), tmp_path, folder, **options)
    assert str(folder) in error.value.message and error.value.exit_code == 1
    assert (list(folder.iterdir()) == []) if replaced else not folder.exists()
