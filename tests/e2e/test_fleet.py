"""``benchmarks.fleet`` with 40 nodes: however slow the machine is, nothing is lost and nobody is blamed."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from benchmarks.fleet.__main__ import measure_size
from benchmarks.report import Report

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]


@pytest.mark.short
async def test_forty_nodes_join_train_lose_a_rank_and_four_of_them_and_none_is_lost_falsely() -> None:
    output = io.StringIO()
    await measure_size(40, 8, 1, Report(output), rests=False)
    lines: list[dict[str, Any]] = [json.loads(line) for line in output.getvalue().splitlines()]
    values = {line["name"]: line["value"] for line in lines if line["line"] == "bound"}
    assert values["nodes lost falsely, 40 nodes"] == 0
    assert values["incidents without a cause, 40 nodes"] == 0
    assert values["NATS restarted: incidents, 40 nodes"] == 0
    (lost,) = (line for line in lines if line["line"] == "loss of a tenth")
    assert lost["lost"] == 4
    (ended,) = (line for line in lines if line["line"] == "exit")
    assert ended["commands"]["hold"]["nodes"] == 40
