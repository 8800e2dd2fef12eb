"""NVML, the library of NVIDIA's driver: the only module that asks it.

``hardware.py`` needs the names of the devices, ``device_watch.py`` their events and counters. An answer that a driver
is too old for, or that a device does not have, is None. No function here changes anything on a device.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

try:
    import pynvml
except ImportError:  # the extra `agent` installs it; a node without devices need not have it
    pynvml = None

NO_INSTANCE = 0xFFFFFFFF
"""NVML's instance id of an event that concerns the whole device (``nvmlEventData_t``)."""

CONTROL_DEVICE = "/dev/nvidiactl"
"""A file that exists where a driver is loaded and a container may use it."""

MIG_PREFIX = "MIG-"
"""Beginning of the UUID of a MIG instance, as ``CUDA_VISIBLE_DEVICES`` lists it."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device of the machine. ``handle``: NVML's; None: the driver has lost the device. Names are NVML's.

    ``memory_bytes``: all that it has; None: NVML does not say.
    """

    index: int
    handle: Any
    uuid: str = ""
    name: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What NVML says of a device at one moment; None: it does not say.

    Attributes:
        lost: whether it says that the device is lost (``NVML_ERROR_GPU_IS_LOST``).
        reset_required: whether it says that the device needs a reset (``NVML_ERROR_RESET_REQUIRED``).
        temperature_c: the chip's temperature, degrees Celsius.
        utilisation_percent: the part of the last second or less in which a kernel ran on the device.
        memory_used_bytes: what all processes and the driver itself use.
        slowdown_c: at which the hardware slows the device down, degrees Celsius.
        clocks_reasons: why the clocks are reduced: bits ``nvmlClocksEventReason...``.
        ecc_uncorrectable: uncorrectable memory errors since the driver was loaded.
        remapped_rows: memory rows that were remapped because of uncorrectable errors.
        remap_pending: 1: a remapping waits for a reset.
        remap_failure: 1: a row could not be remapped.
        nvlink_errors: CRC errors, replays and recoveries of all links since the driver was loaded.
        recovery_action: ``NVML_GPU_RECOVERY_ACTION_...``.
    """

    lost: bool = False
    reset_required: bool = False
    temperature_c: int | None = None
    utilisation_percent: int | None = None
    memory_used_bytes: int | None = None
    slowdown_c: int | None = None
    clocks_reasons: int | None = None
    ecc_uncorrectable: int | None = None
    remapped_rows: int | None = None
    remap_pending: int | None = None
    remap_failure: int | None = None
    nvlink_errors: int | None = None
    recovery_action: int | None = None

    def numbers(self) -> dict[str, int]:
        """Return what NVML said, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: int(value) for name, value in values.items() if value is not None}


class DeviceEvent(NamedTuple):
    """An event of the driver.

    Attributes:
        device: its index; None: NVML does not say which.
        xid: the Xid code; None: the device's counters and its recovery action say what has happened.
        instance: the GPU instance (MIG) that it concerns; None: the whole device.
    """

    device: int | None
    xid: int | None
    instance: int | None = None


class Driver:
    """The library, loaded and connected to the driver. Made by ``connect``; its methods may be called in any thread."""

    def __init__(self) -> None:
        self.version = _text(pynvml.nvmlSystemGetDriverVersion)
        self._events: Any = None
        self._handles: dict[int | None, int] = {}

    def close(self) -> None:
        """Disconnect."""
        _answer(pynvml.nvmlShutdown)

    def devices(self) -> list[Device]:
        """Return the devices, in the order of their indexes; one that is lost has no handle."""
        count = _answer(pynvml.nvmlDeviceGetCount) or 0
        return [self._device(index) for index in range(count)]

    def _device(self, index: int) -> Device:
        handle = _answer(pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return Device(index, None)
        memory = _answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return Device(
            index,
            handle,
            _text(pynvml.nvmlDeviceGetUUID, handle),
            _text(pynvml.nvmlDeviceGetName, handle),
            int(memory.total) if memory is not None else None,
        )

    def place(self, shown: str, devices: Sequence[Device]) -> tuple[int, int | None] | None:
        """Return the device of an entry of ``CUDA_VISIBLE_DEVICES``, and the GPU instance if it is a MIG instance.

        Args:
            shown: an index, a UUID or its beginning, or the UUID of a MIG instance.
            devices: of the machine.
        """
        if shown.startswith(MIG_PREFIX):
            return self._place_of_instance(shown, devices)
        found = [d.index for d in devices if str(d.index) == shown or (shown and d.uuid.startswith(shown))]
        return (found[0], None) if found else None

    def _place_of_instance(self, shown: str, devices: Sequence[Device]) -> tuple[int, int | None] | None:
        part = _answer(pynvml.nvmlDeviceGetHandleByUUID, shown.encode())
        whole = _answer(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part) if part is not None else None
        uuid = _text(pynvml.nvmlDeviceGetUUID, whole) if whole is not None else ""
        found = [d.index for d in devices if uuid and d.uuid == uuid]
        return (found[0], _answer(pynvml.nvmlDeviceGetGpuInstanceId, part)) if found else None

    def read(self, device: Device) -> Reading:
        """Return what NVML says of a device now."""
        if device.handle is None:
            return Reading(lost=True)
        values: dict[str, Any] = {}
        try:
            for ask in _QUESTIONS:
                values |= _answer_of_device(ask, device.handle) or {}
        except pynvml.NVMLError as err:
            values["lost"] = err.value == pynvml.NVML_ERROR_GPU_IS_LOST
            values["reset_required"] = err.value == pynvml.NVML_ERROR_RESET_REQUIRED
        return Reading(**values)

    def listen(self, devices: Sequence[Device]) -> int:
        """Register for the events of the devices, in place of an earlier time; return how many report events."""
        if self._events is not None:
            _answer(pynvml.nvmlEventSetFree, self._events)
        self._handles.clear()
        self._events = _answer(pynvml.nvmlEventSetCreate)
        if self._events is None:
            return 0
        for device in devices:
            if device.handle is not None and self._register(device):
                self._handles[_address(device.handle)] = device.index
        return len(self._handles)

    def _register(self, device: Device) -> bool:
        supported = _answer(pynvml.nvmlDeviceGetSupportedEventTypes, device.handle) or 0
        wanted = supported & _wanted_events()
        try:
            pynvml.nvmlDeviceRegisterEvents(device.handle, wanted, self._events)
        except pynvml.NVMLError:
            return False
        return bool(wanted)

    def wait(self, timeout_ms: int) -> DeviceEvent | None:
        """Return the next event; None: none has come within the time.

        Raises:
            OSError: NVML cannot wait for events.
        """
        try:
            data = pynvml.nvmlEventSetWait_v2(self._events, timeout_ms)
        except pynvml.NVMLError as err:
            if err.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise OSError(str(err)) from err
        device = self._handles.get(_address(data.device))
        instance = None if data.gpuInstanceId == NO_INSTANCE else int(data.gpuInstanceId)
        if data.eventType == pynvml.nvmlEventTypeXidCriticalError:
            return DeviceEvent(device, int(data.eventData), instance)
        if data.eventType == pynvml.nvmlEventTypeDoubleBitEccError:
            return DeviceEvent(device, _XID_OF_DOUBLE_BIT_ERROR, instance)
        return DeviceEvent(device, None, instance)


def connect() -> tuple[Driver | None, str]:
    """Return the connected library; or None, and why the driver cannot be asked: empty where there is none."""
    if pynvml is None:
        return None, "nvidia-ml-py is not installed (unicron-cluster[agent])" if os.path.exists(CONTROL_DEVICE) else ""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None, ""
    except pynvml.NVMLError as err:
        return None, str(err)
    return Driver(), ""


_XID_OF_DOUBLE_BIT_ERROR = 48
"""The Xid with which the driver logs double-bit errors, for which NVML has an event type."""


def _wanted_events() -> int:
    """Return the types of events to register for, as bits: faults, and what is a reason to read the counters."""
    wanted: int = (
        pynvml.nvmlEventTypeXidCriticalError
        | pynvml.nvmlEventTypeDoubleBitEccError
        | pynvml.nvmlEventTypeGpuUnavailableError
        | pynvml.nvmlEventTypeGpuRecoveryAction
    )
    return wanted


def _address(handle: Any) -> int | None:
    """Return the value of a device's handle: handles of one device are equal pointers."""
    return ctypes.cast(handle, ctypes.c_void_p).value


def _answer(ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if it has none, or the driver does not know the question."""
    try:
        return ask(*arguments)
    except pynvml.NVMLError:
        return None


def _text(ask: Callable[..., Any], *arguments: Any) -> str:
    found = _answer(ask, *arguments)
    return str(found) if found is not None else ""


def _answer_of_device(ask: Callable[[Any], dict[str, int]], handle: Any) -> dict[str, int] | None:
    """Return an answer about a device; None if there is none.

    Raises:
        pynvml.NVMLError: the device is lost or needs a reset; it then answers nothing else.
    """
    try:
        return ask(handle)
    except pynvml.NVMLError as err:
        if err.value in (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED):
            raise
        return None


def _temperature(handle: Any) -> dict[str, int]:
    return {"temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _utilisation(handle: Any) -> dict[str, int]:
    return {"utilisation_percent": int(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _memory(handle: Any) -> dict[str, int]:
    return {"memory_used_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)}


def _slowdown(handle: Any) -> dict[str, int]:
    found = pynvml.nvmlDeviceGetTemperatureThreshold(handle, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
    return {"slowdown_c": found}


def _clocks(handle: Any) -> dict[str, int]:
    """Return why the clocks are reduced. Drivers before 535 know the question by its former name."""
    try:
        return {"clocks_reasons": pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)}
    except pynvml.NVMLError_FunctionNotFound:
        return {"clocks_reasons": pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)}


def _memory_errors(handle: Any) -> dict[str, int]:
    kind, period = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return {"ecc_uncorrectable": pynvml.nvmlDeviceGetTotalEccErrors(handle, kind, period)}


def _remapped(handle: Any) -> dict[str, int]:
    _, rows, pending, failure = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {"remapped_rows": rows, "remap_pending": pending, "remap_failure": failure}


def _fields(handle: Any) -> dict[str, int]:
    """Return the counters that NVML has as fields, each of which it may lack."""
    links = (
        pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    )
    action = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
    found = {
        one.fieldId: _field_value(one)
        for one in pynvml.nvmlDeviceGetFieldValues(handle, [action, *links])
        if one.nvmlReturn == pynvml.NVML_SUCCESS
    }
    values = {"recovery_action": found[action]} if action in found else {}
    errors = [found[field] for field in links if field in found]
    return {**values, "nvlink_errors": sum(errors)} if errors else values


def _field_value(field: Any) -> int:
    """Return the number of a field, which is a union."""
    wide = field.valueType in (pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG)
    return int(field.value.ullVal if wide else field.value.uiVal)


_QUESTIONS: tuple[Callable[[Any], dict[str, int]], ...] = (
    _temperature,
    _utilisation,
    _memory,
    _slowdown,
    _clocks,
    _memory_errors,
    _remapped,
    _fields,
)
"""The questions of a reading. Each is a call of the driver, which takes less than a millisecond."""
