"""What ``unicron ps`` and ``unicron show`` say of slow workers and anomalies."""

from __future__ import annotations

from cli.tasks.notable import notable


def test_slow_workers_and_anomalies_in_words() -> None:
    spike = {"kind": "loss-spike", "step": 7, "value": 9.0, "expected": 2.0, "unit": "", "node": None, "peer": None}
    link = {
        **spike,
        "kind": "slow-link",
        "value": 0.02,
        "expected": 0.0002,
        "unit": "seconds",
        "node": "a",
        "peer": "b",
    }
    assert notable({"slow_workers": {"n1/0": 1.331}, "anomalies": [spike, link]}) == [
        "n1/0 is 1.33x slower than its peers (unicron postmortem n1/0)",
        "loss-spike since step 7: 9 instead of 2",
        "slow-link between a and b since step 7: 0.02 instead of 0.0002 (seconds)",
    ]
    assert notable({"slow_workers": {}, "anomalies": []}) == []
