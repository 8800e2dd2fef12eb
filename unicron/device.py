"""The device that a process trains on."""

from __future__ import annotations

import contextlib

import torch


def is_cuda() -> bool:
    """Return whether this process trains on a CUDA device."""
    # ``is_available`` asks the driver's library, which takes milliseconds each time.
    return torch.cuda.is_initialized() or torch.cuda.is_available()  # type: ignore[no-untyped-call]


def current() -> torch.device:
    """Return this process's device: its CUDA device (the agent makes only one visible), or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def take(number: int) -> None:
    """Select the CUDA device with a number, where there are CUDA devices."""
    if is_cuda():
        torch.cuda.set_device(number)


def synchronize() -> None:
    """Wait until the CUDA device has done all work that was started on it; other threads run meanwhile.

    Raises:
        RuntimeError: something failed on the device.
    """
    torch.cuda.synchronize()


def synchronize_stream() -> None:
    """Wait until the CUDA device has done the work of the current stream, and no other; other threads run meanwhile.

    Raises:
        RuntimeError: something failed on the device.
    """
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()


def pin(memory: torch.Tensor) -> bool:
    """Lock a host buffer in memory, so that the CUDA device reads and writes it without the processor.

    Returns:
        Whether that succeeded; if not (a file on a disk, say, cannot be locked), copies go through a buffer of the
        driver and are slower.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)) == 0:
        return True
    # CUDA keeps the error for the next call that asks, and torch asks after each kernel that it launches. Torch clears
    # the error as it raises it, and has no other call that does so.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=current())
    return False


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``; call this before the buffer is freed.

    This waits for all that is under way on the device, and so for a collective that a lost peer never enters: first
    abort what may be broken.
    """
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
