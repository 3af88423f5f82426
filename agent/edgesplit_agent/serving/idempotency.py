"""Idempotency: each request id is answered once; a retry joins the running request or receives the same answer again.

An id stands for one request together with its payload (`request_key` adds a checksum of the tensors): a client that
numbers its requests 1, 1, 1 sends three different requests and gets three answers. An id that is a UUID URN, as
`edgesplit.Client` makes them, is unique by its own promise, so its tensors are not read for a checksum. The cache is
bounded in entries and in bytes.
"""

from __future__ import annotations

import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from edgesplit.errors import DeadlineExceeded, InferenceFailed, LinkError, Unsure
from edgesplit.lazy_import import lazy_import
from edgesplit.runtime import Tensor

if TYPE_CHECKING:
    import numpy as np
else:
    np = lazy_import("numpy")

T = TypeVar("T")
Key = tuple[object, ...]
_UNIQUE = re.compile(r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def request_key(model: str, request_id: str, inputs: Mapping[str, Tensor]) -> Key:
    """The key by which two requests count as the same one."""
    shapes = tuple((name, tensor.shape) for name, tensor in sorted(inputs.items()))
    if _UNIQUE.fullmatch(request_id):
        return (model, request_id, shapes)
    return (model, request_id, shapes, tuple(zlib.crc32(_bytes(inputs[name])) for name, _ in shapes))


def _bytes(tensor: Tensor) -> bytes | memoryview:
    if tensor.dtype == object:
        return repr(tensor.tolist()).encode()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


class _Execution(Generic[T]):
    """One request, running or finished. A bare lock is cheaper than a Future, and hardly any request is ever joined."""

    __slots__ = ("error", "is_over", "over", "result")

    def __init__(self) -> None:
        self.over = threading.Lock()
        self.over.acquire()
        self.is_over = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def finish(self) -> None:
        """Mark the request as finished and wake the threads that joined it."""
        self.is_over = True
        self.over.release()


def _without_traceback(error: BaseException) -> BaseException:
    """A copy of the error without its traceback, which would keep everything that the request carried in memory."""
    try:
        return copy(error)
    except Exception:  # not every error can be copied; its text is what matters
        return InferenceFailed(str(error))


class IdempotencyCache(Generic[T]):
    """Cache of running requests and recent answers, by key. Thread-safe."""

    def __init__(
        self, entries: int = 1024, held_bytes: int = 32 * 2**20, size_of: Callable[[T], int] = lambda _: 0
    ) -> None:
        """At most `entries` entries whose answers hold at most `held_bytes`, as `size_of` measures them."""
        self._entries = entries
        self._held_bytes = held_bytes
        self._size_of = size_of
        self._lock = threading.Lock()
        self._executions: OrderedDict[Key, _Execution[T]] = OrderedDict()
        self._sizes: dict[Key, int] = {}
        self._held = 0
        self.joined = 0
        """Number of requests that received another request's answer."""

    def answer(self, key: Key, wait_s: float, work: Callable[[], T]) -> T:
        """Run `work`, or wait at most `wait_s` for (or repeat) the result of the same key.

        A LinkError and Unsure are not cached: a retry may run again. DeadlineExceeded if the joined request does not
        end in time.
        """
        with self._lock:
            running = self._executions.get(key)
            is_first = running is None
            if running is None:
                running = self._executions[key] = _Execution()
            else:
                self.joined += 1
        if not is_first:
            return self._join(running, wait_s)
        return self._run(key, running, work)

    @staticmethod
    def _join(execution: _Execution[T], wait_s: float) -> T:
        if not execution.over.acquire(timeout=max(0.0, wait_s)):
            raise DeadlineExceeded("the request with this id still runs at the retry's deadline")
        execution.over.release()  # for the next thread that joins
        if execution.error is not None:
            raise _without_traceback(execution.error)
        return cast(T, execution.result)

    def _run(self, key: Key, execution: _Execution[T], work: Callable[[], T]) -> T:
        try:
            result = execution.result = work()
        except BaseException as error:
            execution.error = _without_traceback(error)
            # A failure of the link may be over at the retry, so it runs again; any other error would come again.
            is_cached = isinstance(error, Exception) and not isinstance(error, (LinkError, Unsure))
            self._finished(key, execution, 0 if is_cached else None)
            raise
        self._finished(key, execution, self._size_of(result))
        return result

    def _finished(self, key: Key, execution: _Execution[T], size: int | None) -> None:
        """Cache the result for retries, counted from now however long ago the request began; a `size` of None: do not
        cache it."""
        with self._lock:
            if size is None:
                self._executions.pop(key, None)
            else:
                self._executions.move_to_end(key)
                self._sizes[key] = size
                self._held += size
        execution.finish()
        self._trim()

    def _trim(self) -> None:
        """Evict the entries that finished longest ago until the bounds hold; a running request is never evicted."""
        with self._lock:
            while len(self._executions) > self._entries or self._held > self._held_bytes:
                oldest = next((key for key, running in self._executions.items() if running.is_over), None)
                if oldest is None:
                    return
                del self._executions[oldest]
                self._held -= self._sizes.pop(oldest, 0)
