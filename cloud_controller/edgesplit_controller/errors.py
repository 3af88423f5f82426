"""Refusals with a kind of their own, so that the API can answer with the status that fits; near matches for typos."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from edgesplit.errors import Busy, NotFound, UsageError


class Conflict(UsageError):
    """It cannot be done in the present state (HTTP 409)."""


class Forbidden(UsageError):
    """It was not shown who asks, or not by what is good (HTTP 401)."""


class NotAllowed(UsageError):
    """It is known who asks, and they may not (HTTP 403)."""


class TooOften(Busy):
    """Asked too often (HTTP 429)."""

    def __init__(self, text: str, wait_s: float) -> None:
        super().__init__(text)
        self.wait_s = wait_s


def unknown(kind: str, name: str, known: Iterable[str]) -> NotFound:
    """The error for a name that is not known, with the names that come near."""
    there = sorted(known)
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.5)
    if near:
        hint = f"did you mean {' or '.join(near)}?"
    elif there:
        shown = ", ".join(there[:8]) + (", ..." if len(there) > 8 else "")
        hint = f"there is: {shown}"
    else:
        hint = f"there is no {kind} yet"
    return NotFound(f"no {kind} {name[:80]!r}: {hint}")
