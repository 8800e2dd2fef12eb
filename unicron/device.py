"""The device that a process trains on."""

from __future__ import annotations

import os

import torch


def is_cuda() -> bool:
    """Return whether this process trains on a CUDA device."""
    # Asking the driver's library takes milliseconds each time; once CUDA is in use there is no question.
    return torch.cuda.is_initialized() or torch.cuda.is_available()  # type: ignore[no-untyped-call]


def current() -> torch.device:
    """Return this process's device: its only CUDA device (the agent shows it one), or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if is_cuda() else torch.device("cpu")


def take_local() -> None:
    """Turn to the CUDA device of this process's number on its machine, as torchrun's processes have to."""
    if is_cuda():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def synchronize() -> None:
    """Wait until all that was started on the device is done; other threads run meanwhile.

    Raises:
        RuntimeError: some of it failed.
    """
    torch.cuda.synchronize()


def pin(memory: torch.Tensor) -> bool:
    """Let the device read and write a host buffer by itself, while the processor does something else.

    Returns:
        Whether it can; if not, copies go through a buffer of the driver's, and slower.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)) == 0


def unpin(memory: torch.Tensor) -> None:
    """Undo ``pin``, before the buffer goes away."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]
