"""Parsing of human-readable sizes."""

from __future__ import annotations

import re

from edgesplit.errors import UsageError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(text: str) -> int:
    """Parse a size such as 2GB, 500MB or 1.5GiB into bytes (at least 1); UsageError otherwise."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None or not (count := int(float(match[1]) * _UNITS[match[2] or ""])):
        raise UsageError(f"not a size: {text[:80]!r} (as in 800MB, 2GB or 1GiB)")
    return count
