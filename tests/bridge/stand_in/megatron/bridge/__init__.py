"""A stand-in of this project's own for megatron-bridge, without what it needs of CUDA: for tests alone.

It has the names and parameters of every seam of 0.3.1, as ``seams.json`` records them from the release
(``test_stand_in.py`` compares both), over the megatron-core that is installed. What it does between them is the least
that trains. What it does as Megatron-LM does it, it has from the stand-in for that.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[4] / "megatron_lm" / "stand_in"))
