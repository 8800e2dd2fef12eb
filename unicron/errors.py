"""The exceptions of the library inside a training process.

    UnicronError
    ├── InvalidSpec            the task specification or its data cannot be used
    │   └── NotHealed          a setting with which a step cannot be healed; a whole restart trains rightly with it
    ├── UnsupportedModel       the model or optimizer that ``build`` returned would train to a wrong result
    │   └── SeamDiffers        Megatron-LM's or megatron-bridge's training is not as the adapter needs it
    ├── UnsupportedState       an object that a script gives as state cannot be saved, or not in this layout
    ├── MemberDiffers          this process is not what the other members of its generation are
    ├── WrongLoop              the training loop leaves out, or misplaces, a call that a step needs
    ├── InvalidMetric          a name or value given to ``run.log`` cannot be kept
    ├── Interrupted            the agent holds this generation: leave the step
    ├── CommunicationFailed    a collective failed: a peer was lost or a socket was shut
    │   └── PeerDiffers        another member of the generation is not what the others are, and leaves
    ├── DamagedCheckpoint      a checkpoint on storage is incomplete or was changed after it was written
    ├── TornSnapshot           a snapshot in memory is incomplete or was changed after it was written
    ├── NonFiniteValue         a loss or gradient is not a finite number
    └── SampleAccountingError  a micro-batch of a step was not computed exactly once (an internal error)

The services have exceptions of their own: ``unicron`` is the only package of the project in the user's process.
"""

from __future__ import annotations


class UnicronError(Exception):
    """Base of every error that ``unicron`` raises in a training process."""


class InvalidSpec(UnicronError):
    """The task specification cannot be used, or the data that it names cannot."""


class NotHealed(InvalidSpec):
    """A step of Megatron-LM's or megatron-bridge's cannot be healed with a setting, which the message names.

    ``unicron run`` has such a task restart whole (``shared.tasks.refusals``).
    """


class UnsupportedModel(UnicronError):
    """A model or optimizer would train to a wrong result; the message names the setting and its allowed values."""


class SeamDiffers(UnsupportedModel):
    """Megatron-LM's or megatron-bridge's training is not as its adapter needs it; the message names the seams.

    Attributes:
        seams: their names (``unicron.megatron_lm.seams``, ``unicron.bridge.seams``).
    """

    def __init__(self, text: str, seams: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.seams = seams


class UnsupportedState(UnicronError):
    """An object given to ``attach(state=...)`` cannot be saved, or moved to another layout; the message names where."""


class MemberDiffers(UnicronError):
    """This process is not what the other members of its generation are: the message has all that differs, and values.

    Attributes:
        difference: equal for two processes that differ in the same way (``unicron.join.identity.signature``).
    """

    def __init__(self, text: str, difference: str = "") -> None:
        super().__init__(text)
        self.difference = difference


class WrongLoop(UnicronError):
    """The training loop leaves out a call that a step needs, or makes it at the wrong place."""


class InvalidMetric(UnicronError):
    """A name or a value that a script logs (``run.log``) cannot be kept; the message has it, and what is allowed."""


class Interrupted(UnicronError):
    """The agent holds the generation of this process. The step is left; its finished micro-batches are kept."""


class CommunicationFailed(UnicronError):
    """A collective failed. Backends raise errors of their own; this one is raised by injected faults."""


class PeerDiffers(CommunicationFailed):
    """Another member of the generation is not what the others are, and leaves it; the message has both values."""


class DamagedCheckpoint(UnicronError):
    """A checkpoint on storage is incomplete, or was changed after it was written."""


class TornSnapshot(UnicronError):
    """A snapshot in memory is incomplete, or was changed after it was written."""


class NonFiniteValue(UnicronError):
    """A loss or a gradient is not a finite number; the message contains the step.

    Attributes:
        parameter: the first parameter in the model's order whose gradient on this rank is not finite; empty: not known.
        micro_batch: the micro-batch that brought it; None: several may have.
    """

    def __init__(self, text: str, *, parameter: str = "", micro_batch: int | None = None) -> None:
        super().__init__(text)
        self.parameter, self.micro_batch = parameter, micro_batch


class SampleAccountingError(UnicronError):
    """The ranks' micro-batches of one step do not cover the global batch exactly once."""
