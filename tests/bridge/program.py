"""A process of a script of megatron-bridge's, stock or with the adapter; what the parameters are at its end goes to a
file.

    python program.py stock|unicron FOLDER SETTING...

The model that was built last is what is written: ``<tensor rank>-<pipeline rank>-<replica>.pt``.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("script.py")


def apply() -> None:
    """Change torch, megatron-core and megatron-bridge for a machine without CUDA."""
    os.environ.setdefault("RANK", "0")  # it warns where nothing says a rank, and warnings are errors in tests
    from tests.bridge import stand_ins
    from tests.megatron_lm import cpu

    cpu.core()
    stand_ins.install()
    from megatron.bridge.training import setup

    stock = setup.initialize_megatron

    @functools.wraps(stock)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs | {"allow_no_cuda": True})

    setup.initialize_megatron = initialize_megatron


def main(mode: str, folder: Path, arguments: list[str]) -> None:
    """Be the process."""
    apply()
    from megatron.bridge.models.model_provider import ModelProviderMixin
    from megatron.bridge.training import pretrain, train

    from tests.megatron_lm.program import Built, fault, model_of
    from unicron.bridge import run_script

    built = Built()
    provider: Any = ModelProviderMixin
    provider.provide_distributed_model = built.noting_model(provider.provide_distributed_model)
    train.train = pretrain.train = built.noting_place(train.train)
    fault(folder, train, "evaluate_and_print_results", model_of(""))
    built.run(mode, str(SCRIPT), folder, arguments, run_script)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
