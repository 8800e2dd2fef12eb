"""``unicron doctor --preflight``: what training does, measured on this machine and compared with published rates."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

import typer

from cli.options import Format
from cli.output import print_json, print_table
from services.agent.machine import hardware
from services.agent.machine.hardware import CPU, VISIBLE_VARIABLE, Devices
from services.agent.machine.preflight import measure
from shared.errors import UnicronError
from shared.preflight.judgement import Judgement, judge
from shared.text import amount

if TYPE_CHECKING:
    from shared.settings.model import Settings


def preflight(settings: Settings, output: Format) -> None:
    """Measure this machine, and print what was found. Exit status 1 if a rate is slow, or nothing was measured."""
    python = next(iter(settings.rank_interpreters), sys.executable)
    visible = os.environ.get(VISIBLE_VARIABLE)
    devices = Devices() if settings.hardware == CPU else hardware.devices(visible)
    folder = settings.run_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    measured = asyncio.run(measure(python, folder, devices))
    found = judge(measured, [])
    if output is Format.JSON:
        judged = measured.model_copy(update={"rates": found.rates})
        print_json({"verdict": found.verdict, "reason": found.reason, "measurement": judged.model_dump(mode="json")})
    else:
        print(f"{measured}: {found.verdict}")
        _show(found)
        for problem in measured.problems:
            print(problem)
    if found.verdict == "refused" or not found.rates:
        raise typer.Exit(UnicronError.exit_code)


def _show(found: Judgement) -> None:
    rows = [
        (
            rate.name,
            amount(rate.value, rate.unit),
            None if rate.bound is None else amount(rate.bound, rate.unit),
            "slow" if rate.is_slow else "ok" if rate.bound is not None else "reported",
            rate.basis,
        )
        for rate in found.rates
    ]
    print_table(("MEASURED", "RATE", "AT LEAST", "VERDICT", "FROM"), rows, empty="nothing", least=("FROM",))
