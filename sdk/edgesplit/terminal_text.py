"""Text that devices sent, made harmless for terminals: without control characters, and no longer than can be read."""

from __future__ import annotations

from typing import Any

MAX_CHARS = 4_000
"""Characters of one text from a device that are printed."""


def printable(data: Any) -> Any:
    """Text from a device with unprintable characters escaped, so that it cannot control the terminal, and cut to
    `MAX_CHARS`; recurses into lists and dicts."""
    if isinstance(data, str):
        text = shorten(data, MAX_CHARS)
        return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)
    if isinstance(data, dict):
        return {printable(key): printable(value) for key, value in data.items()}
    return [printable(item) for item in data] if isinstance(data, list) else data


def shorten(text: str, most: int) -> str:
    """The text if it has at most this many characters; otherwise its beginning, with "…" as the last of them."""
    return text if len(text) <= most else f"{text[: max(0, most - 1)]}…"[:most]
