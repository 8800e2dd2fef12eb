"""Threads that imports start in the fork server: kept from starting where they are known, named where not."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from unicron.process.preloading import QUIET, ThreadWatch, keep_quiet

STARTS = """
import threading
threading.Thread(target=threading.Event().wait, name="pool", daemon=True).start()
"""
"""A module that starts a thread as it is imported."""

NATIVE = """
import _thread, time
_thread.start_new_thread(time.sleep, (3600,))
"""
"""The same, with a thread of which Python knows no name."""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder with ``outer``, which imports ``outer.inner`` and ``native``; the last two start a thread each.

    ``native`` imports another module behind that.
    """
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text("import outer.quiet, outer.inner, native\n")
    (tmp_path / "outer" / "quiet.py").write_text("")
    (tmp_path / "outer" / "inner.py").write_text(STARTS)
    (tmp_path / "native.py").write_text(f"{NATIVE}import outer.late\n")
    (tmp_path / "outer" / "late.py").write_text("")
    return tmp_path


def run(code: str, folder: Path, **variables: str) -> str:
    """Run code in a process of its own; return what it printed."""
    root = str(Path(__file__).parents[2])
    # Another test of this process may have imported the fork server.
    ordinary = {name: value for name, value in os.environ.items() if name not in QUIET}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**ordinary, "PYTHONPATH": os.pathsep.join([str(folder), root]), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_each_thread_is_named_with_the_module_whose_import_started_it(modules: Path) -> None:
    code = (
        "from unicron.process.preloading import ThreadWatch\n"
        "with ThreadWatch() as threads:\n"
        "    import outer\n"
        "print([tuple(thread) for thread in threads.started()])"
    )
    comm = Path(sys.executable).name[:15]
    assert run(code, modules).strip() == str([("pool", "outer.inner"), (comm, "native")])


def test_imports_are_as_without_the_watch(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    before = [*sys.meta_path]
    with ThreadWatch():
        import outer.quiet  # type: ignore[import-not-found]

        assert importlib.util.find_spec("unicron.no_such_module") is None
        with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
            importlib.import_module("no_such_module")
    assert sys.meta_path == before
    loader = outer.quiet.__spec__.loader
    assert not {"create_module", "exec_module"} & set(vars(loader))
    assert loader.get_source("outer.quiet") == ""


def test_known_libraries_are_kept_from_starting_threads_whatever_the_environment_says() -> None:
    variables = {"OPENBLAS_NUM_THREADS": "16", "TORCH_WARM_POOL": "1", "OMP_NUM_THREADS": "4"}
    keep_quiet(variables)
    assert variables == {**QUIET, "OMP_NUM_THREADS": "4"}
    keep_quiet(variables := {})
    assert variables["OMP_NUM_THREADS"] == "1"


def test_a_thread_of_a_library_is_charged_to_the_module_that_loads_it(tmp_path: Path) -> None:
    """numpy's module imports others as it is made, after OpenBLAS has been loaded with it."""
    code = (
        "from unicron.process.preloading import ThreadWatch\n"
        "with ThreadWatch() as threads:\n"
        "    import numpy\n"
        "print([thread.module for thread in threads.started()])"
    )
    assert run(code, tmp_path, OPENBLAS_NUM_THREADS="2").strip() == "['numpy._core._multiarray_umath']"


COUNTS = "; import os; print(len(os.listdir('/proc/self/task')))"


@pytest.mark.parametrize("before", ["", "import unicron.forkserver; "], ids=["alone", "in the fork server"])
def test_numpy_has_threads_of_its_own_only_elsewhere(before: str, tmp_path: Path) -> None:
    count = run(f"{before}import numpy{COUNTS}", tmp_path, OPENBLAS_NUM_THREADS="2")
    assert int(count) == (1 if before else 2)


WARMS = """
from torch._inductor import async_compile, config
async_compile.has_triton_package, config.compile_threads = lambda: True, 2
async_compile.maybe_warm_pool()
"""


@pytest.mark.parametrize(
    "before",
    ["", "import unicron.forkserver"],
    ids=["alone", "in the fork server"],
)
@pytest.mark.slow
def test_torchs_compiler_has_its_pool_only_elsewhere(before: str, tmp_path: Path) -> None:
    # The thread ends with the process that it reads from; the pool that has both stays.
    pools = "print(len(async_compile._pool_set), flush=True); import os; os._exit(0)"
    count = run(f"{before}\n{WARMS}\n{pools}", tmp_path)
    assert int(count) == (0 if before else 1)


def test_the_fork_server_says_which_module_started_a_thread(modules: Path, tmp_path: Path) -> None:
    """It has said so once it greets its agent."""
    code = (
        "import sys; from unicron import forkserver\n"
        "forkserver.preload = lambda: __import__('outer.inner')\n"
        "sys.argv[0] = 'forkserver'; sys.exit(forkserver.main())"
    )
    root = str(Path(__file__).parents[2])
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as agent:
        listener.bind(str(tmp_path / "agents"))
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, "-c", code, "--fd", str(listener.fileno())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(modules), root])},
            pass_fds=[listener.fileno()],
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            agent.settimeout(60)
            agent.connect(str(tmp_path / "agents"))
            assert b'"ready"' in agent.recv(1000)
            server.terminate()
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()
            server.wait()
    assert server.returncode == 0, said
    assert "3 threads after preloading" in said
    assert "'pool', started by the import of outer.inner" in said
    assert "TORCH_WARM_POOL=0" in said
