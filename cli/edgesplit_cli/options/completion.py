"""Completion of names that the controller knows, for the shell (`_EDGECTL_COMPLETE`).

A controller that does not answer at once, or refuses, completes nothing: no error may appear in a command line that is
being typed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import default_data_folder
from edgesplit.errors import EdgeError
from edgesplit_cli.settings import chosen_credentials

TIMEOUT_S = 2.0
"""Seconds that the shell waits for the controller, at most."""
MAX_NAMES = 100
"""Devices that are requested of the controller."""


def complete_models(context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the controller's models, with their versions once an `@` has been typed."""
    references = [str(model["model"]) for model in _get(context, "/v1/models")]
    if "@" not in incomplete:
        references = list(dict.fromkeys(reference.partition("@")[0] for reference in references))
    return _items(references, incomplete)


def complete_models_or_files(context: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the controller's models; files where none begins like this."""
    return complete_models(context, param, incomplete) or [CompletionItem(incomplete, type="file")]


def complete_devices(context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the controller's devices."""
    devices = _get(context, "/v1/devices", like=incomplete, limit=MAX_NAMES)
    return _items((str(device["name"]) for device in devices), incomplete)


def complete_profiles(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of device profiles; files where none begins like this."""
    from edgesplit.device_profile import list_profiles

    return _items(list_profiles(), incomplete) or [CompletionItem(incomplete, type="file")]


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _get(context: click.Context, path: str, **query: Any) -> list[Any]:
    """The controller's answer; an empty list where there is none."""
    data = context.find_root().params.get("data") or default_data_folder()
    try:
        client = ControllerClient.connect(data, chosen_credentials(data, context), timeout_s=TIMEOUT_S)
        answer: list[Any] = client.get(path, **query)
    except (EdgeError, OSError):
        return []
    return answer
