"""The node's main process: ``python -P -m services.agent.main``. What it does is in ``supervisor.py``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from services.agent.files.rank_users import REACHABLE, RankUsers
from services.agent.supervisor import AGENT, FORK_SERVER, Supervisor
from shared.errors import UnicronError
from shared.machine import process_limits
from shared.machine.process import hide_memory, watch_parent
from shared.service.joining import credential_of, joined, node_name
from shared.service.log_lines import log_to_stderr
from shared.settings.model import read_settings

logger = logging.getLogger(__name__)


def main(*, agent: Sequence[str] = AGENT, fork_server: Sequence[str] = FORK_SERVER) -> int:
    """Run the supervisor, which runs the agent; return its exit code.

    Args:
        agent: the agent's command line.
        fork_server: the fork server's command line.
    """
    # The name is needed before the settings are read, whose errors are logged.
    node = node_name()
    log_to_stderr(f"supervisor-{node}", node=node)
    hide_memory()
    if not watch_parent():
        logger.error("the parent is gone")
        return 1
    try:
        settings = read_settings()
        settings = joined(settings, credential_of(settings))
        users = RankUsers(settings.rank_uids)
        users.check(settings.run_dir.resolve())
        if not users.separate:
            logger.warning(REACHABLE)
        process_limits.raise_open_files()
        for found in process_limits.judged(process_limits.of_this_process(), settings.workers_per_node):
            if found.advice:
                logger.warning("limit of %s: %s; %s", found.resource, found.what, found.advice)
        return asyncio.run(Supervisor(settings, agent=agent, fork_server=fork_server).run())
    except UnicronError as err:
        logger.error("%s: %s", err.code, err.detail)
        return err.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
