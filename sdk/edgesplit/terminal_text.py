"""Text that devices sent, made harmless for terminals."""

from __future__ import annotations

from typing import Any


def printable(data: Any) -> Any:
    """Text from a device with unprintable characters escaped, so that it cannot control the terminal; recurses into
    lists and dicts."""
    if isinstance(data, str):
        return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in data)
    if isinstance(data, dict):
        return {printable(key): printable(value) for key, value in data.items()}
    return [printable(item) for item in data] if isinstance(data, list) else data
