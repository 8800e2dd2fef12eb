"""Deprecated name of ``unicron.each_backward``'s module, kept for version 0.1."""

from __future__ import annotations

import warnings

from unicron.megatron.schedule import each_backward

__all__ = ["each_backward"]

warnings.warn("unicron.model is deprecated: use unicron.each_backward", DeprecationWarning, stacklevel=2)
