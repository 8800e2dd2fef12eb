"""Deprecated name of ``unicron.trainer.corpus``, kept for version 0.1."""

from __future__ import annotations

import sys
import warnings

from unicron.trainer.corpus import DEFAULT_BYTES, generate, main, write

__all__ = ["DEFAULT_BYTES", "generate", "main", "write"]

warnings.warn(
    "unicron.corpus is deprecated: use unicron.trainer.corpus",
    DeprecationWarning,
    stacklevel=1 if __name__ == "__main__" else 2,
)

if __name__ == "__main__":
    sys.exit(main())
