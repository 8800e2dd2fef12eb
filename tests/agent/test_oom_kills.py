"""Processes that the kernel ends for memory, told from those that somebody kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.agent.machine.oom_kills import RECENT_S, OomKills, counter_of, own_counter
from shared.clock import PROCESS_CLOCK, SteadyClock

GROUPS = Path("/sys/fs/cgroup/memory")
"""Version 1 of the controller, where this machine has it."""
LIMIT_BYTES = 64 << 20

KILLED = -signal.SIGKILL

V1 = """4:memory:/agents/n0
3:cpuset:/
0::/
"""
V2 = "0::/system.slice/unicron-agent.service\n"
V1_EVENTS = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_EVENTS = "low 0\nhigh 0\nmax 57\noom 3\noom_kill {}\noom_group_kill 0\n"
"""As a kernel 6.18 writes them."""


class SetClock(SteadyClock):
    """A clock that a test sets."""

    now_s = 100.0

    def seconds(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("membership", "place", "events"),
    [
        (V1, "memory/agents/n0/memory.oom_control", V1_EVENTS),
        (V1, "memory/memory.oom_control", V1_EVENTS),  # of a container that sees its own group alone
        (V2, "system.slice/unicron-agent.service/memory.events", V2_EVENTS),
        (V2, "memory.events", V2_EVENTS),
        ("4:cpu,memory:/agents/n0\n", "memory/agents/n0/memory.oom_control", V1_EVENTS),
    ],
)
def test_an_end_is_the_kernels_while_its_count_has_just_risen(
    tmp_path: Path, membership: str, place: str, events: str
) -> None:
    counter = tmp_path / place
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(events.format(2))
    assert counter_of(membership, tmp_path) == counter
    clock = SetClock()
    kills = OomKills(clock, counter)
    assert not kills.explain(KILLED)
    counter.write_text(events.format(3))
    assert not kills.explain(1)
    assert kills.explain(KILLED)
    clock.now_s += RECENT_S
    assert kills.explain(KILLED)
    clock.now_s += 0.1
    assert not kills.explain(KILLED)
    counter.unlink()
    assert not kills.explain(KILLED)


@pytest.mark.parametrize("membership", ["", "no such text", V1, V2])
def test_a_machine_without_the_count_has_none(tmp_path: Path, membership: str) -> None:
    assert counter_of(membership, tmp_path) is None
    assert not OomKills(SetClock(), None).explain(KILLED)


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a limit of memory; this test's machine may have none that a test can make."""
    made = GROUPS / f"unicron-test-{uuid.uuid4().hex}"
    try:
        made.mkdir()
        (made / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as err:
        pytest.skip(f"no control group of version 1 can be made: {err}")
    yield made
    made.rmdir()


@pytest.mark.timeout(60)
def test_the_kernel_counts_what_it_ends(group: Path) -> None:
    counter = group / "memory.oom_control"
    kills = OomKills(PROCESS_CLOCK, counter)
    eats = f"x = bytearray({4 * LIMIT_BYTES}); x[::4096] = b'1' * len(x[::4096])"
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()));"
    shows = "from services.agent.machine.oom_kills import own_counter; print(own_counter(), flush=True);"
    done = subprocess.run([sys.executable, "-c", enter + shows + eats], capture_output=True, text=True)
    assert done.returncode == KILLED
    assert done.stdout.strip() == str(counter)
    assert kills.explain(done.returncode)


def test_this_process_finds_a_count_or_none() -> None:
    found = own_counter()
    assert found is None or os.access(found, os.R_OK)
