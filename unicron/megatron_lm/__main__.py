"""The command line: ``python -m unicron.megatron_lm SCRIPT ARGS...``, or ``-m MODULE ARGS...``."""

from __future__ import annotations

import sys

from unicron.megatron_lm.script import run_script

USAGE = "usage: python -m unicron.megatron_lm [-m] SCRIPT ARGS..."


def main(arguments: list[str]) -> None:
    """Run a script or, behind ``-m``, a module."""
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or [""]
    if not target:
        sys.exit(USAGE)
    run_script(target, rest, is_module=is_module)


if __name__ == "__main__":
    main(sys.argv[1:])
