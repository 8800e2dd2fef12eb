"""How ``unicron incidents INCIDENT`` prints evidence."""

from __future__ import annotations

from cli.incidents import incident_show

HANG = {
    "stalled_s": 3.04,
    "collectives": [
        {
            "collective": "gloo:reduce",
            "group": "3",
            "sequence": 9,
            "entered": [0, 2],
            "missing": [1],
            "unknown": [3],
        },
        {"collective": "gloo:broadcast", "group": "0", "sequence": 1, "entered": [0], "missing": [], "unknown": []},
    ],
    "stacks": [{"workers": ["n0/0", "n2/0"], "ranks": [0, 2], "stack": "Thread 0x:\n  File a"}],
    "stacks_left_out": 7,
    "without_stack": {"n1/0": {"rank": 1, "state": "T", "waits_in": "", "detail": "stopped by a signal"}},
}


def test_a_hang_names_the_missing_ranks_and_shows_the_stacks() -> None:
    assert incident_show.fields(HANG) == [("evidence.stalled_s", "3.04")]
    assert list(incident_show.paragraphs(HANG)) == [
        "rank 0, 2 waits in gloo:reduce (number 9 of group 3); rank 1 has not entered it; rank 3 gave no answer",
        "rank 0 waits in gloo:broadcast (number 1 of group 0); all ranks have entered it",
        "n1/0 (rank 1, state T): stopped by a signal",
        "stacks of rank 0, 2 (n0/0, n2/0):\nThread 0x:\n  File a",
        "7 more stacks are left out",
    ]


def test_text_of_a_process_cannot_steer_the_terminal() -> None:
    evidence = {"detail": "\x1b[2J", "traceback": "a\x1b]0;x\x07\n\tb\n", "micro_batch": 0, "parameter": "w"}
    assert dict(incident_show.fields(evidence)) == {
        "evidence.detail": "\ufffd[2J",
        "evidence.micro_batch": "0",
        "evidence.parameter": "w",
    }
    assert list(incident_show.paragraphs(evidence)) == ["traceback:\na\ufffd]0;x\ufffd\n        b"]


def test_evidence_of_another_form_is_left_out() -> None:
    assert list(incident_show.paragraphs({"stacks": "x", "collectives": {"a": 1}, "without_stack": [1]})) == []
