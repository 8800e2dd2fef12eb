"""The end of a process is known for certain, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys

from shared.machine.process_names import is_here, is_known_to_have_ended, process_name, shown
from tests.condition import until_blocking


def test_the_end_of_a_process_is_noticed_from_beside_it() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = process_name(process.pid)
    host, pid, where, start = name.split("/")
    assert shown(name) == f"process {process.pid} on {host}"
    assert is_here(name)
    assert not is_known_to_have_ended(name)
    assert is_known_to_have_ended("/".join((host, pid, where, f"{start}1")))  # the pid is another process's by now
    process.kill()
    until_blocking(lambda: is_known_to_have_ended(name), "it has ended, though nobody has waited for it")
    process.communicate()
    assert is_known_to_have_ended(name)
    # On another machine, or in another container, nothing is known of it.
    assert not is_known_to_have_ended("/".join((host, pid, "elsewhere", start)))
    assert not is_known_to_have_ended("")
    assert not is_known_to_have_ended(process_name())
    assert process_name() == process_name(os.getpid())
