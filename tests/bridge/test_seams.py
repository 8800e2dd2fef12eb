"""The table of seams: what the adapter needs of megatron-bridge, against the record of a release and its folder."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.bridge.record import RECORD, key, parameters, version_of
from unicron.bridge import seams
from unicron.bridge.seams import SEAMS, VERSIONS
from unicron.errors import SeamDiffers
from unicron.megatron_lm.seams import Seam

FOLDER = os.environ.get("UNICRON_BRIDGE", "")


def recorded(version: str) -> dict[str, Any]:
    """Return the parameters of all seams in a recorded release."""
    found: dict[str, Any] = json.loads(RECORD.read_text())[version]
    return found


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("seam", SEAMS, ids=key)
def test_the_table_is_that_of_the_recorded_releases(seam: Seam, version: str) -> None:
    has = recorded(version)[key(seam)]
    if seam.way == "replaced":
        assert list(seam.parameters) == has
    else:
        assert set(seam.parameters) <= set(has)


def test_every_release_of_the_table_is_recorded() -> None:
    assert set(VERSIONS) == set(json.loads(RECORD.read_text()))


@pytest.mark.skipif(not FOLDER, reason="UNICRON_BRIDGE names no folder with megatron-bridge")
@pytest.mark.parametrize("seam", SEAMS, ids=key)
def test_the_record_is_that_of_the_folder(seam: Seam) -> None:
    folder = Path(FOLDER)
    assert parameters(seam, folder) == recorded(version_of(folder))[key(seam)]


@pytest.fixture(params=VERSIONS)
def moved(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Put modules with the recorded seams of a release in megatron-bridge's place; give that of the training loop."""
    for seam in SEAMS:
        module = sys.modules.get(seam.module)
        if module is None or not hasattr(module, "is_stand_in"):
            module = types.ModuleType(seam.module)
            module.is_stand_in = True  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, seam.module, module)
        owner: Any = module
        *path, name = seam.name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, types.SimpleNamespace())
            owner = getattr(owner, part)
        setattr(owner, name, eval(f"lambda {', '.join(recorded(request.param)[key(seam)])}: None"))
    return sys.modules[seams.TRAINING]


def test_a_release_whose_seams_are_the_recorded_ones_is_accepted(moved: Any) -> None:
    seams.check()


def test_a_seam_that_is_gone_or_has_moved_is_refused_by_its_name(moved: Any) -> None:
    del moved.evaluate_and_print_results
    moved.train_step = lambda forward_step_func, data_iterator: None
    with pytest.raises(SeamDiffers, match="train_step: has the parameters") as raised:
        seams.check()
    assert set(raised.value.seams) == {"train_step", "evaluate_and_print_results"}
    assert "this megatron-bridge is not as 0.3.1 are" in str(raised.value)
