"""How long the live page takes to open over a long log. JSON lines; exit status 1 if a bound is missed.

    .venv/bin/python -m benchmarks.page [--events 1000000] [--rounds 5] [--folder FOLDER]

The log is that of ``benchmarks.long_log``, and the service the real one (``benchmarks.history``). Each round opens the
page in a browser that knows nothing of it yet, and measures until all that the page asks for is answered and drawn: in
Debian's chromium where it and the extra ``page`` are installed, else by the same requests over HTTP, the files of the
page first and then the others at once.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import httpx

from benchmarks.history import catch_up, service
from benchmarks.long_log import write
from benchmarks.report import Report, at_least, run
from benchmarks.viewers import paths, sums
from services.api.page.assets import INDEX, assets
from tests.page.kit import chromium, missing, opened_ms

MOST_S = 1.0
_TIMEOUT_S = 60.0


async def measure(run_dir: Path, rounds: int, report: Report) -> None:
    """Start the service, and open the page."""
    async with service(run_dir, report) as (url, _):
        browser = not missing()
        opened = [await (opened_ms(url) if browser else _requested_ms(url)) for _ in range(rounds)]
    how = f"in {chromium()}" if browser else "requests alone"
    seconds = [round(found / 1000, 3) for found in opened]
    # The first one has the service load what it needs for each kind of request.
    report.below("page opened, s", max(seconds), MOST_S, first_s=seconds[0], median_s=median(seconds), how=how)


async def _requested_ms(url: str) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        began_s = time.perf_counter()
        await client.get("/")
        files = [f"/page/{name}" for name in assets() if name != INDEX]
        for asked in (files, [*paths(), *sums()]):
            for answer in await asyncio.gather(*map(client.get, asked)):
                answer.raise_for_status()
        return (time.perf_counter() - began_s) * 1000


def main() -> int:
    """Run the benchmark; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=at_least(1000), default=1_000_000)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--folder", type=Path, help="keep log and projections here, and use those that are there")
    given = parser.parse_args()

    async def whole(report: Report) -> None:
        with tempfile.TemporaryDirectory(prefix="unicron-page-") as temporary:
            run_dir = (given.folder or Path(temporary)).resolve()
            if not (run_dir / "log.db").exists():
                report.line("log", events=write(run_dir / "log.db", given.events))
            catch_up(run_dir, report)
            await measure(run_dir, given.rounds, report)

    return run(whole)


if __name__ == "__main__":
    sys.exit(main())
