"""Messages as lines."""

from __future__ import annotations

import json

from unicron.protocol.messages import Progress, decode, encode


def test_what_a_message_does_not_say_is_not_in_its_line() -> None:
    """Progress comes many times a second, and each field costs its reader time."""
    begun = Progress(generation=0, rank=0, step=1, phase="begun", loss=0.0)
    line = encode(begun)
    expected = {"message": "progress", "generation": 0, "rank": 0, "step": 1, "phase": "begun", "loss": 0.0}
    assert json.loads(line) == expected
    assert line.endswith(b"}\n")
    assert decode(line) == begun
