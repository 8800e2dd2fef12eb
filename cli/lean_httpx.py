"""Imports httpx without httpx's own command line, which no verb uses.

httpx imports it where click is installed, and with it rich's console and pygments: half of the time that httpx takes. A
None in ``sys.modules`` is how Python marks a module that cannot be imported; httpx then goes without. The mark is
removed at once.
"""

from __future__ import annotations

import sys
from typing import Any

_COMMAND_LINE = "httpx._main"

_modules: dict[str, Any] = sys.modules
_modules.setdefault(_COMMAND_LINE, None)
try:
    import httpx
finally:
    if _modules[_COMMAND_LINE] is None:
        del _modules[_COMMAND_LINE]

__all__ = ["httpx"]
