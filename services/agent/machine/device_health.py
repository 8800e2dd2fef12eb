"""What readings of a device say: faults, and what is unusual and breaks nothing. Pure; time comes in.

Xid codes are faults by themselves; this module has the faults that no Xid names
(``shared.events.device_faults.CONDITIONS``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.agent.machine.nvml import Reading
from shared.events.device_faults import (
    CONTAINMENT_XIDS,
    DRAIN_PEERS,
    ECC_UNCORRECTABLE,
    GPU_LOST,
    REBOOT_REQUIRED,
    RESET_REQUIRED,
    ROW_REMAP_FAILURE,
)

ECC_SETTLE_S = 4.0
"""How long to wait for the Xid that says whether an uncorrectable memory error was contained. Xid and counter come
within the same second; with ``device_watch.READ_INTERVAL_S`` the next reading decides."""

RECOVERY_FAULTS = {1: RESET_REQUIRED, 2: REBOOT_REQUIRED, 3: DRAIN_PEERS, 6: RESET_REQUIRED, 7: REBOOT_REQUIRED}
"""Recovery action of the driver -> fault. Values of ``nvmlDeviceGpuRecoveryAction_t``: reset of the device, restart of
the node, end of peer-to-peer traffic, reset of the bus, restart of the system."""

RECOVERY_NOTES = {4: "reset wanted once the device is idle", 5: "the IMEX domain is to be recovered"}
"""Recovery actions after which the work goes on: the device has less capacity (4), or memory of other nodes is out of
reach (5), which a rank that uses it notices."""

CLOCKS_NOTES = {
    0x8: "slowed down by the hardware",
    0x20: "slowed down by the driver: too hot",
    0x40: "slowed down by the hardware: too hot",
    0x80: "slowed down by the hardware: power brake",
}
"""Bit of ``nvmlClocksEventReason...`` -> note. Reasons of ordinary work are left out: an idle device, the power limit
that training runs into all the time, clocks that somebody has set."""


@dataclass(slots=True)
class DeviceHealth:
    """What is known of one device.

    Attributes:
        reading: the newest reading.
        standing: faults that the newest reading shows; each is new once.
    """

    reading: Reading = field(default_factory=Reading)
    standing: frozenset[str] = frozenset()
    _first_nvlink: int | None = None
    _ecc: int | None = None
    _ecc_risen_at_s: float | None = None
    _contained_at_s: float | None = None

    def note_xid(self, xid: int, at_s: float) -> None:
        """Take note of an Xid, at a time of the agent's monotonic clock."""
        if xid in CONTAINMENT_XIDS:
            self._contained_at_s = at_s

    def take(self, reading: Reading, at_s: float) -> list[str]:
        """Take a reading; return the faults that are new."""
        self.reading = reading
        if self._first_nvlink is None:
            self._first_nvlink = reading.nvlink_errors
        standing = lasting_faults(reading)
        new = sorted(standing - self.standing)
        self.standing = standing
        return [*new, ECC_UNCORRECTABLE] if self._has_unexplained_error(reading, at_s) else new

    def _has_unexplained_error(self, reading: Reading, at_s: float) -> bool:
        """Return whether the counter of memory errors has risen and no Xid has come with it; true once a rise."""
        before, count = self._ecc, reading.ecc_uncorrectable
        if count is None:
            return False
        self._ecc = count
        if before is not None and count > before:
            self._ecc_risen_at_s = at_s
        risen_at_s = self._ecc_risen_at_s
        if risen_at_s is None:
            return False
        # The Xid may have come just before the reading that showed the rise.
        if self._contained_at_s is not None and self._contained_at_s >= risen_at_s - 2 * ECC_SETTLE_S:
            self._ecc_risen_at_s = None
            return False
        if at_s - risen_at_s < ECC_SETTLE_S:
            return False
        self._ecc_risen_at_s = None
        return True

    def notes(self) -> list[str]:
        """Return what is unusual and breaks nothing, in words."""
        now = self.reading
        found = [text for bit, text in CLOCKS_NOTES.items() if (now.clocks_reasons or 0) & bit]
        if now.temperature_c is not None and now.slowdown_c and now.temperature_c >= now.slowdown_c:
            found.append(f"{now.temperature_c} C, slows down at {now.slowdown_c} C")
        if now.remap_pending:
            found.append("a memory row is remapped at the next reset")
        if now.ecc_uncorrectable:
            found.append(f"{now.ecc_uncorrectable} uncorrectable memory errors since the driver was loaded")
        if now.nvlink_errors is not None and now.nvlink_errors > (self._first_nvlink or 0):
            found.append(f"{now.nvlink_errors - (self._first_nvlink or 0)} NVLink errors since the agent started")
        if now.recovery_action in RECOVERY_NOTES:
            found.append(RECOVERY_NOTES[now.recovery_action])
        return found


def lasting_faults(reading: Reading) -> frozenset[str]:
    """Return the faults that a reading shows by itself, for as long as they last."""
    if reading.lost:
        return frozenset({GPU_LOST})
    found = {RESET_REQUIRED} if reading.reset_required else set()
    if reading.recovery_action in RECOVERY_FAULTS:
        found.add(RECOVERY_FAULTS[reading.recovery_action])
    if reading.remap_failure:
        found.add(ROW_REMAP_FAILURE)
    return frozenset(found)
