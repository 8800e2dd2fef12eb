"""How many examples the property tests draw: hypothesis's profile, and the share of it that a costly test takes."""

from __future__ import annotations

import os

import hypothesis

VARIABLE = "UNICRON_TEST_EXAMPLES"
"""The environment variable with the number of examples; `make test-nightly` sets 500."""

GATE = 20
"""The number where the variable is not set, as in `make test`."""

USUAL = 100
"""Hypothesis's own number, which ``examples`` is relative to."""


def load_profile() -> None:
    """Have every property test draw the profile's number of examples, unless the test says otherwise."""
    hypothesis.settings.register_profile(
        "gate",
        max_examples=int(os.environ.get(VARIABLE, GATE)),
        deadline=None,
        # An example that a machine stalls is not wrong.
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("gate")


def examples(usual: int) -> int:
    """Return the number of a test whose examples are costly: it draws ``usual`` where others draw 100."""
    return max(1, usual * hypothesis.settings().max_examples // USUAL)
