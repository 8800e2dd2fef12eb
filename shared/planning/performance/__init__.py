"""The throughput model: T(t, x) from a model, a layout and the hardware. Pure; no torch.

``throughput`` predicts one update and explains it, ``table`` gives T(x) at the useful counts of workers.
"""

from shared.planning.performance.hardware import Hardware, measured, names, profile
from shared.planning.performance.layout import Layout
from shared.planning.performance.predict import model_shape, throughput
from shared.planning.performance.search import Pins, table

__all__ = ["Hardware", "Layout", "Pins", "measured", "model_shape", "names", "profile", "table", "throughput"]
