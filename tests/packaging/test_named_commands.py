"""Every command that a text of the product names exists: verbs, options and values (documentation, alerts, hints)."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from cli.main import VERBS, load

ROOT = Path(__file__).resolve().parents[2]

PYTHON = ("cli", "services", "shared", "unicron", "unicron_client", "simulator")
TEXTS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/*", "deploy/**/*", "services/api/page/*")
"""What people read, besides the strings of the program. The changelog names what there was."""

_NAMED = re.compile(
    r"`(?:\S*/)?unicron ([^`]+)`|<code>unicron ([^<]+)</code>|\"unicron ([a-z][^\"]*)\"|\(unicron ([^()]+)\)"
)
_TYPED = re.compile(r"(?:^|\s|bin/)unicron ([-a-z][^\n]*)")
_END = re.compile(r"\s#|\s?[|&;<>]|\s\(|\\$|`")
"""What ends a command in a line of a shell, or of a table."""

_PLACEHOLDER = "X"


def named(text: str) -> Iterator[str]:
    """Yield the commands that a text names in its sentences, without the program's name."""
    for match in _NAMED.finditer(" ".join(text.split())):
        yield next(part for part in match.groups() if part is not None)


def typed(text: str) -> Iterator[str]:
    """Yield the commands in the code blocks of a Markdown page."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif (fenced or line.startswith("    ")) and "useradd" not in line:  # of a user of that name
            for match in _TYPED.finditer(line):
                yield match[1]


def strings(source: str) -> Iterator[str]:
    """Yield the strings of a program, with a placeholder for each value in them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else _PLACEHOLDER for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def commands() -> Iterator[tuple[str, str]]:
    """Yield every command that a text names, and where."""
    for folder in PYTHON:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for string in strings(path.read_text()):
                yield from ((command, str(path.relative_to(ROOT))) for command in named(string))
    for pattern in TEXTS:
        for path in sorted(ROOT.glob(pattern)):
            if not path.is_file() or path.suffix in {".png", ".pyc", ".svg"}:
                continue
            text = path.read_text()
            found = [*named(text), *(typed(text) if path.suffix == ".md" else ())]
            yield from ((command, str(path.relative_to(ROOT))) for command in found)


def words(command: str) -> list[str]:
    """Return the words of a command, up to what is no part of it."""
    plain = re.sub(r"\{\{.*?\}\}|\{.*?\}", _PLACEHOLDER, command)  # of templates
    return shlex.split(_END.split(plain, maxsplit=1)[0])


def problem(arguments: list[str]) -> str:
    """Return what is wrong with the arguments of the program; empty: nothing. Arguments may be left out in a text."""
    if not arguments or arguments[0] in {"--help", "--version", "--install-completion", "--show-completion"}:
        return ""
    verb, *rest = arguments
    if verb not in VERBS:
        return f"there is no verb {verb}"
    command: Any = load(verb)
    inner = getattr(command, "commands", None)
    if inner is not None and rest and not rest[0].startswith("-"):
        if rest[0] in inner:
            command, rest = inner[rest[0]], rest[1:]
        elif verb != "incidents":  # which takes an id in the place of a verb
            return f"{verb} has no verb {rest[0]}"
        else:
            command = inner["show"]
    if "--help" in rest:
        return ""
    if rest and rest[-1].startswith("--") and rest[-1] in {name for one in command.params for name in one.opts}:
        rest = rest[:-1]  # a text that names an option need not give it a value
    # Names of values are written in capitals; what is in brackets may be left out.
    rest = [word.strip("[]") for word in rest if word not in {"...", "…", "[...]"}]
    context = command.make_context(verb, [], resilient_parsing=True)
    context.resilient_parsing = False
    try:
        values, left, _ = command.make_parser(context).parse_args(rest)
    except Exception as err:
        return str(getattr(err, "message", err))
    if left:
        return f"too many arguments: {' '.join(left)}"
    for parameter in command.params:
        kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
        value = values.get(parameter.name)
        if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str) and not value.isupper():
            allowed = [member.value for member in kind]
            if value not in allowed:
                return f"{parameter.name}: {value} is none of {allowed}"
    return ""


def test_every_command_that_a_text_names_exists() -> None:
    found = list(commands())
    assert len(found) > 200
    wrong = {f"{where}: unicron {command}: {what}" for command, where in found if (what := problem(words(command)))}
    assert sorted(wrong) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("The planner answers again: `unicron plans`.", "there is no verb plans"),
        ("`unicron plan lists`", "plan has no verb lists"),
        ("`unicron ps --states running`", "o such option"),
        ("`unicron stop TASK NODE`", "too many arguments: NODE"),
        ("`unicron wait TASK --for finished`", "until: finished is none of"),
        ("`unicron resume {task}`", ""),
        ("`unicron incidents 6f0c`", ""),
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, said: str) -> None:
    (command,) = named(text)
    assert said in problem(words(command))
    assert bool(said) is bool(problem(words(command)))
