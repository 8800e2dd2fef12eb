"""How fast training goes on after a fault in mid-step: Unicron, torchrun and torchft, in turns in one run.

    .venv/bin/python -m benchmarks.recovery [--rounds 5] [--ranks 3] [--systems unicron torchrun torchft]

The same small GPT (4 layers, hidden size 128, sequence length 128) on the same machine, one process a rank; a rank is
killed (``kill``: SIGKILL), stopped (``hang``: SIGSTOP) or raises (``exception``) before the second of its micro-batches
of step 17. Times come from notes that the training processes write (``benchmarks/peers``): from just before the
fault to a step's completion on any rank. The peers come from the package index, in virtual environments of their own.

JSON lines on stdout: one for each run, then the medians of each system and fault, the ratios within this run and the
bounds. Exit status 0 if all bounds hold. The bounds on Unicron's times are requirements of the project; those on the
ratios are what the README's comparison claims at least.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.peers.systems import RESULT, System, Torchft, Torchrun, Unicron, environment_of, version_of
from benchmarks.report import Report, at_least, run
from cli.demo.report import compare_parameters
from cli.stack.processes import run_module
from cli.waiting import Record

SYSTEMS = ("unicron", "torchrun", "torchft")
PACKAGES = {"torchrun": "torch", "torchft": "torchft-nightly"}
FAULTS = ("kill", "exception", "hang")
FURTHER_HANGS = ("sleep", "absent", "deadlock", "spin")
"""Hangs that the kernel does not report; ``absent``: asleep where all others have entered the collective."""

NO_FAULT = "none"

FAULT_STEP = 17
"""A step between the peers' checkpoints at steps 10 and 20."""

UNCHANGED = 1e-4
"""Largest difference of a parameter from the run without failures: sums in another order differ by about 1e-6 a step,
a dropped sample by more than a hundred times as much (the learning rate is 1e-3)."""

RESUME_S = 0.5
"""Required: the interrupted step ends within this and one step."""

FULL_STRENGTH_S = 2.0
"""Required: all ranks train again within this."""

PEER_RATIOS = {"torchrun": 10.0, "torchft": 2.0}
"""Required: how many times longer a peer takes to the end of the interrupted step."""

DETECTION_STEPS = 10.0
"""Required: a hang is detected within "a small multiple of the step time", for which this number of steps stands."""


def specification(ranks: int, steps: int, corpus: Path) -> Record:
    """Return the job: two micro-batches of one sample for each rank."""
    return {
        "name": "recovery",
        "model": {"layers": 4, "hidden": 128, "heads": 4, "sequence_length": 128},
        "batch": {"global": 2 * ranks, "micro": 1},
        "steps": steps,
        "data": str(corpus),
        "checkpoint": {"every": 10_000},
        "seed": 1,
    }


def figures(notes: list[Record], ranks: int) -> Record:
    """Return the times and counts of one run from what its processes noted."""
    done = sorted((n for n in notes if n["what"] == "done"), key=lambda n: n["at"])
    # A rank that is restarted after all others have ended trains by itself, from the beginning.
    last = max(n["step"] for n in done)
    ended_at = next(n["at"] for n in done if n["step"] == last)
    done = [n for n in done if n["at"] <= ended_at]
    firsts = list({n["step"]: n["at"] for n in reversed(done)}.items())
    fault = _first(notes, lambda n: n["what"] == "fault")
    if fault is None:
        return {"steps_done": len({n["step"] for n in done}), "step_s": _step_s(firsts, None)}
    at, step = fault["at"], fault["step"]
    reached = {n["pid"]: n["step"] for n in done if n["at"] <= at}
    # A peer may note the step before the interrupted one a moment later than the rank that has begun the next.
    after = [n for n in done if n["at"] > at and not reached.get(n["pid"], step) < n["step"] < step]
    peers = reached.keys() - {fault["pid"]}
    end = _first(after, lambda n: n["step"] >= step)
    going_on = {n["pid"] for n in after if n["step"] >= step}
    return {
        "step_s": _step_s(firsts, at),
        "to_first_step_s": _since(at, _first(after, lambda n: True)),
        "to_interrupted_step_s": _since(at, end),
        "to_full_strength_s": _since(at, _first(after, lambda n: n["ranks"] == ranks)),
        "steps_recomputed": len({n["step"] for n in after if n["step"] < step}),
        "survivors_kept": peers <= going_on,
    }


def _first(notes: list[Record], holds: Callable[[Record], bool]) -> Record | None:
    return next((n for n in notes if holds(n)), None)


def _since(at: float, note: Record | None) -> float | None:
    return None if note is None else round(note["at"] - at, 3)


def _step_s(firsts: list[tuple[int, float]], before: float | None) -> float | None:
    times = sorted(at for _, at in firsts if before is None or at < before)
    # The first steps allocate and connect.
    gaps = [b - a for a, b in itertools.pairwise(times[2:])]
    return round(statistics.median(gaps), 4) if gaps else None


def detection_s(account: Record, notes: list[Record]) -> float | None:
    """Return the time from the fault to Unicron's incident in seconds, if there is one."""
    faults = [n["at"] for n in notes if n["what"] == "fault"]
    if not faults or not account.get("incidents"):
        return None
    detected_at = datetime.fromisoformat(account["incidents"][0]["detected_at"]).timestamp()
    return float(round(detected_at - faults[0], 3))


def prepare(folder: Path, document: Record) -> None:
    """Make the folder of a run."""
    folder.mkdir()
    (folder / "spec.json").write_text(json.dumps(document))


def noted(folder: Path) -> list[Record]:
    """Return what the processes of a run noted."""
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


async def measure(system: System, folder: Path, document: Record, fault: str, ranks: int, rank: int) -> Record:
    """Run the job once."""
    prepare(folder, document)
    account = await system.run(folder, "" if fault == NO_FAULT else f"{rank}:{FAULT_STEP}:{fault}")
    notes = noted(folder)
    row: Record = {"system": system.name, "fault": fault, "rank": rank, **figures(notes, ranks)}
    row["to_detection_s"] = detection_s(account, notes)
    row["ended"] = (folder / RESULT).exists()
    return row | {"said": account}


def medians(rows: list[Record]) -> list[Record]:
    """Return one row for each system and fault."""
    found = []
    for system, fault in dict.fromkeys((r["system"], r["fault"]) for r in rows):
        of = [r for r in rows if (r["system"], r["fault"]) == (system, fault)]
        row: Record = {"system": system, "fault": fault, "runs": len(of)}
        for name in [k for k in of[0] if k.startswith("to_") or k in ("step_s", "steps_recomputed", "difference")]:
            values = [r[name] for r in of if r[name] is not None]
            # Half of the runs must have got there.
            row[name] = round(statistics.median(values), 7) if len(values) > len(of) / 2 else None
        for name in ("survivors_kept", "unchanged", "ended"):
            row[name] = all(r[name] for r in of)
        found.append(row)
    return found


def ratios(rows: list[Record]) -> list[Record]:
    """Return how many times longer the peers take to the end of the interrupted step."""
    at = {(r["system"], r["fault"]): r["to_interrupted_step_s"] for r in rows}
    found = []
    for fault in dict.fromkeys(r["fault"] for r in rows if r["system"] == "unicron"):
        ours = at["unicron", fault]
        for peer in [s for s in SYSTEMS if s != "unicron" and (s, fault) in at]:
            theirs = at[peer, fault]
            ratio = round(theirs / ours, 1) if ours and theirs else None
            found.append({"fault": fault, "peer": peer, "peer_over_unicron": ratio})
    return found


def judge(rows: list[Record], compared: list[Record], report: Report) -> None:
    """Print the bounds on Unicron's medians and on the ratios."""
    for row in (r for r in rows if r["system"] == "unicron"):
        fault, step_s = row["fault"], row["step_s"] or 0.0
        detection = 0.0
        if fault in ("hang", *FURTHER_HANGS):
            # The other times include the detection, which has a bound of its own.
            detection = row["to_detection_s"] or 0.0
            report.at_most(f"{fault}: detected (s)", row["to_detection_s"], round(DETECTION_STEPS * step_s, 3))
        limit = round(detection + RESUME_S + step_s, 3)
        report.at_most(f"{fault}: interrupted step done (s)", row["to_interrupted_step_s"], limit)
        report.at_most(f"{fault}: full strength (s)", row["to_full_strength_s"], round(detection + FULL_STRENGTH_S, 3))
        report.equal(f"{fault}: steps recomputed", row["steps_recomputed"], 0)
        for name in ("survivors_kept", "unchanged", "ended"):
            report.equal(f"{fault}: {name}", row[name], True)
    for row in compared:
        ratio = row["peer_over_unicron"]
        if ratio is None:
            continue  # a peer that never ends the step is infinitely slower
        report.at_least(f"{row['fault']}: times faster than {row['peer']}", ratio, PEER_RATIOS[row["peer"]])


def systems(options: argparse.Namespace, folder: Path, report: Report) -> list[System]:
    """Return the systems of the command line; one that cannot be installed is named and left out."""
    found: list[System] = []
    for name in options.systems:
        if name == "unicron":
            found.append(Unicron(options.ranks, folder))
            continue
        package = PACKAGES[name]
        try:
            python = Path(sys.executable) if package == "torch" else environment_of(package, options.cache)
            report.line("system", system=name, package=package, version=version_of(python, package))
        except subprocess.CalledProcessError as err:
            report.line("left-out", system=name, package=package, reason=(err.stderr or str(err))[-500:])
            continue
        found.append(Torchrun(options.ranks, python) if name == "torchrun" else Torchft(options.ranks, python))
    return found


async def course(options: argparse.Namespace, folder: Path, report: Report) -> None:
    """Measure and print."""
    corpus = folder / "corpus.txt"
    await run_module("unicron.trainer.corpus", str(corpus))
    document = specification(options.ranks, options.steps, corpus)
    rows: list[Record] = []
    taking_part = systems(options, folder, report)
    async with AsyncExitStack() as running:
        for system in taking_part:
            running.push_async_callback(system.stop)
            await system.start()
        for number in range(options.rounds):
            # Each round begins with another system, so that slow changes of the machine hit all alike.
            turn = number % len(taking_part)
            for fault in options.faults:
                for system in taking_part[turn:] + taking_part[:turn]:
                    rows.append(await one_run(system, fault, number, options.ranks, folder, document, report))
                    report.line("run", round=number, **rows[-1])
    summary = medians(rows)
    compared = ratios(summary)
    for row in summary:
        report.line("median", **row)
    for row in compared:
        report.line("ratio", **row)
    judge(summary, compared, report)


async def one_run(
    system: System, fault: str, number: int, ranks: int, folder: Path, document: Record, report: Report
) -> Record:
    """Run the job with a fault; compare the result with the system's run without failures, which comes first."""
    reference = folder / f"{system.name}-{NO_FAULT}"
    if not reference.exists():
        report.line("failure-free", **await measure(system, reference, document, NO_FAULT, ranks, 0))
    run_folder = folder / f"{system.name}-{fault}-{number}"
    row = await measure(system, run_folder, document, fault, ranks, 1 + number % (ranks - 1))
    row["difference"] = compare_parameters(run_folder / RESULT, reference / RESULT) if row["ended"] else None
    row["unchanged"] = row["difference"] is not None and row["difference"] <= UNCHANGED
    return row


async def in_folder(options: argparse.Namespace, report: Report) -> None:
    """Measure in a folder that stays, if the command line names one, else in a temporary one."""
    with tempfile.TemporaryDirectory(prefix="unicron-recovery-") as temporary:
        folder = options.folder or Path(temporary) / "runs"
        folder.mkdir(parents=True)
        await course(options, folder.resolve(), report)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--ranks", type=at_least(2, "one survives"), default=3)
    parser.add_argument(
        "--steps",
        type=at_least(FAULT_STEP + 1, f"the fault is in step {FAULT_STEP}"),
        default=150,
        help="of each run; a restarted rank must join before the end",
    )
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--faults", nargs="+", choices=(*FAULTS, *FURTHER_HANGS), default=list(FAULTS))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "unicron-benchmarks")
    parser.add_argument("--folder", type=Path, help="folder for what the runs write, which stays; it must not exist")
    options = parser.parse_args()
    return run(partial(in_folder, options))


if __name__ == "__main__":
    sys.exit(main())
