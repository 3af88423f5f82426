"""Where the command line keeps and finds things."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from edgesplit.errors import UsageError

DATA_VARIABLE = "EDGESPLIT_DATA"
CREDENTIALS_VARIABLE = "EDGESPLIT_CREDENTIALS"
SIGN_VARIABLE = "EDGESPLIT_SIGN_WITH"
"""The release key, for `edgectl deploy` and `edgectl keys renew`."""
PASSPHRASE_VARIABLE = "EDGESPLIT_PASSPHRASE"
PIN_VARIABLE = "EDGESPLIT_PIN"


def default_data_folder() -> Path:
    """$EDGESPLIT_DATA, or a folder in the user's home."""
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "edgesplit"


def cache_folder() -> Path:
    """What was fetched or made once and can be again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgesplit"


def kept_credentials() -> Path:
    """Where `edgectl login` keeps credentials."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgesplit" / "credentials.json"


def chosen_credentials(data: Path) -> Path | None:
    """The file of credentials that this call goes by: the one it names; else, where it names no data folder and no
    controller runs on `data`, the one that was kept. None: by the data folder."""
    context = click.get_current_context(silent=True)
    root = context.find_root() if context is not None else None
    given: dict[str, Any] = root.params if root is not None else {}
    named, folder = given.get("credentials"), given.get("data")
    if root is not None and folder is not None and named is not None:
        if root.get_parameter_source("credentials") is ParameterSource.COMMANDLINE:
            raise UsageError("--data and --credentials name two controllers: give one of them")
        named = None  # what the call says itself goes before what the environment says
    kept = kept_credentials()
    if named is None and folder is None and not (data / "controller.json").exists() and kept.exists():
        named = kept
    return named
