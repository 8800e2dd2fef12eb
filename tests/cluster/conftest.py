"""Machines and networks for the cluster tests. Where the host allows none, the tests are skipped or fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.bed import Bed
from tests.cluster.network import Network
from tests.cluster.recorded import Recorded
from tests.cluster.requirements import REQUIRE, missing
from tests.e2e.kit import Client, make_corpus


@pytest.fixture(scope="session", autouse=True)
def cluster_host() -> None:
    """Skip on a host on which the bed cannot run; fail there if it is required."""
    if reason := missing():
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture
def network() -> Iterator[Network]:
    """A network without machines."""
    with Network(seed=1) as made:
        yield made


@pytest.fixture(scope="session")
def corpus(cluster_host: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated text of about 1 MB."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def session_bed(cluster_host: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Three nodes of one worker each, for all tests; tests take it as ``bed``."""
    with Bed(tmp_path_factory.mktemp("bed")) as started:
        yield started
        assert started.control.ended() == {}


@pytest.fixture
def bed(session_bed: Bed) -> Iterator[Bed]:
    """The bed; after the test, its network is whole and its nodes are ready again."""
    yield session_bed
    session_bed.repair()


@pytest.fixture
def client(bed: Bed) -> Client:
    """A client of the bed's API."""
    return bed.client


@pytest.fixture
def recorded(client: Client) -> Recorded:
    """What the bed has recorded since the test began."""
    return Recorded(client)
