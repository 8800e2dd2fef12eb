"""Deprecated name of the command ``python -P -m services.agent.main``, kept for version 0.1."""

from __future__ import annotations

import runpy
import warnings

if __name__ == "__main__":
    warnings.warn("services.detector.agent is deprecated: use services.agent.main", DeprecationWarning, stacklevel=1)
    runpy.run_module("services.agent.main", run_name="__main__", alter_sys=True)
