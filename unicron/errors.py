"""What can go wrong inside a training process.

    UnicronError
    ├── InvalidSpec            the task specification or its data cannot be used
    ├── UnsupportedModel       what ``build`` returned would train wrongly
    ├── WrongLoop              the training loop does not do what a step needs of it
    ├── Interrupted            the agent holds this generation: leave the step
    ├── CommunicationFailed    a collective broke: a peer is gone or a socket was shut
    ├── DamagedCheckpoint      a checkpoint on disk is incomplete or not what was written
    ├── TornCopy               an in-memory copy is incomplete or not what was written
    ├── NonFiniteValue         a loss or gradient is not a finite number
    └── SampleAccountingError  a micro-batch of a step was computed not exactly once (an internal error)

``unicron`` stands alone inside the user's process, so this tree is its own.
"""

from __future__ import annotations


class UnicronError(Exception):
    """Base of every error that ``unicron`` raises in a training process."""


class InvalidSpec(UnicronError):
    """The task specification, or the data it names, cannot be used."""


class UnsupportedModel(UnicronError):
    """A model or optimizer would train to a wrong result; the message names the setting and what is allowed."""


class WrongLoop(UnicronError):
    """The training loop leaves out, or does at the wrong place, what a step needs of it."""


class Interrupted(UnicronError):
    """The agent holds the generation this process is in. The step is left; its finished micro-batches are kept."""


class CommunicationFailed(UnicronError):
    """A collective failed; ``__cause__`` is what the backend said."""


class DamagedCheckpoint(UnicronError):
    """A checkpoint on disk is incomplete, or is not what was written."""


class TornCopy(UnicronError):
    """An in-memory copy of a part of the state is incomplete, or is not what was written."""


class NonFiniteValue(UnicronError):
    """A loss or a gradient is not a finite number; the message holds step and micro-batch."""


class SampleAccountingError(UnicronError):
    """The ranks' micro-batches of one step do not cover the global batch exactly once."""
