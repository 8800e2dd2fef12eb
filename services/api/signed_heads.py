"""Signs the head of each day once the day is over, where a key is given (``UNICRON_LOG_KEY_FILE``).

The heads are in ``<run_dir>/heads.jsonl`` and at ``GET /v1/log/heads``, from where they are to be copied elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import date
from pathlib import Path

from shared.archive.signed_heads import SignedHead, append_heads, read_heads, read_key
from shared.errors import Corrupt, UnicronError
from shared.log.log import EventLog
from shared.model import Clock, utc_now
from shared.settings.model import Settings

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Pause between two looks at whether a day is over: short beside the day."""


class SignedHeads:
    """The signed heads of a log.

    Args:
        settings: where the heads and the key are.
        log: whose heads are signed.
        clock: by which a day is over.

    Raises:
        InvalidInput: the key cannot be read or is too short.
    """

    def __init__(self, settings: Settings, log: EventLog, clock: Clock = utc_now) -> None:
        self.path: Path = settings.run_dir / "heads.jsonl"
        self._key = read_key(settings.log_key_file) if settings.log_key_file is not None else None
        self._log = log
        self._clock = clock

    def read(self) -> list[SignedHead]:
        """Return the heads that were signed, by day."""
        return read_heads(self.path) if self.path.exists() else []

    def sign(self) -> list[SignedHead]:
        """Sign the heads of the days that are over and have none yet; return them.

        Raises:
            Corrupt: the log no longer has the event that was signed last; nothing is signed.
        """
        if self._key is None:
            return []
        signed = self.read()
        last = signed[-1] if signed else None
        if last is not None and self._log.hash_at(last.position) != last.hash:
            raise Corrupt(
                f"position {last.position} of the log is not the head that was signed on {last.day}: events were "
                "changed or removed, and no further head is signed"
            )
        ends = self._log.day_ends(after=last.position if last else 0, before=self._clock().date())
        heads = [
            SignedHead(day=date.fromisoformat(end.recorded_at[:10]), position=end.position, hash=end.hash)
            for end in ends
        ]
        found = [head.signed(self._key) for head in heads]
        if found:
            append_heads(self.path, found)
        return found

    async def keep_signing(self) -> None:
        """Sign what is due, until cancelled."""
        trouble = ""
        while True:
            try:
                for head in await asyncio.to_thread(self.sign):
                    logger.info("signed the head of %s: %s:%s", head.day, head.position, head.hash)
                trouble = ""
            except (UnicronError, OSError) as err:
                if str(err) != trouble:
                    logger.error("cannot sign the heads of the log: %s", err)
                trouble = str(err)
            await asyncio.sleep(LOOK_S)
