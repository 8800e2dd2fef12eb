"""Settings of escalation by cause and of lemons: a part of ``shared.settings.model.Settings``, with the reasons."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

_Window = Annotated[float, Field(gt=0, le=86_400 * 365)]
_Count = Annotated[int, Field(ge=0, le=16)]
"""A limit to which occurrences are counted; ``causes.REMEMBERED`` are known of each place."""


class EscalationLimits(BaseModel):
    """When a cause that comes again makes an error worse (``incidents.causes``); 0 as a limit: never."""

    cause_window_s: _Window = 3600.0
    """Time within which the same cause at one place counts. A bad cable, a full disk or a failing device shows several
    times within an hour; what comes once a day is cheaper to restart than to give up a node for."""
    cause_worker_limit: _Count = 3
    """Occurrences of a cause on one worker that make its error one severity worse, and as many again one more: a third
    failure is no longer chance if a worker fails once in weeks."""
    cause_node_limit: _Count = 5
    """Occurrences of a cause on one node, over all its workers and tasks, that isolate it: they come from more than one
    worker, so the limit is higher than for one worker."""
    cause_pair_limit: _Count = 8
    """Breaks of a pair of nodes within an hour after which the isolated one stays out until an operator returns it: by
    then the time that its links must work has reached a quarter of an hour."""
    cause_task_limit: _Count = 12
    """Occurrences of a cause of one task, at different steps and on two nodes or more, that end the task as failed:
    with one in five minutes it makes progress mostly to lose it. Only faults that a program can cause are counted."""
    lemon_window_s: _Window = 7 * 86_400.0
    """Time within which a node's own faults count together. Within days an operator has not changed the node."""
    lemon_false_positives: float = Field(default=0.01, ge=0, le=1)
    """Nodes in the whole cluster that are isolated by mistake within ``lemon_window_s``, at most, while all fail alike:
    with the default one in two years. 0: no node is isolated for it."""
    isolated_fraction: float = Field(default=0.25, ge=0, lt=1)
    """Part of the nodes that may be isolated while a further one is isolated because of repetition, that one included:
    a common cause must not empty the cluster. A cluster of three nodes can spare none."""
