"""The result of a task: parameters in one file, and a summary of how they came about."""

from __future__ import annotations

import json
from pathlib import Path

from unicron.checkpoint.export import export
from unicron.protocol import Configure, Finished
from unicron.state.rank_state import RankState


def write_result(configure: Configure, state: RankState, loss: float | None) -> Finished:
    """Write the result, all ranks together; rank 0 has the summary. Return what this rank reports to its agent.

    Args:
        configure: the generation; the result lies in its directory.
        state: after the last update.
        loss: of the last update; None: unknown to this rank.

    Raises:
        RuntimeError: a peer was lost meanwhile.
    """
    path = Path(configure.directory) / "result" / "parameters.safetensors"
    export(state.model, path)
    is_first = configure.rank == 0
    if is_first:
        summary = {"steps": state.applied, "samples_sha256": state.digest.hex(), "loss": loss}
        path.with_name("summary.json").write_text(json.dumps(summary) + "\n")
    return Finished(
        generation=configure.generation,
        rank=configure.rank,
        step=state.applied,
        samples_sha256=state.digest.hex() if is_first else "",
        parameters_path=str(path) if is_first else "",
        loss=loss,
    )
