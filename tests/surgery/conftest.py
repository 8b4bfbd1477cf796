"""Tiny trained models, made once for all tests of surgery."""

import pytest

from tests.surgery.cuts import samples, train


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a tiny trained model of a family, and its sample data."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = train(family, tmp_path_factory.mktemp(family)), samples(family)
        return made[family]

    return make
