"""The command line: ``python -m unicron.megatron_lm SCRIPT ARGS...``, or ``-m MODULE ARGS...``."""

from __future__ import annotations

import sys
from collections.abc import Callable

from unicron.megatron_lm.script import run_script


def main(arguments: list[str], run: Callable[..., None] = run_script, package: str = "unicron.megatron_lm") -> None:
    """Run a script or, behind ``-m``, a module.

    Args:
        arguments: of the command line.
        run: an adapter's function that runs it.
        package: the adapter's.
    """
    is_module = arguments[:1] == ["-m"]
    target, *rest = arguments[is_module:] or [""]
    if not target:
        sys.exit(f"usage: python -m {package} [-m] SCRIPT ARGS...")
    run(target, rest, is_module=is_module)


if __name__ == "__main__":
    main(sys.argv[1:])
