"""The rank process of a task that restarts whole (``loop: restart``): it is to a script what torchrun's agent is.

In each generation the process starts the script with torchrun's variables. A hold ends the script, whatever it does,
and the next generation starts it again, on all workers. The script goes on from its own checkpoint. So nothing of the
state passes through here, and this process outlives the faults of its peers.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from unicron import device
from unicron.errors import InvalidSpec
from unicron.link import agent_link, reporting
from unicron.link.agent_link import DRAIN, NOTHING, AgentLink
from unicron.link.torchrun import standalone_generation, variables_of
from unicron.process.processes import leaves_sigterm
from unicron.protocol import environment
from unicron.protocol.messages import Checkpointed, Configure, Finished, Inject, Raised, Resumed, Stopped
from unicron.trainer.spec import Spec
from unicron.whole_restart.megatron_output import Report, SavedStep, read_report, save_folder, saved_step
from unicron.whole_restart.script_ends import ScriptEnd, read_end
from unicron.whole_restart.script_process import ScriptProcess

HOLD_GRACE_S = 2.0
"""How long a script may take to end once a peer is lost. Chosen: enough to flush a log; a checkpoint of it would wait
for the lost peer."""

STOP_GRACE_S = 240.0
"""How long a script may take to end on SIGTERM where no fault has struck, so that it can save. It is one minute less
than the default of ``resume_timeout_s``, which is how long a stop is waited for."""

REQUEST_S = 30.0
"""How long the request to stop may take where SIGTERM has gone to the program that asks for it and to the script at
once. It takes a second, and more where NATS has ended as well and is started again."""

SIGTERM_S = 3.0
"""How long SIGTERM may take to come to all processes of a run: a script may find that it has lost a peer before SIGTERM
reaches it. Microseconds pass between two of them, and some tenths of a second where whoever sends them has to wait for
a processor. A hold ends the wait, so only a peer that is lost without the end of a process is reported late."""

LOOK_S = 1.0
"""Pause between two looks at the steps that peers have reported and at the checkpoints: short beside steps of a second
or more."""

LOOK_AT_END_S = 0.1
"""Pause between two looks whether the scripts of all ranks have ended."""

KILL = "kill"
"""The one kind of injected fault (``unicron.process.faults``) that needs nothing of a script."""

_STEP, _ENDED, _ALL_ENDED = "script/step", "script/ended", "script/all-ended"
"""Keys in the generation's store: the newest report; the number of scripts that have ended with 0, and whether all
have."""

_OWN = (environment.SOCKET, environment.SPEC, environment.TASK, environment.WORKER, environment.MEMORY)
"""Variables of this process that the script does not get: with them the library would take it for a rank."""


def run(task: Spec) -> NoReturn:
    """Run a task's script through all generations of this process, which then ends.

    Raises:
        InvalidSpec: its interpreter is not on this node.
        OSError: the agent cannot be reached, or the script cannot be started.
    """
    if task.python and shutil.which(task.python) is None:
        raise InvalidSpec(f"python: {task.python} is no program on this node")
    _Rank(agent_link.from_environment(standalone_generation("")), task).run()


class _Rank:
    """One process through the generations of its task."""

    def __init__(self, link: AgentLink, task: Spec) -> None:
        self._link, self._task = link, task
        self._folder = save_folder(task.arguments)
        self._step = 0
        """The newest known of the updates; the script may be farther."""
        self._report: Report | None = None
        """The newest report in the output of this process's script that has not been passed on."""
        self._saved: SavedStep | None = None
        self._terminated = False
        """Whether this process has got SIGTERM, which a program above answers."""
        self._leaves_sigterm = leaves_sigterm()
        if self._leaves_sigterm:
            signal.signal(signal.SIGTERM, self._note_sigterm)
        link.on_inject = _inject

    def run(self) -> NoReturn:
        drained = False
        while True:
            configure = self._link.next_generation(self._step, drained=drained)
            try:
                drained = self._generation(configure)
            except RuntimeError as error:
                if not reporting.is_communication(error):
                    raise
                reporting.report(self._link, error, step=self._step)  # the store's node is lost, and a hold will follow
                drained = False

    def _generation(self, configure: Configure) -> bool:
        """Run the script until this generation ends; return whether it does because the agent drains it."""
        self._report, self._saved = None, saved_step(self._folder)
        self._step = self._saved.step if self._saved is not None else 0
        store = _store(configure)
        script = ScriptProcess(
            _command(self._task), _variables(self._task, configure), on_line=self._read, on_end=self._link.wake
        )
        self._resumed(configure)
        arrived = False
        while True:
            self._link.wait_for_request(*((LOOK_AT_END_S, _never) if arrived else (LOOK_S, script.has_ended)))
            if self._link.is_held():
                script.end(HOLD_GRACE_S)
                return False
            if (request := self._link.request) != NOTHING:
                script.end(STOP_GRACE_S, self._link.is_held)
                self._look(configure, store)
                if request == DRAIN:
                    return True
                self._stop(configure)
            if script.has_ended() and self._awaited_stop(script):
                continue
            self._look(configure, store)
            if script.code:
                self._failed(script, script.code)
                return False
            if script.code == 0 and not arrived:
                arrived = True
                script.end(HOLD_GRACE_S)  # processes that the script has left behind
                _arrive(store, configure.world_size)
            if arrived and _have_all_ended(store):
                self._look(configure, store)  # the reports that the last script made before it ended
                self._finish(configure)

    def _note_sigterm(self, *_: object) -> None:
        self._terminated = True

    def _awaited_stop(self, script: ScriptProcess) -> bool:
        """Wait for the stop of the task if SIGTERM has ended scripts before it; return whether to look again."""
        if self._leaves_sigterm and script.code == -signal.SIGTERM:
            self._terminated = True
        elif self._leaves_sigterm and script.code and self._blames_peer(script, script.code):
            until_s = time.monotonic() + SIGTERM_S
            while not (self._terminated or self._is_asked()) and time.monotonic() < until_s:
                self._link.wait_for_request(LOOK_AT_END_S, _never)
        if not self._terminated:
            return self._link.request != NOTHING
        self._terminated = self._leaves_sigterm = False  # it is waited for once
        self._link.wait_for_request(REQUEST_S, _never)
        return True

    def _is_asked(self) -> bool:
        return self._link.is_held() or self._link.request != NOTHING

    def _end_of(self, script: ScriptProcess, code: int) -> ScriptEnd | None:
        return read_end(code, script.tail, first=self._link.generation == 1 and self._step == 0)

    def _blames_peer(self, script: ScriptProcess, code: int) -> bool:
        end = self._end_of(script, code)
        return end is not None and end.kind == "communication"

    def _resumed(self, configure: Configure) -> None:
        self._link.progress(self._step, "script")
        reporting.report_resumed(
            self._link,
            Resumed(
                generation=configure.generation,
                step=self._step,
                source="script",
                steps_recomputed=max(0, configure.fault_step - self._step),
            ),
        )
        self._send_saved(configure)

    def _read(self, line: str) -> None:
        """Take a line of output, on a thread of its own."""
        if (report := read_report(line)) is not None:
            self._report = report

    def _look(self, configure: Configure, store: dist.Store | None) -> None:
        """Pass on what is new of steps and checkpoints. Rank 0 speaks for all; Megatron-LM prints on the last rank."""
        report, self._report = self._report, None
        try:
            if report is not None and configure.rank != 0 and store is not None:
                store.set(_STEP, json.dumps(report))
            elif report is None and configure.rank == 0 and store is not None and store.check([_STEP]):
                report = Report(*json.loads(store.get(_STEP)))
        except RuntimeError:
            return  # the options are as in ``run``
        if report is not None and report.step > self._step:
            self._step = report.step
            self._link.progress(report.step, "script", loss=report.loss, duration_s=report.step_s)
        if (saved := saved_step(self._folder)) is not None and saved != self._saved:
            self._saved = saved
            self._send_saved(configure)

    def _send_saved(self, configure: Configure) -> None:
        if self._saved is not None and configure.rank == 0:
            saved = self._saved
            self._link.send(Checkpointed(generation=configure.generation, step=saved.step, path=saved.path))

    def _failed(self, script: ScriptProcess, code: int) -> None:
        """Report the end of a script that is an error. Returns only where a peer is to blame: a hold will follow."""
        script.end(0.0)
        if (end := self._end_of(script, code)) is None:
            _end_by(-code)
        self._raise(end)
        if end.kind != "communication":
            self._link.exit(code if code > 0 else 1)

    def _raise(self, end: ScriptEnd) -> None:
        message = Raised(
            generation=self._link.generation,
            rank=self._link.rank,
            step=self._step,
            kind=end.kind,
            error=end.error,
            detail=end.detail,
            traceback=end.traceback,
        )
        self._link.send(message)

    def _stop(self, configure: Configure) -> NoReturn:
        path = self._saved.path if self._saved is not None else ""
        step = self._saved.step if self._saved is not None else self._step
        self._link.send(Stopped(generation=configure.generation, rank=configure.rank, step=step, path=path))
        self._link.exit(0)

    def _finish(self, configure: Configure) -> NoReturn:
        self._link.send(Finished(generation=configure.generation, rank=configure.rank, step=self._step))
        self._link.exit(0)


def _inject(message: Inject) -> None:
    """Have a requested fault happen: a script without the library can only have its process killed."""
    if message.kind == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"unicron: a script that restarts whole knows no fault {message.kind!r}, only {KILL!r}", flush=True)


def _command(task: Spec) -> list[str]:
    target = ["-m", task.module] if task.module else [task.script]
    return [task.python or sys.executable, "-u", *target, *task.arguments]  # -u: its lines come when it prints them


def _variables(task: Spec, configure: Configure) -> dict[str, str]:
    """Return the environment of the script: torchrun's, which has it meet in the store that there is already."""
    found = {name: value for name, value in os.environ.items() if name not in _OWN}
    found |= variables_of(configure, one_device=device.is_cuda())
    found |= {
        "ROLE_NAME": "default",
        "ROLE_RANK": str(configure.rank),
        "ROLE_WORLD_SIZE": str(configure.world_size),
        environment.TORCHRUN_ID: task.name,
        "TORCHELASTIC_RESTART_COUNT": str(configure.generation - 1),
        "TORCHELASTIC_USE_AGENT_STORE": str(bool(configure.store_port)),
    }
    if not configure.store_port:
        found |= {environment.MASTER_ADDR: "127.0.0.1", environment.MASTER_PORT: str(_free_port())}
    if task.module:
        above = len(task.module.split(".")) - (not task.script.endswith("/__main__.py"))
        folder = str(Path(task.script).resolve().parents[above])
        found["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, found.get("PYTHONPATH", ""))))
    return found


def _never() -> bool:
    return False


def _free_port() -> int:
    """Return a port that is free now, for a script that is alone and opens a store of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _store(configure: Configure) -> dist.Store | None:
    if not configure.store_port:
        return None
    limit = datetime.timedelta(seconds=environment.number(environment.JOIN_TIMEOUT_S))
    return dist.TCPStore(
        configure.store_host, configure.store_port, is_master=False, wait_for_workers=False, timeout=limit
    )


def _arrive(store: dist.Store | None, world_size: int) -> None:
    """Say that this rank's script has ended with 0."""
    if store is not None and store.add(_ENDED, 1) == world_size:
        store.set(_ALL_ENDED, "1")


def _have_all_ended(store: dist.Store | None) -> bool:
    return store is None or bool(store.check([_ALL_ENDED]))


def _end_by(number: int) -> NoReturn:
    """End this process by the signal that has ended its script, so that the agent reports that."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of the script would be of use, not this one's
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pause()
    raise AssertionError("unreachable: the signal ends the process")
