"""Deprecated name of the command ``python -P -m services.detector.main``, kept for version 0.1."""

from __future__ import annotations

import runpy
import warnings

if __name__ == "__main__":
    warnings.warn(
        "services.detector.monitor is deprecated: use services.detector.main", DeprecationWarning, stacklevel=1
    )
    runpy.run_module("services.detector.main", run_name="__main__", alter_sys=True)
