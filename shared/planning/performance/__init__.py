"""The throughput model: T(t, x) from a model, a parallelism configuration and the hardware. Pure; no torch.

``throughput`` predicts and explains one update. ``table`` gives T(x) at the useful counts of workers.
"""

from shared.planning.performance.hardware import Hardware, measured, names, profile
from shared.planning.performance.parallel_config import ParallelConfig
from shared.planning.performance.predict import model_shape, throughput
from shared.planning.performance.search import Pins, table

__all__ = ["Hardware", "ParallelConfig", "Pins", "measured", "model_shape", "names", "profile", "table", "throughput"]
