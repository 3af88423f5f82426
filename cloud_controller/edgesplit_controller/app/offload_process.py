"""How an offload server is started on a controller's data folder, by `up` or by an operator. Loads little: the process
that asks becomes that server.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from edgesplit.errors import UsageError
from edgesplit.trust.identity import Credentials
from edgesplit_controller.settings import Settings

OFFLOAD = "offload"
"""Its folder in the data folder, and its name to the authority."""
REVOKED = "revoked.pem"


def offload_arguments(data: Path, *, port: int | None = None, bind: str | None = None) -> list[str]:
    """The command line of an offload server for this data folder, whether `up` runs it or an operator does."""
    running = told_addresses(data)
    chosen_port, chosen_bind = port or running.get("offload_port"), bind or running.get("bind") or "127.0.0.1"
    if not (data / OFFLOAD / "root.json").is_file():
        raise UsageError(f"{data} is no controller's data folder: run `edgectl --data {data} up` first")
    if not chosen_port:
        raise UsageError(f"no controller runs on {data} that would say which port: give one with --port")
    credentials = _server_files(data, OFFLOAD)
    words = {
        "--releases": data / OFFLOAD / "releases",
        "--root": data / OFFLOAD / "root.json",
        "--cert": credentials.certificate_file,
        "--key": credentials.key_file,
        "--ca": credentials.ca_file,
        "--host": chosen_bind,
        "--port": chosen_port,
        "--revoked": data / OFFLOAD / REVOKED,
    }
    return [str(word) for pair in words.items() for word in pair]


def offload_command(settings: Settings) -> list[str]:
    """The command line of the offload server that `up` runs."""
    arguments = offload_arguments(settings.data, port=settings.offload_port, bind=settings.address)
    arguments += ["--log-format", settings.log_format, "--mode", settings.offload_mode]
    if settings.offload_metrics:
        arguments += ["--metrics", settings.offload_metrics]
    return [sys.executable, "-m", "edgesplit_offload.main", *arguments, "--die-with-parent", str(os.getpid())]


def told_addresses(data: Path) -> dict[str, Any]:
    """What the controller that runs there wrote about itself; nothing where none does."""
    try:
        found = json.loads((data / "controller.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _server_files(data: Path, name: str) -> Credentials:
    keys = data / "keys"
    return Credentials(keys / f"{name}.key", keys / f"{name}.pem", keys / "ca.pem")
