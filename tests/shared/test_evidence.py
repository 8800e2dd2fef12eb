"""The part of an error's evidence that decisions use, also of other versions and malformed."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.events.evidence import Evidence, LostRanks

_leaves = st.sampled_from([None, True, 7, "", "n0/0", "workers", "generation"])
_values = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["a", "workers", "generation"]), inner, max_size=2)
    ),
    max_leaves=6,
)


def test_fields_that_decisions_use() -> None:
    tasks = {"gpt": {"workers": ["n0/0"], "ranks": {"n0/0": 0}, "generation": 3, "step": 7}}
    evidence = Evidence.read(
        {"workers": ["n0/0", "n1/0"], "failure": "hang/x/step 7", "incarnation": "i", "tasks": tasks, "limit_s": 3.0}
    )
    assert evidence.workers == ["n0/0", "n1/0"]
    assert evidence.failure == "hang/x/step 7"
    assert evidence.incarnation == "i"
    assert evidence.tasks == {"gpt": LostRanks(workers=["n0/0"], ranks={"n0/0": 0}, generation=3, step=7)}


def test_entries_that_are_no_worker_are_left_out() -> None:
    assert Evidence.read({"workers": ["n0/0", 7, None]}).workers == ["n0/0"]


@settings(deadline=None, derandomize=True)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("workers", "failure", "incarnation", "tasks"), _values)))
def test_malformed_evidence_ends_no_fold(evidence: dict[str, Any]) -> None:
    read = Evidence.read(evidence)
    assert all(isinstance(worker, str) for worker in read.workers)
    assert Evidence.read({}) == Evidence()
