"""Deprecated name of ``unicron.megatron.clipping``, kept for version 0.1; a loop calls ``step.clip_gradients``."""

from __future__ import annotations

import warnings

from unicron.megatron.clipping import clip, norm

__all__ = ["clip", "norm"]

warnings.warn("unicron.clipping is deprecated: use step.clip_gradients(limit)", DeprecationWarning, stacklevel=2)
