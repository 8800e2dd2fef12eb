"""How large the parts of an error's evidence may be.

An error event is one message on the bus and one row of the log, and is read by people. The whole stays far below the
largest message of the bus (8 MiB, ``shared.server.nats_server``), whatever a task prints and however many ranks it has.
The limits of what a training process itself sends are in ``unicron.link.reporting``, since ``unicron`` imports nothing
of this package; ``tests/shared/test_evidence_limits.py`` compares them.
"""

from __future__ import annotations

TRACEBACK_CHARACTERS = 16 * 1024
"""Longest traceback of an exception. Longer ones lose their beginning: the error is at the end."""

DETAIL_CHARACTERS = 1000
"""Longest error message."""

LAST_OUTPUT_BYTES = 4096
"""How much of an ended process's output is kept, from its end: room for a traceback or two."""

STACK_CHARACTERS = 8 * 1024
"""Longest stack of one rank, all its threads together: a training thread has about 20 frames of 100 characters, beside
it are three or four threads. Longer ones lose their end, which is the outermost frames of the last thread."""

STACKS_CHARACTERS = 64 * 1024
"""All stacks in one evidence together: equal ones count once. Those of the ranks to blame come first."""

REPORTED_RANKS = 256
"""Ranks whose state, beside their stack, is in one evidence; those to blame come first."""

COLLECTIVE_GROUPS = 64
"""Process groups of one rank in one answer: a rank of Megatron's has about 20, of which most are never used."""

OPERATIONS = 8
"""Collectives of one group that have not ended, in one answer. A reduction has two or three under way."""

MISSING_COLLECTIVES = 16
"""Collectives of which the evidence says who is missing."""
