"""Classes of errors by their text, and what follows from one."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys

import pytest
import torch

from services.detector.state.error_classes import CLASSES, class_of
from shared.events.severities import ErrorKind, Method, Severity
from tests.detector.kit import Cluster, only_error

EXAMPLES = {
    "AcceleratorError: CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be": "gpu-ecc",
    "AcceleratorError: CUDA error: uncorrectable NVLink error detected during the execution": "gpu-nvlink",
    "NVMLError_GpuIsLost: GPU is lost": "gpu-lost",
    "RuntimeError: No CUDA GPUs are available": "gpu-missing",
    "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable": "gpu-missing",
    "RuntimeError: CUDA error: system not yet initialized": "gpu-fabric",
    "AcceleratorError: CUDA error: an illegal memory access was encountered": "gpu-illegal-access",
    "AcceleratorError: CUDA error: device-side assert triggered": "gpu-assert",
    "AcceleratorError: CUDA error: unspecified launch failure": "gpu-launch",
    "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has": "gpu-out-of-memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "gpu-out-of-memory",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(": "cublas",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED": "cudnn",
    "DistBackendError: NCCL error in: x.cpp:1, ncclInvalidUsage: Duplicate GPU detected": "nccl-usage",
    "DistBackendError: NCCL error in: x.cpp:1, remote process exited, ncclRemoteError: A call failed": "nccl-remote",
    "DistBackendError: NCCL error in: x.cpp:1, unhandled system error, ncclSystemError: System call": "nccl-system",
    "DistBackendError: NCCL error in: x.cpp:1, ncclInternalError: Internal check failed.": "nccl",
    "AcceleratorError: CUDA error: unknown error": "cuda",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for "
    "recv operation to complete": "collective-timeout",
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer": "gloo",
    "DistNetworkError: The client socket has timed out after 60000ms while trying to connect": "rendezvous",
    "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1.": "data-worker",
    "RuntimeError: unable to mmap 4096 bytes from file </torch_1_2>: Cannot allocate memory (12)": "shared-memory-full",
    "OSError: [Errno 28] No space left on device: '/data/out'": "disk-full",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0": "data",
    "free(): invalid pointer": "heap-corruption",
    "terminate called after throwing an instance of 'c10::Error'": "abort",
    "ValueError: it broke": None,
    "KeyError: 'gloom'": None,
    "": None,
}


@pytest.mark.parametrize(("text", "name"), EXAMPLES.items())
def test_texts_have_the_class_of_what_they_say(text: str, name: str | None) -> None:
    found = class_of(text)
    assert (found.name if found is not None else None) == name


def test_every_class_is_named_once_and_says_what_to_do() -> None:
    names = [one.name for one in CLASSES]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z-]*", name) for name in names)
    assert all(one.advice for one in CLASSES)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.ENOMEM, "host-out-of-memory"),
        (errno.ENOSPC, "disk-full"),
        (errno.EDQUOT, "disk-full"),
        (errno.EIO, "storage"),
        (errno.ESTALE, "storage"),
        (errno.EROFS, "storage"),
        (errno.ECONNREFUSED, "network"),
        (errno.ECONNRESET, "network"),
        (errno.EHOSTUNREACH, "network"),
        (errno.ENETUNREACH, "network"),
        (errno.ETIMEDOUT, "network"),
        (errno.EPIPE, "network"),
    ],
)
def test_errors_of_the_system_as_python_words_them(number: int, name: str) -> None:
    error = OSError(number, os.strerror(number))
    found = class_of(f"{type(error).__name__}: {error}")
    assert found is not None
    assert found.name == name


def test_what_torch_says_when_memory_is_used_up() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 55)
    found = class_of(f"RuntimeError: {raised.value}")
    assert found is not None
    assert found.name == "host-out-of-memory"


@pytest.mark.parametrize(
    ("code", "name"),
    [("import faulthandler; faulthandler._sigsegv()", "segfault"), ("import os; os.abort()", "abort")],
)
def test_what_python_prints_as_native_code_fails(code: str, name: str) -> None:
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", code], capture_output=True, text=True)
    found = class_of(done.stderr)
    assert found is not None
    assert found.name == name


def test_an_exception_of_the_device_isolates_its_node() -> None:
    cluster = Cluster()
    raised = cluster.raised("n1/0", 1.0, "exception")
    detail = "CUDA error: uncorrectable ECC error encountered"
    signal = raised.model_copy(update={"error": "AcceleratorError", "detail": detail})
    error = only_error(cluster.signal(signal, 1.1))
    assert (error.kind, error.severity, error.method) == (ErrorKind.DEVICE, Severity.SEV1, Method.DEVICE)
    assert (error.node, error.worker, error.task) == ("n1", "n1/0", "gpt")
    assert error.evidence["class"] == "gpu-ecc"
    assert "dmesg" in error.evidence["advice"]
    assert error.evidence["detail"] == detail


def test_an_exception_of_the_program_has_its_class_and_stays_what_it_was() -> None:
    cluster = Cluster()
    raised = cluster.raised("n1/0", 1.0, "exception")
    signal = raised.model_copy(update={"error": "OSError", "detail": "[Errno 28] No space left on device"})
    error = only_error(cluster.signal(signal, 1.1))
    assert (error.kind, error.severity) == (ErrorKind.EXCEPTION, Severity.SEV2)
    assert error.evidence["class"] == "disk-full"


def test_the_output_of_a_process_that_gave_up_tells_its_class() -> None:
    cluster = Cluster()
    words = (
        "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: uncorrectable ECC error"
    )
    exited = cluster.exited("n1/0", 1.0, code=-6).model_copy(update={"last_output": words})
    error = only_error(cluster.signal(exited, 1.1))
    assert (error.kind, error.severity, error.evidence["class"]) == (ErrorKind.DEVICE, Severity.SEV1, "gpu-ecc")


@pytest.mark.parametrize(
    ("code", "name"),
    [(-11, "segfault"), (-7, "bus-error"), (-6, "abort"), (-4, "illegal-instruction"), (-8, "arithmetic")],
)
def test_a_signal_has_a_class_where_the_output_has_none(code: int, name: str) -> None:
    cluster = Cluster()
    error = only_error(cluster.signal(cluster.exited("n1/0", 1.0, code=code), 1.1))
    assert (error.kind, error.evidence["class"]) == (ErrorKind.PROCESS_EXIT, name)
    assert error.evidence["advice"]


def test_the_output_of_a_process_that_was_killed_is_not_the_cause() -> None:
    cluster = Cluster()
    exited = cluster.exited("n1/0", 1.0).model_copy(update={"last_output": "warning: uncorrectable ECC error"})
    error = only_error(cluster.signal(exited, 1.1))
    assert (error.kind, error.severity) == (ErrorKind.PROCESS_EXIT, Severity.SEV2)
    assert "class" not in error.evidence


def test_a_process_that_the_kernel_ended_for_memory_is_told_from_one_that_somebody_killed() -> None:
    cluster = Cluster()
    exited = cluster.exited("n1/0", 1.0).model_copy(update={"oom_killed": True})
    error = only_error(cluster.signal(exited, 1.1))
    assert (error.kind, error.severity, error.evidence["class"]) == (
        ErrorKind.PROCESS_EXIT,
        Severity.SEV2,
        "oom-killed",
    )
