"""The documentation: links lead somewhere, named files exist, commands can be run, words are unique."""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/data/**/*.md", "tests/logs/*.md")
    for path in ROOT.glob(pattern)
)
GLOSSARY = ROOT / "docs" / "glossary.md"
EXTERNAL = ("http://", "https://", "mailto:")

OF_OTHERS = {ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "data" / "throughput" / "README.md"}
"""Pages that name files and modules of older versions, or of the repositories that data come from."""

SUFFIXES = ("py", "md", "yaml", "yml", "toml", "txt", "json", "csv", "svg", "sh", "conf", "cfg")
"""Endings of a name in backticks that make it a file of the repository if it is also in a folder."""

MADE_BY_USERS = ("examples/corpus.",)
"""Beginnings of paths that commands on these pages write."""


def without_code(text: str) -> str:
    """Return the text with fenced blocks and indented blocks left out, line numbers kept."""
    lines, fenced = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        lines.append("" if fenced or fence or line.startswith("    ") else line)
        fenced ^= fence
    return "\n".join(lines)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", without_code(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(text: str) -> list[str]:
    """Return the targets of a page's links and images."""
    return re.findall(r"\]\(<?([^)\s>]+)>?\)", without_code(text))


def broken_links(page: Path, text: str) -> list[str]:
    """Return the links of a page that lead nowhere."""
    broken = []
    for link in links(text):
        if link.startswith(EXTERNAL):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        in_page = text if target == page else target.read_text() if target.is_file() else ""
        if (name and not target.exists()) or (anchor and anchor not in anchors(in_page)):
            broken.append(link)
    return broken


def named_paths(text: str) -> Iterator[str]:
    """Yield what stands in backticks and looks like a path in the repository."""
    top = "|".join(sorted(re.escape(path.name) for path in ROOT.iterdir() if path.is_dir()))
    suffix = "|".join(SUFFIXES)
    for code in re.findall(r"`([^`\n]+)`", without_code(text)):
        if re.fullmatch(rf"(?:{top})(?:/[\w.\-]+)*/?", code) and "/" in code:
            yield code
        elif re.fullmatch(rf"[\w.\-]+(?:/[\w.\-]+)+\.(?:{suffix})", code):
            yield code


def missing_paths(text: str) -> list[str]:
    """Return the named paths that do not exist."""
    return [
        path
        for path in named_paths(text)
        if not path.startswith(MADE_BY_USERS) and not (ROOT / path.rstrip("/")).exists()
    ]


def missing_modules(text: str) -> list[str]:
    """Return the modules of the project that a page has Python run, or calls a service, and that do not exist."""
    run = re.findall(r"python3?(?: -P)?\s+-m\s+([a-z_][\w.]*)", text)
    services = re.findall(r"`(services\.\w+\.\w+)`", text)
    project = [name for name in (*run, *services) if (ROOT / name.split(".")[0]).is_dir()]
    return [name for name in project if not module_path(name).exists()]


def module_path(name: str) -> Path:
    base = ROOT / name.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def missing_definitions(text: str) -> list[str]:
    """Return the names that a page says a module defines ("name in path", "path, function name") and it does not."""
    plain = re.sub(r"\s+", " ", without_code(text))
    named = [(path, name) for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", plain)]
    named += re.findall(r"(\w[\w/]*\.py)[`)\]]+, function `(\w+)`", plain)
    return [f"{path}: {name}" for path, name in named if not defines(ROOT / path, name)]


def defines(path: Path, name: str) -> bool:
    defined = rf"^\s*(?:async def|def|class) {name}\b|^{name}\b"
    return path.is_file() and re.search(defined, path.read_text(), re.MULTILINE) is not None


def missing_targets(text: str) -> list[str]:
    """Return the targets that a page has make build and that the Makefile does not have."""
    targets = re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^    |`)make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
    return [name for name in named if name not in targets]


def repeated_terms(text: str) -> list[str]:
    """Return the terms that have more than one row in the tables of the glossary."""
    terms = [row.split("|")[1].strip().lower() for row in text.splitlines() if row.startswith("| ")]
    terms = [term for term in terms if term != "term"]
    return sorted({term for term in terms if terms.count(term) > 1})


def sources() -> list[Path]:
    """Return the text files that git tracks or that are new, but for the licence texts of others."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip("not a clone of the repository")
    endings = {".py", ".md", ".yaml", ".yml", ".toml", ".sh", ".txt", ".conf", ""}
    paths = (ROOT / name for name in done.stdout.split("\0") if name)
    return [path for path in paths if path.suffix in endings and path.is_file() and path != Path(__file__)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


@pytest.mark.parametrize("page", sorted({*PAGES} - OF_OTHERS), ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    assert missing_paths(text) == []
    assert missing_modules(text) == []
    assert missing_definitions(text) == []
    assert missing_targets(text) == []


def test_pages_that_the_code_names_exist() -> None:
    named = {
        (str(path.relative_to(ROOT)), page)
        for path in sources()
        if path.suffix == ".py"
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text())
    }
    assert sorted((path, page) for path, page in named if not (ROOT / page).is_file()) == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(index.read_text())}
    pages = {path for path in (ROOT / "docs").glob("*.md") if path != index}
    assert {path.name for path in pages - linked} == set()
    decisions = ROOT / "docs" / "decisions"
    recorded = {(decisions / link).resolve() for link in links((decisions / "README.md").read_text())}
    assert set(decisions.glob("0*.md")) <= recorded


def test_terms_of_the_glossary_are_unique() -> None:
    assert repeated_terms(GLOSSARY.read_text()) == []


def test_documents_outside_the_repository_are_not_referred_to() -> None:
    outside = re.compile(r"\bDESIGN\b|MEGATRON_ON_CPU")
    found = [str(path.relative_to(ROOT)) for path in sources() if outside.search(path.read_text(errors="replace"))]
    assert found == []


def test_pre_commit_runs_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = re.findall(r"^check-\w+:\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    lines = [line.strip() for recipe in recipes for line in recipe.splitlines()]
    checks = {line.replace("$(BIN)", ".venv/bin") for line in lines if line.startswith("$(BIN)")}
    assert len(checks) == 4
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = {hook["entry"] for repository in config["repos"] for hook in repository["hooks"]}
    assert checks <= hooks


def test_the_changelog_has_a_section_for_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert version in headings


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a](glossary.md#glossary) [b](../README.md) [c](#here)\n\n# Here", []),
        ("[a](no-such.md)", ["no-such.md"]),
        ("[a](glossary.md#no-such)", ["glossary.md#no-such"]),
        ("[a](#no-such)", ["#no-such"]),
        ("[a](https://example.org/no-such)\n```\n[b](no-such.md)\n```", []),
    ],
)
def test_a_broken_link_is_noticed(text: str, broken: list[str]) -> None:
    assert broken_links(GLOSSARY.with_name("page.md"), text) == broken


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("`shared/events/union.py`, `tests/e2e` and `unicron/gradients/`", []),
        ("`shared/no_such.py`", ["shared/no_such.py"]),
        ("`unicron/no_such/`", ["unicron/no_such/"]),
        ("`nosuchfolder/module.py`", ["nosuchfolder/module.py"]),
        ("`<run-dir>/log.db`, `bytes/s`, `node/k`, `/dev/shm`, `examples/corpus.txt`, `/v1/tasks.json`", []),
    ],
)
def test_a_missing_path_is_noticed(text: str, missing: list[str]) -> None:
    assert missing_paths(text) == missing


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (".venv/bin/python -m unicron.trainer.corpus; python -m pytest; python -P -m benchmarks.recovery", []),
        ("python -m unicron.no_such", ["unicron.no_such"]),
        ("python -m\nbenchmarks.no_such", ["benchmarks.no_such"]),
        ("`services.agent.main`, `services.agent.no_such`", ["services.agent.no_such"]),
    ],
)
def test_a_missing_module_is_noticed(text: str, missing: list[str]) -> None:
    assert missing_modules(text) == missing


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (
            "`derived_id` in\n`shared/events/base.py`, [a](../cli/main.py), function `main`, `VERBS` in `cli/main.py`",
            [],
        ),
        ("`no_such` in `shared/events/union.py`", ["shared/events/union.py: no_such"]),
        ("[a](cli/main.py), function `no_such`", ["cli/main.py: no_such"]),
        ("`cli/main.py`, function `no_such`", ["cli/main.py: no_such"]),
    ],
)
def test_a_missing_definition_is_noticed(text: str, missing: list[str]) -> None:
    assert missing_definitions(text) == missing


def test_a_missing_target_is_noticed() -> None:
    text = "It may make one hang.\n\n    make no-such     # or\n    make test\n\n`make check`, `make nothing`"
    assert missing_targets(text) == ["no-such", "nothing"]


def test_a_repeated_term_is_noticed() -> None:
    assert repeated_terms("| term | meaning |\n|---|---|\n| task | a |\n| node | b |\n| Task | c |") == ["task"]
    assert (
        repeated_terms("| term | meaning |\n|---|---|\n| task | a |\n\n| term | meaning |\n|---|---|\n| rank | c |")
        == []
    )
