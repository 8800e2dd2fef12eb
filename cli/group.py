"""The group of all verbs: lists them without importing them, and imports the one that is used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Annotated, Any

try:
    import typer
    import typer.core
    import typer.main
except ModuleNotFoundError as _missing:
    raise SystemExit(f"unicron: {_missing.name} is not installed (pip install 'unicron-cluster[control]')") from None

_HELP = {"help_option_names": ["-h", "--help"]}


def group(groups: Mapping[str, Mapping[str, tuple[str, str, str]]]) -> typer.Typer:
    """Return the command of all verbs.

    Args:
        groups: group -> verb -> its module, its help in one line, and an example.
    """
    verbs = {verb: about for group in groups.values() for verb, about in group.items()}

    class LazyGroup(typer.core.TyperGroup):
        """Lists all verbs without importing them; imports the one that is used."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            # Each with its line of help only.
            self.commands = {
                verb: typer.core.TyperCommand(name=verb, help=text, rich_help_panel=group)
                for group, inner in groups.items()
                for verb, (module, text, _) in inner.items()
                if importlib.util.find_spec(module) is not None
            }

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            """Return the verb that is to be run, imported."""
            name, command, rest = super().resolve_command(ctx, args)
            if name is not None and command is not None:
                command = load(verbs, name)
            return name, command, rest

    app = typer.Typer(cls=LazyGroup, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=_HELP)
    app.callback(help=_unwrapped(unicron.__doc__))(unicron)
    return app


def load(verbs: Mapping[str, tuple[str, str, str]], verb: str) -> Any:
    """Import a verb's module and return its command: the module's ``app``, or its function of the verb's name."""
    module = importlib.import_module(verbs[verb][0])
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(add_completion=False)
        app.command(verb)(getattr(module, verb.replace("-", "_")))
    command = typer.main.get_command(app)
    command.name = verb
    command.context_settings = {**_HELP, **command.context_settings}
    command.epilog = f"Example: {verbs[verb][2]}"
    for one in (command, *getattr(command, "commands", {}).values()):
        one.help = _unwrapped(one.help)
    return command


def _unwrapped(text: str | None) -> str:
    """Return a help with each paragraph on one line: a terminal breaks it where its own width is."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (text or "").split("\n\n"))


def unicron(
    # Without an effect here: ``cli.main`` answers it before this module is imported.
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Workload manager for large-model training that heals itself at the lowest total cost.

    Exit status: 0 success, 1 failure, 2 wrong input or usage, 3 not found, 4 conflict with the present state, 5 server
    not reachable, 6 a log fails its checks, 7 not allowed, 8 waited in vain, 130 interrupted (docs/operations.md).
    """
