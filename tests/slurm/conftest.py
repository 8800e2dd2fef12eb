"""Where no Slurm cluster can run, its tests are skipped or fail."""

from __future__ import annotations

import os

import pytest

from tests.slurm.requirements import REQUIRE, missing


@pytest.fixture(scope="session", autouse=True)
def slurm_host() -> None:
    """Skip on a machine on which Slurm cannot run; fail there if it is required."""
    if reason := missing():
        if os.environ.get(REQUIRE) == "1":
            pytest.fail(f"{REQUIRE}=1, but {reason}")
        pytest.skip(reason)
