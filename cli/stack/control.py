"""``unicron control``: the services of the control plane in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cli.options import KeyPlace, given
from shared.service.log_lines import log_to_stderr


def control(
    keys: KeyPlace = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for what the services write. Default: UNICRON_RUN_DIR or .unicron.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the API; 0 for any. Default: UNICRON_PORT or 8642.")
    ] = None,
) -> None:
    """Run the services of the control plane; Ctrl-C stops them.

    NATS and the log's database run already: the credentials in the key directory (or UNICRON_NATS_URL) say where NATS
    is, UNICRON_LOG_URL where the database is. Prints one line, ready URL, when all services work; their log lines go to
    standard error. A service that ends is started again. Ends with the exit status of a service that is refused.
    """
    from cli.stack.control_plane import ControlPlane
    from cli.stack.foreground import run
    from shared.settings.model import read_settings

    settings = read_settings(**given(nats_keys=keys, run_dir=run_dir, port=port))
    log_to_stderr("control")
    asyncio.run(run(ControlPlane(settings)))
