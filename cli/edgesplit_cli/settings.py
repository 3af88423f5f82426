"""Where the command line keeps and finds things."""

from __future__ import annotations

import os
from pathlib import Path

DATA_VARIABLE = "EDGESPLIT_DATA"
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
