"""The command line: ``python -m unicron.bridge [--fields FILE] SCRIPT ARGS...``, or ``-m MODULE ARGS...``."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from unicron.bridge.fields import writing
from unicron.bridge.script import replace_pretrain
from unicron.megatron_lm.__main__ import main
from unicron.megatron_lm.script import run_script

if __name__ == "__main__":
    given, replace = sys.argv[1:], replace_pretrain
    if given[:1] == ["--fields"]:
        file, *given = given[1:] or [""]
        replace = functools.partial(replace_pretrain, writing(Path(file).resolve()))
    main(given, functools.partial(run_script, replace=replace), "unicron.bridge")
