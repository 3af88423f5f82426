"""Unique request ids: random UUIDs (RFC 9562, version 4) as URNs, generated in batches to save system calls.

An id must never repeat, also not between a process and its fork: a forked child discards the ids that were prepared
before the fork.
"""

from __future__ import annotations

import os

_BATCH = 16
_UUID_BYTES = 16
_VARIANT = "89ab"


class RequestIdPool:
    """A pool of prepared request ids. Thread-safe."""

    def __init__(self) -> None:
        self._ready: list[str] = []

    def next(self) -> str:
        """A new id. An empty pool is refilled by the calling thread; each id is used once because `list.pop` is
        atomic."""
        try:
            return self._ready.pop()
        except IndexError:
            raw = os.urandom(_BATCH * _UUID_BYTES)
            first, *spare = (_urn(raw[begin : begin + _UUID_BYTES].hex()) for begin in range(0, len(raw), _UUID_BYTES))
            self._ready += spare
            return first

    def discard(self) -> None:
        """Discard all prepared ids."""
        self._ready = []


def _urn(digits: str) -> str:
    """The UUID of version 4 with these 32 random hexadecimal digits, as a URN."""
    variant = _VARIANT[int(digits[16], 16) & 3]
    return f"urn:uuid:{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"


_IDS = RequestIdPool()
os.register_at_fork(after_in_child=_IDS.discard)


def new_request_id() -> str:
    """A globally unique request id."""
    return _IDS.next()
