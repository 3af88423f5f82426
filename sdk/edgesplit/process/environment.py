"""The environment of processes that run models: without the secrets of the process that starts them."""

from __future__ import annotations

import os
from typing import Final

SECRETS: Final = ("AWS_", "EDGESPLIT_DATABASE", "EDGESPLIT_PASSPHRASE", "EDGESPLIT_CREDENTIALS", "PGPASSWORD")
"""Beginnings of the names of variables that are, or may contain, secrets."""


def environment_for_models() -> dict[str, str]:
    """This process's environment without its secrets: a model that takes its process over does not get them."""
    return {name: value for name, value in os.environ.items() if not name.startswith(SECRETS)}
