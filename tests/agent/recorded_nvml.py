"""A recorded NVML: a stand-in for the C library (``nvml_stand_in.c``), below the real pynvml.

Another process finds it with the variables of ``RecordedNvml.environment``; this process loads it with ``loaded``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pynvml

SOURCE = Path(__file__).with_name("nvml_stand_in.c")

XID_EVENT = pynvml.nvmlEventTypeXidCriticalError

WHOLE_DEVICE = 0xFFFFFFFF

COMPILER = shutil.which("cc") or shutil.which("gcc")

ORDINARY = {
    "name": "NVIDIA H100 80GB HBM3",
    "temperature": "50",
    "utilisation": "97",
    "memory": "85520809984",
    "memory_used": "61203283968",
    "slowdown": "90",
    "clocks": "0x4",
    "ecc": "0",
    "rows": "0",
    "remap_pending": "0",
    "remap_failure": "0",
    "field.230": "0",
    "field.38": "3",
}
"""What a device answers that works: 3 CRC errors of NVLink since the driver was loaded, and the power limit."""


@functools.cache
def compiled(without: tuple[str, ...] = ()) -> bytes:
    """Return the stand-in library. Each recording has a copy, since the loader takes one file for one library."""
    assert COMPILER is not None
    lacks = [f"-DWITHOUT_{what}" for what in without]
    with tempfile.NamedTemporaryFile(suffix=".so") as built:
        command = [COMPILER, "-shared", "-fPIC", "-Wall", "-Werror", *lacks, "-o", built.name, str(SOURCE)]
        subprocess.run(command, check=True, timeout=60)
        return Path(built.name).read_bytes()


class RecordedNvml:
    """The answers of a driver, in a folder of their own.

    Args:
        folder: is made; its path is short.
        devices: how many there are.
        without: functions that the library lacks: ``EVENTS``, ``REMAPPING``.
    """

    def __init__(self, folder: Path, devices: int = 1, without: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.library = folder / "libnvidia-ml.so.1"
        folder.mkdir()
        os.mkfifo(folder / "events")
        self.library.write_bytes(compiled(without))
        self._answers = {"count": str(devices), "driver": "550.54.15"}
        for index in range(devices):
            self._answers |= {f"device.{index}.{what}": value for what, value in ORDINARY.items()}
            self._answers[f"device.{index}.uuid"] = f"GPU-{index}"
        self.answer()

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process finds this library."""
        return {"LD_LIBRARY_PATH": str(self.folder), "NVML_RECORDING": str(self.folder)}

    def answer(self, **answers: str) -> None:
        """Answer so from now on. Names have two underscores for each dot."""
        self._answers |= {name.replace("__", "."): value for name, value in answers.items()}
        lines = "".join(f"{name} {value}\n" for name, value in self._answers.items())
        written = self.folder / "written"
        written.write_text(lines)
        written.rename(self.folder / "recording")

    def push(self, data: int, device: int = 0, *, kind: int = XID_EVENT, instance: int = WHOLE_DEVICE) -> None:
        """Have the driver report an event: an Xid, if nothing else is said."""
        self._write(f"{device} {kind} {data} {instance}")

    def fail(self, code: int) -> None:
        """Have the wait for events return an error."""
        self._write(f"error {code}")

    def _write(self, line: str) -> None:
        to = os.open(self.folder / "events", os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(to, line.encode() + b"\n")
        finally:
            os.close(to)

    @contextlib.contextmanager
    def loaded(self) -> Iterator[None]:
        """Have pynvml use this library in this process."""
        before = os.environ.get("NVML_RECORDING")
        os.environ["NVML_RECORDING"] = str(self.folder)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlLib = ctypes.CDLL(str(self.library))
        try:
            yield
        finally:
            pynvml.nvmlLib = None
            pynvml._nvmlGetFunctionPointer_cache.clear()
            os.environ.pop("NVML_RECORDING")
            if before is not None:
                os.environ["NVML_RECORDING"] = before
