"""The command line: ``python -m unicron.bridge [--fields FILE] SCRIPT ARGS...``, or ``-m MODULE ARGS...``.

With ``--fields`` or ``--settings`` the script is not trained with, but asked (``unicron.bridge.fields``).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

from unicron.bridge.fields import answering, writing
from unicron.bridge.script import replace_pretrain
from unicron.megatron_lm.__main__ import main
from unicron.megatron_lm.script import run_script


def run(given: list[str], replace: functools.partial[None] | None = None) -> None:
    """Run a script, or a module, with a function in the place of its ``pretrain()``; None: the adapter."""
    main(given, functools.partial(run_script, replace=replace or replace_pretrain), "unicron.bridge")


if __name__ == "__main__":
    option, *given = sys.argv[1:] or [""]
    if option in {"--fields", "--settings"}:
        answer, *given = given or [""]
        path, has_findings = Path(answer).resolve(), option == "--settings"
        with answering(path) if has_findings else contextlib.nullcontext():
            run(given, functools.partial(replace_pretrain, writing(path, findings=has_findings)))
    else:
        run(sys.argv[1:])
