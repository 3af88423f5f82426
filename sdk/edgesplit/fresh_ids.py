"""Ids of requests that are nobody else's: random UUIDs (RFC 9562, version 4) as URNs, many for one call of the kernel.

An id must not come twice, also not from two processes of which one was forked from the other: what a child finds of
random bytes is thrown away.
"""

from __future__ import annotations

import os
import threading

_AT_ONCE = 64
_SIZE = 16
_VARIANT = "89ab"


class FreshIds:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raw = b""

    def next(self) -> str:
        """One more."""
        with self._lock:
            raw = self._raw or os.urandom(_AT_ONCE * _SIZE)
            mine, self._raw = raw[:_SIZE].hex(), raw[_SIZE:]
        variant = _VARIANT[int(mine[16], 16) & 3]
        return f"urn:uuid:{mine[:8]}-{mine[8:12]}-4{mine[13:16]}-{variant}{mine[17:20]}-{mine[20:]}"

    def forget(self) -> None:
        """Use none of the random bytes that are left. In a child no thread holds the lock, whoever held it before."""
        self._lock = threading.Lock()
        self._raw = b""


_IDS = FreshIds()
os.register_at_fork(after_in_child=_IDS.forget)


def fresh_id() -> str:
    """An id that nothing else in all the world has."""
    return _IDS.next()
