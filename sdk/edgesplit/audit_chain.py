"""Hash chain of the controller's audit log: verified by the controller, and by anyone who holds an export.

Each entry holds the hash of the previous one, so that a changed, removed or missing entry is detected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

FIRST_PREVIOUS = "0" * 64
"""The previous hash of the first entry."""
CALLER_FIELDS = ("operator", "serial", "address", "request")
"""Fields that identify the caller and the request."""
FIELDS = ("number", "at", *CALLER_FIELDS, "what", "subject", "outcome", "detail", "previous")
"""Fields that the hash of an entry covers."""


def verify_chain(lines: Iterable[Mapping[str, Any]], expected: str = "") -> dict[str, Any]:
    """Check the hash chain of entries from any source, such as an export: the number of good entries (`lines`), the
    hash of the last one, and the first `problem` ("" for none)."""
    number, previous, is_found = 0, FIRST_PREVIOUS, not expected or expected == FIRST_PREVIOUS
    for line in lines:
        number += 1
        if problem := _problem(line, number, previous):
            return {"lines": number - 1, "hash": previous, "problem": problem}
        previous = str(line["hash"])
        is_found = is_found or previous == expected
    problem = "" if is_found else f"no line has the hash {expected[:64]}: the log was truncated or rewritten"
    return {"lines": number, "hash": previous, "problem": problem}


def entry_hash(content: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of an entry's fields without `hash`, as JSON with sorted keys and no spaces."""
    fields = {name: content[name] for name in FIELDS}
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _problem(line: Mapping[str, Any], number: int, previous: str) -> str:
    """Why `line` is not entry `number` that follows the hash `previous`; empty if it is."""
    try:
        if line["number"] != number:
            return f"line {number} is missing: after {number - 1} comes {line['number']}"
        if line["previous"] != previous:
            return f"line {number} does not follow the one before it"
        return "" if line["hash"] == entry_hash(line) else f"line {number} was changed"
    except (KeyError, TypeError, ValueError):
        return f"line {number} is damaged"
