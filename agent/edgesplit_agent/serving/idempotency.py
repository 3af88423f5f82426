"""Each request id is answered once: a retry joins the request that runs, or gets the very answer that was given.

An id stands for one request together with what it carries (`key_of` adds a checksum of the tensors): a client that
numbers its requests 1, 1, 1 asks three different things and gets three answers. An id that is a UUID's URN, as
`edgesplit.Client` makes them, is one request's by its own promise, and its tensors are not read for a checksum. Bounded
in entries and in bytes held.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from edgesplit.errors import Busy, DeadlineExceeded, InferenceFailed, LinkError
from edgesplit.lazy_import import later
from edgesplit.runtime import Tensor

if TYPE_CHECKING:
    import numpy as np
else:
    np = later("numpy")

T = TypeVar("T")
Key = tuple[object, ...]
_UNIQUE = re.compile(r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def key_of(model: str, request_id: str, inputs: Mapping[str, Tensor]) -> Key:
    """What makes two requests the same one."""
    shapes = tuple((name, tensor.shape) for name, tensor in sorted(inputs.items()))
    if _UNIQUE.fullmatch(request_id):
        return (model, request_id, shapes)
    return (model, request_id, shapes, tuple(zlib.crc32(_bytes(inputs[name])) for name, _ in shapes))


def _bytes(tensor: Tensor) -> bytes | memoryview:
    if tensor.dtype == object:
        return repr(tensor.tolist()).encode()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


class _Running(Generic[T]):
    """One request, until it is over and from then on: cheaper than a Future, for nearly nobody ever waits for it."""

    __slots__ = ("error", "is_over", "over", "result")

    def __init__(self) -> None:
        self.over = threading.Lock()
        self.over.acquire()
        self.is_over = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def end(self) -> None:
        """It has its result, or its error."""
        self.is_over = True
        self.over.release()


def _bare(error: BaseException) -> BaseException:
    """The error without its traceback, which holds everything that the request carried."""
    try:
        return copy(error)
    except Exception:  # an error that wants other words than its text cannot be copied: its text is what matters
        return InferenceFailed(str(error))


class Once(Generic[T]):
    """Recent answers and running requests by key."""

    def __init__(
        self, entries: int = 1024, held_bytes: int = 32 * 2**20, size_of: Callable[[T], int] = lambda _: 0
    ) -> None:
        self._entries = entries
        self._held_bytes = held_bytes
        self._size_of = size_of
        self._lock = threading.Lock()
        self._running: OrderedDict[Key, _Running[T]] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._held = 0
        self.joined = 0
        """Requests that were given another one's answer."""

    def answer(self, key: Key, wait_s: float, work: Callable[[], T]) -> T:
        """Run `work`, or wait for (or repeat) what it gave before. A LinkError is not kept: its retry may run again."""
        with self._lock:
            running = self._running.get(key)
            mine = running is None
            if running is None:
                running = self._running[key] = _Running()
            else:
                self.joined += 1
        if not mine:
            return self._join(running, wait_s)
        return self._run(key, running, work)

    @staticmethod
    def _join(running: _Running[T], wait_s: float) -> T:
        if not running.over.acquire(timeout=max(0.0, wait_s)):
            raise DeadlineExceeded("the request with this id still runs at the retry's deadline")
        running.over.release()  # for whoever joins next
        if running.error is not None:
            raise _bare(running.error)
        return cast(T, running.result)

    def _run(self, key: Key, running: _Running[T], work: Callable[[], T]) -> T:
        try:
            result = running.result = work()
        except BaseException as error:
            running.error = _bare(error)
            kept = isinstance(error, Exception) and not isinstance(error, (LinkError, Busy))
            self._finished(key, running, 0 if kept else None)
            raise
        self._finished(key, running, self._size_of(result))
        return result

    def _finished(self, key: Key, running: _Running[T], size: int | None) -> None:
        """Keep it for its retry, which comes from now on, however long ago it began; with a size of None, do not."""
        with self._lock:
            if size is None:
                self._running.pop(key, None)
            else:
                self._running.move_to_end(key)
                self._sizes[key] = size
                self._held += size
        running.end()
        self._trim()

    def _trim(self) -> None:
        """Forget those that finished longest ago beyond the bounds; a running one is never forgotten."""
        with self._lock:
            while len(self._running) > self._entries or self._held > self._held_bytes:
                oldest = next((key for key, running in self._running.items() if running.is_over), None)
                if oldest is None:
                    return
                del self._running[oldest]
                self._held -= self._sizes.pop(oldest, 0)
