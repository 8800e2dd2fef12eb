"""Import every module of the control plane, for the build of its image: Python writes the bytecode of what it loads.

pip would compile all of every distribution, twice what is ever loaded. Without any, each start and each probe of a
container would compile for seconds: its file system is read-only.
"""

from __future__ import annotations

import importlib
import pkgutil

import cli
import services
import shared

LATE = ("psycopg", "sqlalchemy.dialects.postgresql.psycopg", "uvicorn.protocols.http.h11_impl", "rich.table")
"""What is imported when it is first used."""


def main() -> None:
    """Import all, but for node agents, whose image has another build."""
    for package in (cli, services, shared):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.startswith("services.agent"):
                importlib.import_module(module.name)
    for name in LATE:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
