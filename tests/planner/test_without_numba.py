"""The solver where numba is not installed, as in the control image."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shared.planning import compiled
from shared.planning.compiled import PLAIN_WORK
from shared.planning.solver import solve_with_proof
from tests.planner.test_exactness import random_problem

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import logging, sys
sys.modules["numba"] = None  # not to be found, and not to be imported
logging.basicConfig(format="%(message)s")
from shared.planning.solver import solve_with_proof
from shared.events.plans import Problem
solved = [solve_with_proof(Problem.model_validate_json(line)) for line in sys.stdin]
for solution, proof in solved:
    print(solution.model_dump_json())
    print(list(proof))
"""


@pytest.mark.slow
def test_large_problems_are_solved_by_plain_python() -> None:
    """To the same solution with the same proof; and it says why that takes so long, once."""
    problems = [random_problem(seed, 128, 4, (1, 2)) for seed in (1, 2)]
    assert min(sum(len(task.throughput) for task in problem.tasks) * 128 for problem in problems) > PLAIN_WORK
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM],
        input="".join(f"{problem.model_dump_json()}\n" for problem in problems),
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    compiled.load()
    expected = [solve_with_proof(problem) for problem in problems]
    assert answers[::2] == [json.loads(solution.model_dump_json()) for solution, _ in expected]
    assert answers[1::2] == [list(proof) for _, proof in expected]
    assert done.stderr.count("unicron-cluster[fast]") == 1
