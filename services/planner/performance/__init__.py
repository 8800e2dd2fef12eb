"""The throughput model: T(t, x) from a model, a layout and the hardware. Pure; no torch.

``throughput`` predicts one update and explains it, ``table`` gives T(x) at the useful counts of workers.
"""

from services.planner.performance.hardware import Hardware, measured, names, profile
from services.planner.performance.layout import Layout
from services.planner.performance.predict import model_shape, throughput
from services.planner.performance.search import Pins, table

__all__ = ["Hardware", "Layout", "Pins", "measured", "model_shape", "names", "profile", "table", "throughput"]
