"""How many descriptors, threads and ports ranks may have, and what they need."""

from __future__ import annotations

import json
import subprocess
import sys

from shared.machine.process_limits import OPEN_FILES, PORTS, THREADS_PER_WORKER, ProcessLimits, judged, of_this_process

RAISED = """
import json, resource
from shared.machine.process_limits import of_this_process, raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4000))
raise_open_files()
print(json.dumps([of_this_process().open_files, resource.getrlimit(resource.RLIMIT_NOFILE)]))
"""


def test_what_is_enough_needs_nothing_and_what_is_not_known_neither() -> None:
    enough = ProcessLimits(OPEN_FILES, 3 * THREADS_PER_WORKER, PORTS)
    assert [found.advice for found in judged(enough, 2)] == ["", "", ""]
    assert [found.what for found in judged(ProcessLimits(None, None, None), 2)] == ["no limit is known"] * 3


def test_each_limit_that_is_short_is_named_with_what_is_needed() -> None:
    found = {one.resource: one for one in judged(ProcessLimits(128, 500, 1000), 2)}
    assert found["open files"].what == "128 at most, and ranks may need 4096"
    assert found["threads"].what == "500 at most, and ranks may need 768"
    assert found["ports"].what == "1000 at most, and ranks may need 4096"
    assert all(one.advice for one in found.values())


def test_an_agent_raises_its_soft_limit_as_far_as_it_may() -> None:
    run = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(run.stdout) == [4000, [4000, 4000]]


def test_the_limits_of_a_process_are_read() -> None:
    limits = of_this_process()
    assert limits.open_files is None or limits.open_files > 0
    assert limits.ports is None or limits.ports > 0
