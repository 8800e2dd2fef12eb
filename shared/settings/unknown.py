"""Environment variables that look like a setting and are none: a slip that would go unnoticed."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator

logger = logging.getLogger(__name__)

PREFIX = "UNICRON_"

LIKENESS = 0.9
"""Ratio (``difflib.SequenceMatcher``) from which a name counts as a slip. No variable that something else reads (ranks,
tests, the command line) comes so near to a setting."""


def slips(environment: Iterable[str], settings: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each variable that is no setting, and the setting that it is most like, where it is very much like one.

    Args:
        environment: names of variables.
        settings: names of settings, as in Python.
    """
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    for name in sorted({name for name in environment if name.startswith(PREFIX)} - {*known}):
        if found := difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS):
            yield name, found[0]


def warn_of_slips(settings: Iterable[str]) -> None:
    """Log each slip in the environment of this process."""
    for name, meant in slips(os.environ, settings):
        logger.warning("%s is no setting and has no effect; did you mean %s?", name, meant)
