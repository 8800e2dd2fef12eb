"""Where the agents of one supervisor get their credential: a descriptor of the file, opened anew for each agent."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from shared.errors import InvalidInput
from shared.settings.model import Settings

logger = logging.getLogger(__name__)


class CredentialSource:
    """Opens the credential for one agent after the other.

    The supervisor opens the file, so that the agent knows no path, and each agent has the file as it then is. Where it
    cannot be opened any more, since a later user of this process may not read it or it is being replaced, the agent
    gets the one that was opened last.

    Args:
        settings: ``nats_credential``, or ``nats_credential_fd``, which was opened for good by whoever started this.
    """

    def __init__(self, settings: Settings) -> None:
        self._path: Path | None = None if settings.nats_credential_fd is not None else settings.nats_credential
        self._opened = settings.nats_credential_fd

    def open(self) -> int:
        """Return a descriptor of the credential, which stays this object's.

        Raises:
            InvalidInput: there is none, and never was.
        """
        if self._path is not None:
            try:
                opened = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as err:
                problem = f"credential {self._path}: {err.strerror or err}"
                if self._opened is None:
                    raise InvalidInput(problem) from err
                logger.warning("%s: the next agent has the one that was opened before", problem)
            else:
                self.close()
                self._opened = opened
        if self._opened is None:
            raise InvalidInput("there is no credential: UNICRON_NATS_CREDENTIAL names its file")
        return self._opened

    def close(self) -> None:
        """Close the descriptor."""
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None
