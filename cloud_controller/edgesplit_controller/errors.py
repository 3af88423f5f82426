"""Errors that the API maps to an HTTP status of their own, and "did you mean" hints for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from edgesplit.errors import Busy, NotFound, UsageError


class Conflict(UsageError):
    """The request is not possible in the present state (HTTP 409)."""


class Unauthenticated(UsageError):
    """Authentication failed: no credentials, or credentials that are not valid (HTTP 401)."""


class PermissionDenied(UsageError):
    """The caller is authenticated and lacks the permission (HTTP 403)."""


class RateLimited(Busy):
    """The caller exceeded a rate limit (HTTP 429); `wait_s` is the number of seconds for `Retry-After`."""

    def __init__(self, text: str, wait_s: float) -> None:
        super().__init__(text)
        self.wait_s = wait_s


def not_found(kind: str, name: str, existing: Iterable[str]) -> NotFound:
    """A NotFound error for a name of this kind that does not exist, with up to three similar names from
    `existing` as a hint."""
    names = sorted(existing)
    similar = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if similar:
        hint = f"did you mean {' or '.join(similar)}?"
    elif names:
        listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        hint = f"there is: {listed}"
    else:
        hint = f"there is no {kind} yet"
    return NotFound(f"no {kind} {name[:80]!r}: {hint}")
