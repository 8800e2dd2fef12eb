"""How fast training goes on after a fault in mid-step: ours, torchrun and torchft, interleaved in one run.

    .venv/bin/python -m benchmarks.recovery [--rounds 5] [--ranks 3] [--systems unicron torchrun torchft]

The same small GPT (4 layers, hidden size 128, sequence length 128) on the same machine, one process a rank; a rank is
killed (``kill``: SIGKILL), stopped (``hang``: SIGSTOP) or raises (``exception``) before the second of its micro-batches
of step 17. Times come from notes that the training processes write (``benchmarks/peers``): from the moment before the
fault to a step's completion on any rank. The peers come from the package index, in virtual environments of their own.

JSON lines on stdout: one for each run, then the medians of each system and fault, the ratios within this run and the
requirements with whether they hold. Exit status 0 if all hold.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.systems import RESULT, System, Torchft, Torchrun, Unicron, environment_of, version_of
from cli.demo_report import compare_parameters

Record = dict[str, Any]

SYSTEMS = ("unicron", "torchrun", "torchft")
PACKAGES = {"torchrun": "torch", "torchft": "torchft-nightly"}
FAULTS = ("kill", "exception", "hang")
FURTHER_HANGS = ("sleep", "absent", "deadlock", "spin")
"""Hangs of which the kernel says nothing; ``absent``: asleep where all others have entered the collective."""

NO_FAULT = "none"

FAULT_STEP = 17
"""Behind a checkpoint at step 10 and in the middle between two."""

UNCHANGED = 1e-4
"""Largest difference of a parameter from the run without failures: sums in another order differ by about 1e-6 a step,
a dropped sample by more than a hundred times as much (the learning rate is 1e-3)."""

RESUME_S = 0.5
"""Required: the interrupted step ends within this and one step."""

FULL_STRENGTH_S = 2.0
"""Required: all ranks train again within this."""

TORCHRUN_RATIO = 10.0
TORCHFT_RATIO = 2.0

DETECTION_STEPS = 10.0
"""What is taken for "a small multiple of the step time" when a hang's detection is judged."""


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


def detection_s(said: Record, notes: list[Record]) -> float | None:
    """Return how long after the fault our own incident was opened, if there is one."""
    faults = [n["at"] for n in notes if n["what"] == "fault"]
    if not faults or not said.get("incidents"):
        return None
    detected_at = datetime.fromisoformat(said["incidents"][0]["detected_at"]).timestamp()
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
    said = await system.run(folder, "" if fault == NO_FAULT else f"{rank}:{FAULT_STEP}:{fault}")
    notes = noted(folder)
    row: Record = {"system": system.name, "fault": fault, "rank": rank, **figures(notes, ranks)}
    row["to_detection_s"] = detection_s(said, notes)
    row["ended"] = (folder / RESULT).exists()
    return row | {"said": said}


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


def requirements(rows: list[Record], compared: list[Record]) -> list[Record]:
    """Return what is asked of us, with whether it holds."""
    found: list[Record] = []

    def require(what: str, value: Any, holds: bool) -> None:
        found.append({"what": what, "value": value, "holds": holds})

    for row in (r for r in rows if r["system"] == "unicron"):
        fault, step_s = row["fault"], row["step_s"] or 0.0
        hangs = fault in ("hang", *FURTHER_HANGS)
        detection = row["to_detection_s"] or 0.0 if hangs else 0.0
        if hangs:
            limit = DETECTION_STEPS * step_s
            require(f"{fault}: detected within {DETECTION_STEPS:.0f} steps", detection, detection <= limit)
        resumed, full = row["to_interrupted_step_s"], row["to_full_strength_s"]
        limit = round(detection + RESUME_S + step_s, 3)
        require(f"{fault}: interrupted step done in {limit} s", resumed, resumed is not None and resumed <= limit)
        limit = round(detection + FULL_STRENGTH_S, 3)
        require(f"{fault}: full strength in {limit} s", full, full is not None and full <= limit)
        require(f"{fault}: nothing recomputed", row["steps_recomputed"], row["steps_recomputed"] == 0)
        for name in ("survivors_kept", "unchanged", "ended"):
            require(f"{fault}: {name}", row[name], row[name])
    for row in compared:
        limit = TORCHRUN_RATIO if row["peer"] == "torchrun" else TORCHFT_RATIO
        ratio = row["peer_over_unicron"]
        # A peer that never ends the step is infinitely slower.
        require(f"{row['fault']}: {limit:.0f}x {row['peer']}", ratio, ratio is None or ratio >= limit)
    return found


def say(line: str, record: Record) -> None:
    """Print one JSON line."""
    print(json.dumps({"line": line, **record}), flush=True)


def systems(options: argparse.Namespace, folder: Path) -> list[System]:
    """Return the systems asked for; one that cannot be installed is named and left out."""
    found: list[System] = []
    for name in options.systems:
        if name == "unicron":
            found.append(Unicron(options.ranks, folder))
            continue
        package = PACKAGES[name]
        try:
            python = Path(sys.executable) if package == "torch" else environment_of(package, options.cache)
            say("system", {"system": name, "package": package, "version": version_of(python, package)})
        except subprocess.CalledProcessError as err:
            say("left-out", {"system": name, "package": package, "reason": (err.stderr or str(err))[-500:]})
            continue
        found.append(Torchrun(options.ranks, python) if name == "torchrun" else Torchft(options.ranks, python))
    return found


async def course(options: argparse.Namespace, folder: Path, corpus: Path) -> bool:
    """Measure and print; return whether every requirement holds."""
    document = specification(options.ranks, options.steps, corpus)
    rows: list[Record] = []
    taking_part = systems(options, folder)
    started: list[System] = []
    try:
        for system in taking_part:
            started.append(system)
            await system.start()
        for number in range(options.rounds):
            # Another one begins in each round, so that what changes slowly on the machine hits all alike.
            turn = number % len(taking_part)
            for fault in options.faults:
                for system in taking_part[turn:] + taking_part[:turn]:
                    reference = folder / f"{system.name}-{NO_FAULT}"
                    if not reference.exists():
                        say("failure-free", await measure(system, reference, document, NO_FAULT, options.ranks, 0))
                    rank = 1 + number % (options.ranks - 1)
                    run_folder = folder / f"{system.name}-{fault}-{number}"
                    row = await measure(system, run_folder, document, fault, options.ranks, rank)
                    if row["ended"]:
                        row["difference"] = compare_parameters(run_folder / RESULT, reference / RESULT)
                    row.setdefault("difference", None)
                    row["unchanged"] = row["difference"] is not None and row["difference"] <= UNCHANGED
                    say("run", {"round": number, **row})
                    rows.append(row)
    finally:
        for system in reversed(started):
            await system.stop()
    summary = medians(rows)
    compared = ratios(summary)
    judged = requirements(summary, compared)
    for line, records in (("median", summary), ("ratio", compared), ("requirement", judged)):
        for record in records:
            say(line, record)
    return all(record["holds"] for record in judged)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="benchmarks.recovery", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of each run; a restarted rank must join before the end")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--faults", nargs="+", choices=(*FAULTS, *FURTHER_HANGS), default=list(FAULTS))
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "unicron-benchmarks")
    parser.add_argument("--folder", type=Path, help="keeps what the runs write; it must not exist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="unicron-recovery-") as temporary:
        folder = options.folder or Path(temporary) / "runs"
        folder.mkdir(parents=True)
        corpus = folder.resolve() / "corpus.txt"
        subprocess.run([sys.executable, "-P", "-m", "unicron.corpus", str(corpus)], check=True)
        return 0 if asyncio.run(course(options, folder.resolve(), corpus)) else 1


if __name__ == "__main__":
    sys.exit(main())
