"""What all tests share: a marker by folder, and the ranks of the session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

TESTS = Path(__file__).parent

# A deadline would make every property a timing test, which fails when the machine is busy; CI draws the same each time.
settings.register_profile("plait", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("plait")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of the folder it is in: unit, torch, dist, gpu, docs, arch."""
    for item in items:
        if item.path.is_relative_to(TESTS):
            item.add_marker(item.path.relative_to(TESTS).parts[0])


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rates that tests measure are not to be taken for the user's, nor the user's for theirs."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[object]:
    """`ranks(4).call(function, **kwargs)` runs a function of a test module on four ranks; see support/rank_pool.py."""
    from tests.support.rank_pool import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def compiling_ranks() -> Iterator[object]:
    """The same for functions that compile, with time for that."""
    from tests.support.rank_pool import COMPILING_S, RankPool

    pool = RankPool(COMPILING_S, COMPILING_S)
    yield pool
    pool.close()
