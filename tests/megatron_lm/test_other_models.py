"""Megatron-LM's scripts of T5, BERT and Mamba hybrids: the parameters are stock's, without a fault and behind one.

T5 and BERT read text that is drawn here, since their scripts have no mock data; a GPT reads it here, too. The first of
several ranks makes the indices of that. Mamba's kernels have stand-ins
(``mamba_kernels.py``), and the layers of the hybrid are megatron-core's own (``hybrid.py``).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron_lm.courses import ROOT, differing, parameters, through_a_fault, torchrun
from tests.megatron_lm.test_pretrain_gpt import CHECKOUT, DIVIDED, MODES, STEPS, arguments, write_script
from tests.unicron.conftest import SpecFile
from tests.unicron.harness import agent
from unicron.protocol.messages import Resumed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not CHECKOUT, reason="UNICRON_MEGATRON_LM names no checkout of Megatron-LM"),
]

OF_A_GPT = {"--mock-data": 1, "--tokenizer-type": 2, "--vocab-size": 2}
"""Arguments that who reads text has otherwise, and how many words each is."""

OWN = {
    "T5": (
        "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 32 --decoder-seq-length 16 "
        "--kv-channels 16 --ffn-hidden-size 64 --vocab-extra-ids 20 --legacy-tokenizer"
    ),
    "BERT": "--num-layers 2 --seq-length 32 --spec local --attention-backend local --legacy-tokenizer",
    "GPT": "--num-layers 2 --seq-length 32 --tokenizer-type NullTokenizer --vocab-size 63",
}
"""What each has of its own. The tokenizer of words is the legacy one of core 0.16."""

HYBRID = (
    "--num-layers 4 --spec tests.megatron_lm.hybrid stack --hybrid-override-pattern M*-M --mamba-head-dim 16 "
    "--mamba-num-groups 2 --mamba-state-dim 8 --position-embedding-type none"
)

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"

SCRIPTS = {"T5": "pretrain_t5.py", "BERT": "pretrain_bert.py", "GPT": "pretrain_gpt.py", "hybrid": "pretrain_mamba.py"}


NEEDS = pytest.mark.skipif(
    not Path(CHECKOUT, SCRIPTS["hybrid"]).exists() or not importlib.util.find_spec("einops"),
    reason="the checkout has no pretrain_mamba.py, or einops is not installed",
)


def given(model: str, extra: str, data: Path) -> list[str]:
    """Return a script's arguments."""
    if model == "hybrid":
        return arguments(f"{HYBRID} {extra}")
    found = arguments("")
    for name, words in (OF_A_GPT | {"--num-layers": 2, "--seq-length": 2}).items():
        place = found.index(name)
        del found[place : place + words]
    # In a process of its own: what megatron-core warns of as it is imported would be an error in this one.
    program = [sys.executable, "-m", "tests.megatron_lm.text_data", str(data)]
    text = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return [*found, *text.stdout.split(), *OWN[model].split(), *extra.split()]


@pytest.mark.parametrize(
    ("model", "extra"),
    [
        ("T5", ""),
        ("T5", TP2),
        ("BERT", ""),
        ("BERT", TP2),
        *(
            pytest.param("hybrid", extra, marks=NEEDS)
            for extra in (f"--bf16 {DIVIDED}", TP2, "--pipeline-model-parallel-size 2")
        ),
    ],
)
def test_the_parameters_are_those_of_stock(model: str, extra: str, tmp_path: Path) -> None:
    words = given(model, extra, tmp_path / "data")
    stock, ours = (
        torchrun(
            tmp_path / mode,
            2,
            [
                str(ROOT / "tests/megatron_lm/program.py"),
                mode,
                f"{CHECKOUT}/{SCRIPTS[model]}",
                str(tmp_path / mode),
                *words,
            ],
        )
        for mode in MODES
    )
    assert differing(stock, ours) == []


@pytest.mark.parametrize("model", ["T5", "BERT", "GPT", pytest.param("hybrid", marks=NEEDS)])
async def test_a_process_that_is_lost_costs_no_step(model: str, tmp_path: Path, spec_file: SpecFile) -> None:
    words = given(model, "", tmp_path / "data")
    where = {"PYTHONPATH": os.pathsep.join(filter(None, (CHECKOUT, os.environ.get("PYTHONPATH"))))}
    for name, lost in (("quiet", ""), ("faulty", "forward:9")):
        script = write_script(tmp_path / name, script=SCRIPTS[model], given=words)
        spec = spec_file(exact=False, deterministic_sums=True, steps=STEPS, script=str(script))
        async with agent(tmp_path / f"{name}-agent") as a:
            generation = await through_a_fault(a, spec, lost, 1, where)
            steps = {one.steps_recomputed for one in a.of(Resumed, generation=generation)}
    assert steps == {0}
    assert differing(parameters(tmp_path / "quiet"), parameters(tmp_path / "faulty")) == []
