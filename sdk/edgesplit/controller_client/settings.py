"""Where operators' programs keep and find things: the variables of the environment and the folders of the user."""

from __future__ import annotations

import os
from pathlib import Path

DATA_VARIABLE = "EDGESPLIT_DATA"
"""The data folder of a controller on this machine."""
CREDENTIALS_VARIABLE = "EDGESPLIT_CREDENTIALS"
"""An operator's credentials file, for a controller that runs elsewhere."""


def default_data_folder() -> Path:
    """$EDGESPLIT_DATA, or a folder in the user's home."""
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "edgesplit"


def cache_folder() -> Path:
    """The user's cache: kits, wheels and unpacked images, all of which can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgesplit"


def saved_credentials() -> Path:
    """The credentials file that `edgectl login` writes."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgesplit" / "credentials.json"


def credentials_file(data: Path) -> Path | None:
    """The credentials of the last login where no controller runs on the folder `data`; None where one does, or nobody
    has logged in."""
    saved = saved_credentials()
    return saved if not (data / "controller.json").exists() and saved.exists() else None
