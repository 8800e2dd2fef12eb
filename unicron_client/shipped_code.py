"""The code that comes along with a task: which files of a folder these are, and the specification that names them.

Git says what of the folder is ignored, whether it is in a repository or not; a link that leaves the folder and a file
that looks like a secret are refused by their names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from shared.errors import InvalidInput
from shared.tasks.code import MOST_BYTES, MOST_FILES, SEARCH_PATH, WORKING_DIRECTORY, Code
from shared.tasks.code_archive import code_of, leaves, pack
from shared.tasks.specification import TaskSpec

LEFT_OUT = frozenset({".git", ".unicron", "__pycache__"})
"""Names that never come along: of a repository, of an embedded stack's run directory, of what Python makes anew."""

SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "id_rsa*", "id_dsa*",
    "id_ecdsa*", "id_ed25519*", "credentials*", ".netrc", "_netrc", ".pgpass", ".npmrc", ".pypirc", ".htpasswd",
    ".git-credentials", "service-account*.json", "*.token", "kubeconfig*", "secrets.*",
)  # fmt: skip
"""Names of files that look like secrets, whatever their case."""

SECRET_FOLDERS = frozenset({".ssh", ".aws", ".gnupg", ".kube", ".docker"})
"""Names of folders whose files do."""

NO_SECRETS = ("*.pub", "*.py", "*.example", "*.sample", "*.template")
"""Names among these of files that are none: public keys, modules of Python, and files to be filled in."""

GIT_LIMIT_S = 60.0
"""How long git may take; it lists a hundred thousand files in about a second."""

_NAMED = 5
"""Most files that an error names."""


@dataclass(frozen=True)
class Shipment:
    """The files of a folder that come along.

    ``folder``: an absolute path. ``names``: of the files, relative to it.
    """

    folder: Path
    names: frozenset[str]
    archive: bytes = field(repr=False)

    @cached_property
    def code(self) -> Code:
        """What a specification says of it."""
        return code_of(self.archive)

    def __str__(self) -> str:
        """Return it in words, for the user."""
        return f"the code of {self.folder} comes along: {self.code}"

    def of(self, spec: TaskSpec) -> TaskSpec:
        """Return a specification with this code: its paths that are in the folder become relative to it.

        Args:
            spec: with absolute paths.

        Raises:
            InvalidInput: it has no script, or one that does not come along.
        """
        script = None if spec.script is None else self._relative(spec.script)
        if script not in self.names:
            why = f"is no file of {self.folder} that comes along: it is elsewhere, or ignored (.gitignore)"
            raise _refused("script", spec.script, why)
        data = self._relative(spec.data) or ""
        comes_along = not self.names.isdisjoint((data, f"{data}.bin"))
        return spec.model_copy(
            update={
                "code": self.code,
                "script": script,
                "data": data if comes_along else spec.data,
                "env": self._environment(spec.env),
            }
        )

    def _environment(self, env: dict[str, str]) -> dict[str, str]:
        changed = dict(env)
        if WORKING_DIRECTORY in env and (here := self._relative(env[WORKING_DIRECTORY])) is not None:
            if here == "." or any(name.startswith(f"{here}/") for name in self.names):
                changed[WORKING_DIRECTORY] = here
            else:
                del changed[WORKING_DIRECTORY]
        elif WORKING_DIRECTORY in env:
            del changed[WORKING_DIRECTORY]
        if env.get(SEARCH_PATH):
            parts = [part for part in env[SEARCH_PATH].split(os.pathsep) if part]
            changed[SEARCH_PATH] = os.pathsep.join(self._relative(part) or part for part in parts)
        return changed

    def _relative(self, path: str) -> str | None:
        """Return a path relative to the folder; None: it is not below it."""
        normal = Path(os.path.normpath(path))
        for folder in (self.folder, self.folder.resolve()):
            if normal.is_relative_to(folder):
                return str(normal.relative_to(folder))
        return None


def shipment(folder: Path, allowed: Collection[str] = ()) -> Shipment:
    """Return the files of a folder that come along.

    Args:
        folder: the folder.
        allowed: files in it, by their paths below it, that look like secrets and come along all the same.

    Raises:
        InvalidInput: a file or a link may not come along, they are too many or too large, or git does not say which
            they are.
    """
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        raise _refused("--ship", str(folder), "is no folder")
    listed = (name for name in _listed(folder) if LEFT_OUT.isdisjoint(name.split("/")))
    names = [name for name in listed if os.path.lexists(folder / name)]  # git lists what was deleted, too
    if not names:
        raise _refused("--ship", str(folder), "has no file that comes along: none is there, or all are in .gitignore")
    _check(folder, names, {os.path.normpath(name) for name in allowed})
    try:
        return Shipment(folder, frozenset(names), pack(folder, names))
    except OSError as err:
        raise _refused("--ship", str(folder), f"cannot be read: {err}") from err


def looks_secret(name: str) -> bool:
    """Return whether a file looks like a secret by its name."""
    *folders, base = name.lower().split("/")
    if not SECRET_FOLDERS.isdisjoint(folders):
        return True
    return any(fnmatch(base, one) for one in SECRETS) and not any(fnmatch(base, one) for one in NO_SECRETS)


def _check(folder: Path, names: Sequence[str], allowed: Collection[str]) -> None:
    instead = "name them in .gitignore"
    if found := [name for name in names if name not in allowed and looks_secret(name)]:
        what = (
            f"has files named like secrets: {_shown(found)}; {instead}, or give --ship-file NAME for each that is none"
        )
        raise _refused("--ship", str(folder), what)
    links = [name for name in names if (folder / name).is_symlink()]
    if found := [name for name in links if leaves(name, os.readlink(folder / name))]:
        what = f"has links that leave it: {_shown(found)}; {instead}, or ship a folder above"
        raise _refused("--ship", str(folder), what)
    if len(names) > MOST_FILES:
        raise _refused("--ship", str(folder), f"has {len(names)} files, at most {MOST_FILES} come along: {instead}")
    sizes = {name: (folder / name).lstat().st_size for name in names}
    if (total := sum(sizes.values())) > MOST_BYTES:
        largest = sorted(names, key=lambda name: -sizes[name])[:_NAMED]
        shown = ", ".join(f"{name} ({sizes[name]} bytes)" for name in largest)
        what = f"has {total} bytes, at most {MOST_BYTES} come along: {instead}; the largest are {shown}"
        raise _refused("--ship", str(folder), what)


def _listed(folder: Path) -> Iterator[str]:
    """Yield the paths of files and links below a folder that are not ignored."""
    git = shutil.which("git")
    if git is None:
        yield from _all_files(folder)
    elif any((place / ".git").exists() for place in (folder, *folder.parents)):
        yield from _by_git(git, folder, ["--cached"])
    else:
        with tempfile.TemporaryDirectory() as empty:
            _run(git, folder, "init", "--quiet", "--bare", empty)
            yield from _by_git(git, folder, [], f"--git-dir={empty}", f"--work-tree={folder}")


def _by_git(git: str, folder: Path, kinds: list[str], *options: str) -> Iterator[str]:
    out = _run(git, folder, *options, "ls-files", "-z", *kinds, "--others", "--exclude-standard")
    for name in dict.fromkeys(os.fsdecode(out).split("\0")):
        path = folder / name
        if name and path.is_dir() and not path.is_symlink():  # a repository of its own, a submodule for instance
            yield from (f"{name.rstrip('/')}/{below}" for below in _listed(path))
        elif name:
            yield name


def _all_files(folder: Path) -> Iterator[str]:
    """Yield all files and links where there is no git that would say which are ignored."""
    for place, folders, files in os.walk(folder):
        if ".gitignore" in files:
            raise _refused("--ship", os.path.join(place, ".gitignore"), "needs git, which is not installed")
        links = [name for name in folders if os.path.islink(os.path.join(place, name))]
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        yield from (os.path.relpath(os.path.join(place, name), folder) for name in (*files, *links))


def _run(git: str, folder: Path, *arguments: str) -> bytes:
    """Return what git prints about a folder; neither variables nor hooks of another repository have a say."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = [git, "-C", str(folder), "-c", "core.fsmonitor=false", *arguments]
    try:
        ended = subprocess.run(  # nosec B603 # git, with a folder that the user names
            command, env=around, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise _refused("--ship", str(folder), f"takes git longer than {GIT_LIMIT_S:g} s to list") from err
    if ended.returncode:
        said = os.fsdecode(ended.stderr).strip()[:500]
        raise _refused("--ship", str(folder), f"cannot be listed by git: {said}")
    return ended.stdout


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _refused(name: str, value: str | None, problem: str) -> InvalidInput:
    return InvalidInput.of(name, value, problem, f"{name}: {value} {problem}")
