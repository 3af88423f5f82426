"""Options of an agent that an operator gives a device when it is made: one line of the service's environment file."""

from __future__ import annotations

import re

from edgesplit.errors import UsageError

ENVIRONMENT = "/etc/edgesplit-agent.env"
"""Environment file of the agent's service; what else is in it belongs to the device's operator."""
FILE = "options.env"
"""The line as a file beside a kit's installer, which puts it into the environment file."""
MAX_CHARACTERS = 1_000
_SAFE = re.compile(r"[A-Za-z0-9 ./:,_%=+@-]*")


def checked_options(text: str) -> str:
    """`text` if systemd splits it into the words that are meant, without quoting; UsageError otherwise."""
    if not _SAFE.fullmatch(text) or len(text) > MAX_CHARACTERS:
        raise UsageError(
            f"not options for an agent: {text[:80]!r} (letters, digits and ./:,_%=+@- between spaces, at most"
            f" {MAX_CHARACTERS} characters; others go into {ENVIRONMENT} by hand)"
        )
    return " ".join(text.split())


def environment_line(options: str) -> str:
    """The line of the environment file for checked options, without its end."""
    return f'OPTIONS="{options}"'
