"""Where operators' programs find their files: environment variables and the folders of the user."""

from __future__ import annotations

import os
from pathlib import Path

DATA_VARIABLE = "EDGESPLIT_DATA"
"""Environment variable with the data folder of a controller on this machine."""
CREDENTIALS_VARIABLE = "EDGESPLIT_CREDENTIALS"
"""Environment variable with an operator's credentials file, for a controller that runs on another machine."""


def default_data_folder() -> Path:
    """$EDGESPLIT_DATA, or a folder in the user's home."""
    chosen = os.environ.get(DATA_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "edgesplit"


def cache_folder() -> Path:
    """The user's cache folder for kits, wheels and unpacked images; all of its content can be created again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgesplit"


def saved_credentials() -> Path:
    """Path of the credentials file that `edgectl login` writes."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "edgesplit" / "credentials.json"


def credentials_file(data: Path) -> Path | None:
    """The credentials file of the last login; None if a controller runs on the folder `data`, or if there was no
    login."""
    saved = saved_credentials()
    return saved if not (data / "controller.json").exists() and saved.exists() else None
