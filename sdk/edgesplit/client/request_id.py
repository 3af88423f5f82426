"""Ids of requests that are nobody else's: random UUIDs (RFC 9562, version 4) as URNs, many for one call of the kernel.

An id must not come twice, also not from two processes of which one was forked from the other: what a child finds ready
is thrown away.
"""

from __future__ import annotations

import os

_AT_ONCE = 16
_SIZE = 16
_VARIANT = "89ab"


class FreshIds:
    """Thread-safe."""

    def __init__(self) -> None:
        self._ready: list[str] = []

    def next(self) -> str:
        """One more. Whoever finds none makes some; each is taken once, for a list's `pop` is one step."""
        try:
            return self._ready.pop()
        except IndexError:
            raw = os.urandom(_AT_ONCE * _SIZE)
            mine, *others = (_urn(raw[at : at + _SIZE].hex()) for at in range(0, len(raw), _SIZE))
            self._ready += others
            return mine

    def forget(self) -> None:
        """Use none of those that are left."""
        self._ready = []


def _urn(mine: str) -> str:
    variant = _VARIANT[int(mine[16], 16) & 3]
    return f"urn:uuid:{mine[:8]}-{mine[8:12]}-4{mine[13:16]}-{variant}{mine[17:20]}-{mine[20:]}"


_IDS = FreshIds()
os.register_at_fork(after_in_child=_IDS.forget)


def fresh_id() -> str:
    """An id that nothing else in all the world has."""
    return _IDS.next()
