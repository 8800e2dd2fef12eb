"""One word for one thing: words that the glossary replaced are in no identifier (``replaced_words.txt``)."""

import ast
import functools
import gc
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("replaced_words.txt")
FOLDERS = ("benchmarks", "cli", "deploy", "examples", "services", "shared", "simulator", "tests", "unicron")
SCOPES = ("class", "module", "name", "word")


@dataclass(frozen=True, slots=True)
class Rule:
    """A replaced word. ``remains``: pairs of a path pattern and an identifier (empty: all) where it may remain."""

    scope: str
    old: re.Pattern[str]
    new: str
    remains: tuple[tuple[str, str], ...] = ()

    def allows(self, path: str, identifier: str) -> bool:
        return any(fnmatch(path, pattern) and allowed in ("", identifier) for pattern, allowed in self.remains)

    def matches(self, scope: str, identifier: str) -> bool:
        if self.scope == "word":
            return any(self.old.fullmatch(word) for word in words(identifier))
        return self.scope in ("name", scope) and self.old.fullmatch(identifier.lstrip("_")) is not None


def parse(text: str) -> tuple[Rule, ...]:
    """Return the rules in a list of replaced words.

    Raises:
        ValueError: a line is not of the documented form.
    """
    rules = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        fields = re.split(r"\s{2,}", line.strip())
        if not 3 <= len(fields) <= 4 or fields[0] not in SCOPES:
            raise ValueError(f"scope, old word, new word and maybe where it remains are needed: {line}")
        places = [place.strip().partition(":") for place in "".join(fields[3:]).split(",") if place.strip()]
        remains = tuple((pattern, identifier) for pattern, _, identifier in places)
        rules.append(Rule(fields[0], re.compile(fields[1]), fields[2], remains))
    return tuple(rules)


def words(identifier: str) -> list[str]:
    """Return the words of an identifier in snake case or camel case, in lower case."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", identifier)
    return [part.lower() for part in parts]


def identifiers(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield (scope, identifier, line) of every identifier in a source; scope ``name`` where it has none of its own."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.ClassDef(name=name):
                yield "class", name, line
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield "name", name, line
            case ast.Name(id=name) | ast.arg(arg=name) | ast.Attribute(attr=name):
                yield "name", name, line
            case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
                yield "name", name, line
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield "name", name, line
            case ast.MatchClass(kwd_attrs=names) | ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from (("name", name, line) for name in names)
            case ast.Import(names=aliases):
                for alias in aliases:
                    yield from (("module", part, line) for part in alias.name.split("."))
                    yield from (("name", name, line) for name in [alias.asname] if name)
            case ast.ImportFrom(module=module, names=aliases):
                yield from (("module", part, line) for part in (module or "").split(".") if part)
                for alias in aliases:
                    yield from (("name", name, line) for name in (alias.name, alias.asname) if name)
            case _:
                pass


@functools.cache
def matching(rules: tuple[Rule, ...], scope: str, identifier: str) -> list[Rule]:
    """Return the rules for an identifier, most of which are in many files."""
    return [rule for rule in rules if rule.matches(scope, identifier)]


def findings(rules: tuple[Rule, ...], path: str, source: str) -> list[str]:
    """Return where a source has replaced words, each with what to write."""
    lines: dict[tuple[str, str], list[int]] = {}
    for part in Path(path).with_suffix("").parts:
        lines.setdefault(("module", part), []).append(1)
    for scope, identifier, line in identifiers(ast.parse(source)):
        lines.setdefault((scope, identifier), []).append(line)
    return [
        f"{path}:{line}: {identifier} (write: {rule.new})"
        for (scope, identifier), where in lines.items()
        for rule in matching(rules, scope, identifier)
        if not rule.allows(path, identifier)
        for line in where
    ]


@pytest.mark.slow
def test_replaced_words_are_in_no_identifier() -> None:
    gc.collect()  # Python 3.11 fails to parse while the collector finds a task that a test before has left
    rules = parse(LIST.read_text())
    assert rules
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [found for path in paths for found in findings(rules, str(path.relative_to(ROOT)), path.read_text())]
    assert found == []


RULES = parse(
    "# comment\n"
    "class   Replica   RankState\n"
    "module  moves     transfer_plan\n"
    "word    tell|told  report   shared/wire.py:told_at, tests/old/*\n"
    "name    sums      accumulator\n"
)


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("unicron/a.py", "class Replica: ...", 1),
        ("unicron/a.py", "class _Replica: ...", 1),
        ("unicron/a.py", "class DataParallelReplica: ...\nreplica = 1\nReplica", 0),
        ("unicron/moves.py", "", 1),
        ("unicron/moves/a.py", "", 1),
        ("unicron/a.py", "from unicron.moves import x", 1),
        ("unicron/a.py", "import unicron.moves as m", 1),
        ("unicron/a.py", "moves = 1", 0),
        ("unicron/a.py", "def f(told): ...", 1),
        ("unicron/a.py", "f(last_told=1).x", 1),
        ("unicron/a.py", "class LastTold: ...", 1),
        ("unicron/a.py", "a.told_at = [f'{b.told}']", 2),
        ("unicron/a.py", "match a:\n    case B(told=1): ...\n    case told: ...", 2),
        ("unicron/a.py", "try: ...\nexcept E as told: ...", 1),
        ("unicron/a.py", "'told'  # told\nuntold = extolled = 1", 0),
        ("shared/wire.py", "told_at = told", 1),
        ("tests/old/a.py", "told = 1", 0),
        ("unicron/a.py", "a.sums = _sums", 2),
        ("unicron/a.py", "sums_of = Sums", 0),
    ],
)
def test_a_replaced_word_is_noticed(path: str, source: str, count: int) -> None:
    assert len(findings(RULES, path, source)) == count


@pytest.mark.parametrize("line", ["class Replica RankState", "function  a  b", "name  told", "name  a  b  c  d"])
def test_a_rule_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="are needed"):
        parse(line)
