"""Command line of an offload server on a controller's data folder, whether started by the controller or by an operator.
Imports little: with `edgectl offload` the calling process becomes the server."""

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
"""Name of the folder in the data folder, and of the server's credentials."""
REVOKED = "revoked.pem"
"""File name of the certificate revocation list."""


def offload_arguments(data: Path, *, port: int | None = None, bind: str | None = None) -> list[str]:
    """Arguments of an offload server for this data folder; `port` and `bind` default to those of the running
    controller. UsageError if the folder is not a controller's, or no port is known."""
    running = read_addresses(data)
    chosen_port, chosen_bind = port or running.get("offload_port"), bind or running.get("bind") or "127.0.0.1"
    if not (data / OFFLOAD / "root.json").is_file():
        raise UsageError(f"{data} is no controller's data folder: run `edgectl --data {data} up` first")
    if not chosen_port:
        raise UsageError(f"no controller runs on {data} to take the port from: give one with --port")
    credentials = _server_files(data, OFFLOAD)
    options = {
        "--releases": data / OFFLOAD / "releases", "--root": data / OFFLOAD / "root.json",
        "--cert": credentials.certificate_file, "--key": credentials.key_file, "--ca": credentials.ca_file,
        "--host": chosen_bind, "--port": chosen_port, "--revoked": data / OFFLOAD / REVOKED,
    }  # fmt: skip
    return [str(word) for pair in options.items() for word in pair]


def offload_command(settings: Settings) -> list[str]:
    """Command line of the offload server that the controller runs as a child process."""
    arguments = offload_arguments(settings.data, port=settings.offload_port, bind=settings.address)
    arguments += ["--log-format", settings.log_format, "--mode", settings.offload_mode]
    if settings.offload_metrics:
        arguments += ["--metrics", settings.offload_metrics]
    return [sys.executable, "-m", "edgesplit_offload.main", *arguments, "--die-with-parent", str(os.getpid())]


def read_addresses(data: Path) -> dict[str, Any]:
    """Content of `controller.json`, which a running controller writes; empty if none runs."""
    try:
        content = json.loads((data / "controller.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _server_files(data: Path, name: str) -> Credentials:
    keys = data / "keys"
    return Credentials(keys / f"{name}.key", keys / f"{name}.pem", keys / "ca.pem")
