"""Megatron-LM's own parser, asked in a process of its own: this one has no torch, and a fork may do anything there."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.launch.arguments import Arguments, read_arguments
from shared.launch.command import Launch
from shared.launch.script import Script

LIMIT_S = 120.0
"""Longest wait for the parser. Importing torch and Megatron-LM takes half a minute on a slow file system."""

_MARK = "unicron-arguments:"
"""What stands in front of the answer: modules print as they are imported."""

_PROGRAM = """
import json, sys
mark, given = sys.argv[1], json.loads(sys.argv[2])
sys.path[:0] = given["folders"]
try:
    from megatron.training import arguments
except ImportError as err:
    print(mark + json.dumps({"missing": str(err)}))
    raise SystemExit(0)
import argparse
parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
class Refused(Exception):
    pass
def error(message):
    raise Refused(message)
parser.error = error
try:
    values, unknown = parser.parse_known_args(given["arguments"])
except Refused as err:
    print(mark + json.dumps({"refused": str(err)}))
else:
    plain = {}
    for name, value in vars(values).items():
        try:
            plain[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            plain[name] = str(value)
    print(mark + json.dumps({"values": plain, "unknown": [text for text in unknown if text.startswith("--")]}))
"""
"""Reads the arguments and prints them as JSON. The parser alone: checks that follow need devices and a cluster."""


def own_arguments(launch: Launch, script: Script, environment: Mapping[str, str], interpreter: str) -> Arguments | None:
    """Return the arguments as Megatron-LM's own parser reads them; None: it cannot be imported.

    Args:
        launch: the command line.
        script: its script, in whose folder Megatron-LM may be.
        environment: the variables of this process.
        interpreter: the Python that the command line means.
    """
    folders = [] if script.path is None else [str(script.path.resolve().parent)]
    question = json.dumps({"folders": [*folders, os.getcwd()], "arguments": [*launch.arguments]})
    try:
        done = subprocess.run(
            [interpreter, "-c", _PROGRAM, _MARK, question],
            env={**environment, **launch.environment, "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return _read(done.stdout, launch.arguments)


def _read(output: str, given: Sequence[str]) -> Arguments | None:
    line = next((line for line in reversed(output.splitlines()) if line.startswith(_MARK)), "")
    answer: dict[str, Any] = json.loads(line.removeprefix(_MARK)) if line else {}
    if "refused" in answer:
        option = next((word.rstrip(":") for word in answer["refused"].split() if word.startswith("--")), "arguments")
        return Arguments(wrong={option.partition("/")[0]: answer["refused"]})
    if "values" not in answer:
        return None
    options = read_arguments(given).options
    return Arguments(values=answer["values"], options=options, unknown=answer["unknown"])


def is_here(script: Script, folders: Sequence[Path], package: str = "training") -> bool:
    """Return whether a package of ``megatron`` is beside the script or on the path."""
    beside = [] if script.path is None else [script.path.resolve().parent]
    return any((folder / "megatron" / package).is_dir() for folder in (*beside, *folders))
