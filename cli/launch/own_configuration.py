"""The configuration of a script of megatron-bridge's, which the script alone makes: it is run up to ``pretrain()``."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.launch.check import Configuration
from shared.launch.command import Launch
from shared.launch.script import Script
from shared.launch.settings import Effect, Finding
from shared.machine.process import die_with_parent

LIMIT_S = 300.0
"""Longest wait for a script to call ``pretrain()``. megatron-bridge takes half a minute to be imported from a slow file
system, and scripts look for models and tokenizers, which they may have to download."""

_RENDEZVOUS = re.compile(r"(MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|TORCHELASTIC_\w+)")
"""Variables by which processes find each other. A rank of the library has none of them before ``pretrain()`` either."""

_ENTRY = re.compile(r"\b(pretrain|finetune)\b")


def names_pretrain(script: Script) -> bool:
    """Return whether a script's text names an entry of megatron-bridge's; another one would be run to its end."""
    return _ENTRY.search(script.text) is not None


def own_configuration(
    launch: Launch, script: Script, environment: Mapping[str, str], interpreter: str
) -> Configuration:
    """Return what a script gives to its ``pretrain()``, where it is ended; or why that is not known.

    Args:
        launch: the command line.
        script: its script.
        environment: the variables of this process.
        interpreter: a Python that has the library and megatron-bridge.
    """
    target = ["-m", launch.module] if launch.module else [str(script.path)]
    around = {**environment, **launch.environment}
    with tempfile.TemporaryDirectory(prefix="unicron-") as folder:
        answer = Path(folder, "answer.json")
        asked = [interpreter, "-P", "-m", "unicron.bridge", "--settings", str(answer)]
        problem = _run(
            [*asked, *target, *launch.arguments],
            {name: value for name, value in around.items() if not _RENDEZVOUS.fullmatch(name)},
            Path(folder, "output"),
        )
        try:
            return _read(json.loads(answer.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError):
            return Configuration(problem=problem)


def _run(command: list[str], environment: Mapping[str, str], output: Path) -> str:
    """Run a command and end whatever it has started; return why there may be no answer."""
    with output.open("wb") as file:
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, signal.SIGKILL, os.getpid()),
            )
        except OSError as err:
            return f"{command[0]} does not start: {err.strerror}"
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"it has not come to pretrain() within {LIMIT_S:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"it ends with {code} before pretrain(): {lines[-1] if lines else 'it prints nothing'}"


def _read(answer: Mapping[str, Any]) -> Configuration:
    """Return what the library has written of a script.

    Raises:
        KeyError, TypeError, ValueError: it has written something else.
    """
    if "problem" in answer:
        return Configuration(problem=answer["problem"])
    findings = (Finding(**one | {"what": Effect(one["what"])}) for one in answer["settings"])
    return Configuration(findings=tuple(findings), task=answer["task"] or {})
