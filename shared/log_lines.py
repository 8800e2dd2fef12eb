"""The log lines of a program: on standard error, with the time in UTC and the program's name and pid."""

from __future__ import annotations

import logging
import os
import sys
import time


def log_to_stderr(name: str) -> None:
    """Have everything logged from INFO on, in lines that begin with time, level, ``name`` and pid."""
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {name}[{os.getpid()}] %(name)s: %(message)s")
    formatter.converter = time.gmtime
    formatter.datefmt = "%Y-%m-%dT%H:%M:%S"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
