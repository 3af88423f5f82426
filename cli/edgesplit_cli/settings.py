"""Environment variables of the command line, and the controller that a call addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
from click.core import ParameterSource

from edgesplit.controller_client.client import TIMEOUT_S, ControllerClient
from edgesplit.controller_client.settings import credentials_file
from edgesplit.errors import UsageError
from edgesplit.terminal_text import printable

SIGN_VARIABLE = "EDGESPLIT_SIGN_WITH"
"""URI of the release key, for `edgectl deploy` and `edgectl keys renew`."""
PASSPHRASE_VARIABLE = "EDGESPLIT_PASSPHRASE"
PIN_VARIABLE = "EDGESPLIT_PIN"


def chosen_credentials(data: Path, context: click.Context | None = None) -> Path | None:
    """The credentials file of this call: the one given by option or variable; else, where no data folder is given and
    no controller runs on `data`, that of the last login. None means the credentials in the data folder."""
    context = context or click.get_current_context(silent=True)
    root = context.find_root() if context is not None else None
    options: dict[str, Any] = root.params if root is not None else {}
    named: Path | None = options.get("credentials")
    folder = options.get("data")
    if root is not None and folder is not None and named is not None:
        if root.get_parameter_source("credentials") is ParameterSource.COMMANDLINE:
            raise UsageError("--data and --credentials name two controllers: give one of them")
        named = None  # an option takes precedence over an environment variable
    if named is None and folder is None:
        return credentials_file(data)
    return named


def connect(data: Path, *, timeout_s: float = TIMEOUT_S) -> ControllerClient:
    """A client of the controller that this call addresses; it waits so long for the network at a time."""
    return ControllerClient.connect(data, chosen_credentials(data), timeout_s=timeout_s)


def segment(name: str) -> str:
    """A name as one segment of a path of the API, so that it cannot change what is called. UsageError for one that is
    empty or has a slash, which no path can hold."""
    if not name or "/" in name:
        raise UsageError(f"{printable(name)[:80]!r} is no name: it is empty, or has a slash")
    return quote(name, safe="")
