"""Where a source lies is noted in the cache: what other processes make must not be found there."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEANSURGEON_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
