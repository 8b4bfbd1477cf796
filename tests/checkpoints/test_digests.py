"""Digests that were begun early are those of the files as they are when somebody asks."""

import hashlib
import os

from leansurgeon.checkpoints import digests


def test_a_digest_begun_early_is_hashlibs(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    file.write_bytes(os.urandom(digests.CHUNK + 12_345))
    digests.begin(str(tmp_path))
    begun = digests.running[digests.identity(file)]
    assert digests.sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest() == begun.digest
    file.write_bytes(b"another file")  # of another size and time: hashed anew
    assert digests.sha256(file) == hashlib.sha256(b"another file").hexdigest()


def test_what_nobody_asked_for_is_given_up(tmp_path):
    """A command that ends early must not leave a processor busy: this file would take an hour."""
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 << 40)
    with digests.early(str(tmp_path)):
        begun = digests.running[digests.identity(tmp_path / "model.safetensors")]
        assert begun.is_alive()
    begun.join(timeout=10)
    assert not begun.is_alive() and begun.digest is None and begun not in digests.running.values()
