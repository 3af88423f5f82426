"""One thread at a time looks after all sockets of a process, and runs models in between: whoever does leads.

A request that one thread reads, runs and answers wakes nobody and waits for no interpreter lock. So the leader runs
short runs itself. Before what may take long it hands the lead over, or leaves the work to another thread; and where it
is away longer than it thought, a watcher gives the lead to another thread, which then looks after the sockets while the
run goes on, or hangs. Promises: what is registered here, and what is posted, is called by the leader, one thing at a
time, whoever that is; a call that raises is logged and ends nothing. Linux only (epoll, eventfd).
"""

from __future__ import annotations

import logging
import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TypeVar

log = logging.getLogger(__name__)

EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
"""What a socket is watched for: each change is told once, so nothing has to be registered again."""
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
READABLE = select.EPOLLIN | GONE
PATIENCE_S = 0.01
"""A run that takes longer takes the leader away too long: within two of these another one leads."""
RESTS_AFTER = 100
"""So often the watcher looks without seeing a run before it sleeps until there is one."""
IDLE = 4
"""Threads that are kept for what comes."""
_AT_ONCE = 256
_ident = threading.get_ident
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")
Call = Callable[[], object]


class _Hand:
    """A thread that leads, or does something, or waits for either."""

    __slots__ = ("ident", "thread", "wake", "work")

    def __init__(self) -> None:
        self.ident = 0
        self.work: Call | None = None
        self.wake = threading.Lock()
        self.wake.acquire()
        self.thread: threading.Thread | None = None


class Loop:
    """The sockets of a process, and its threads."""

    def __init__(
        self,
        at_end_of_turn: Call,
        look: Callable[[float], float],
        is_enough: Callable[[int], bool] = lambda left: False,
    ) -> None:
        """`at_end_of_turn`: called when what was ready has been looked after; it may go `away` or `hand_over`.
        `look`: called with the time, once the moment that it named last has passed. `is_enough`: whether the turn ends
        although so many are left that are ready, which are the first of the next turn then."""
        self._at_end_of_turn = at_end_of_turn
        self._is_enough = is_enough
        self._ready: deque[tuple[int, int]] = deque()
        self._look = look
        self._look_at = math.inf
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)
        self._watched: dict[int, Callable[[int], object]] = {}
        self._posted: deque[Call] = deque()
        self._sleeps = False
        self._lock = threading.Lock()
        self._hands: set[_Hand] = set()
        self._idle: list[_Hand] = []
        self._leader: _Hand | None = None
        self._is_over = False
        self._watcher = _Watcher(self._take_over)

    def start(self) -> None:
        """A thread leads from now on."""
        with self._lock:
            self._leader = self._hand()
            self._leader.wake.release()
        self._watcher.start()

    def stop(self, within_s: float) -> None:
        """End: nothing is called any more. Threads that do something else end when that is done."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            hands = list(self._hands)
            for one in self._idle:
                one.wake.release()
            self._idle.clear()
        self._watcher.stop()
        self._ring()
        deadline = monotonic() + within_s
        for one in hands:
            if one.thread is not None and one.thread is not threading.current_thread():
                one.thread.join(max(0.1, deadline - monotonic()))
        self._watcher.join(within_s)
        if not any(one.thread is not None and one.thread.is_alive() for one in hands):  # else one may look once more
            self._sleeps = False
            self._epoll.close()
            os.close(self._bell)

    @property
    def is_mine(self) -> bool:
        """Does this thread lead?"""
        leader = self._leader
        return leader is not None and leader.ident == _ident()

    # What the leader looks after

    def watch(self, descriptor: int, ready: Callable[[int], object]) -> None:
        """Call `ready` with epoll's events of this descriptor, each once. By the leader."""
        self._watched[descriptor] = ready
        self._epoll.register(descriptor, EDGES)

    def forget(self, descriptor: int) -> None:
        """Do not any more; the descriptor is still open. By the leader."""
        if self._watched.pop(descriptor, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)
            if self._ready:  # what was told of this one is not the next one's that has the number
                self._ready = deque(one for one in self._ready if one[0] != descriptor)

    def post(self, call: Call) -> None:
        """Have the leader call it soon. From any thread."""
        self._posted.append(call)
        if self._sleeps and not self._is_over:
            self._sleeps = False
            self._ring()

    def look_by(self, when: float) -> None:
        """Look by then at the latest. By the leader."""
        self._look_at = min(self._look_at, when)

    # What takes long

    def lend(self, work: Call) -> None:
        """Have another thread do it; where there is none to be had it is done here. From any thread."""
        hand = self._another()
        if hand is None:
            _guarded(work)
            return
        hand.work = work
        hand.wake.release()

    def hand_over(self) -> bool:
        """Another thread leads from now on, and this one does something long. By the leader; False where no thread is
        to be had."""
        hand = self._another()
        if hand is None:
            return False
        with self._lock:
            self._leader = hand
        hand.wake.release()
        return True

    def away(self, work: Callable[[_Given], _Made], given: _Given) -> _Made:
        """What `work` makes of that; if it takes long another thread leads meanwhile, and from then on."""
        if not self.is_mine:
            return work(given)
        self._watcher.begins()
        try:
            return work(given)
        finally:
            with self._lock:
                self._watcher.since = 0.0

    def _take_over(self, since: float) -> None:
        """The leader has been away since then, and longer than it should: give the lead to another one."""
        hand = self._another()
        if hand is None:
            return
        with self._lock:
            is_away = self._watcher.since == since and not self._is_over
            if is_away:
                self._watcher.since, self._leader = 0.0, hand
            else:
                self._idle.append(hand)
        if is_away:
            hand.wake.release()

    # Threads

    def _another(self) -> _Hand | None:
        """One that has nothing to do, or a new one."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            try:
                return None if self._is_over else self._hand()
            except RuntimeError as error:
                log.warning("no further thread: %s", error)
                return None

    def _hand(self) -> _Hand:
        """A new one. Holds the lock."""
        hand = _Hand()
        hand.thread = threading.Thread(target=self._work, args=(hand,), name="serving", daemon=True)
        hand.thread.start()
        self._hands.add(hand)
        return hand

    def _work(self, hand: _Hand) -> None:
        hand.ident = _ident()
        staying = True
        while staying:
            hand.wake.acquire()
            work, hand.work = hand.work, None
            if work is not None:
                _guarded(work)
            while self._leader is hand and not self._is_over:
                self._turn()
            with self._lock:
                staying = not self._is_over and len(self._idle) < IDLE
                if staying:
                    self._idle.append(hand)
                else:
                    self._hands.discard(hand)

    def _turn(self) -> None:
        """All that is ready, and then what may be done with it."""
        self._sleeps = True
        wait_s = 0.0 if self._posted or self._ready else max(0.0, self._look_at - monotonic())
        self._ready += self._epoll.poll(-1 if wait_s == math.inf else wait_s, _AT_ONCE)
        self._sleeps = False
        while self._ready:
            descriptor, what = self._ready.popleft()
            ready = self._watched.get(descriptor)
            if ready is not None:
                try:
                    ready(what)
                except Exception:  # the other connections are looked after all the same
                    log.exception("a connection failed")
            if self._is_enough(len(self._ready)):
                break
        for _ in range(len(self._posted)):  # what these post has its turn after the sockets
            _guarded(self._posted.popleft())
        if self._look_at != math.inf and (now := monotonic()) >= self._look_at:
            self._look_at = math.inf
            self.look_by(self._look(now))
        _guarded(self._at_end_of_turn)

    def _ring(self) -> None:
        os.eventfd_write(self._bell, 1)


class _Watcher:
    """Looks whether the leader has been away for too long, as long as there is anything to look at."""

    def __init__(self, take_over: Callable[[float], None]) -> None:
        self.since = 0.0
        """When the leader went away; 0 while it leads. Cleared under the loop's lock."""
        self._take_over = take_over
        self._times = 0
        self._rests = False
        self._rouse = threading.Lock()
        self._rouse.acquire()
        self._is_over = False
        self._thread = threading.Thread(target=self._watch, name="watching", daemon=True)

    def start(self) -> None:
        """Watch."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._is_over = True
        with suppress(RuntimeError):  # roused already
            self._rouse.release()

    def join(self, within_s: float) -> None:
        """Until it has ended."""
        if self._thread.is_alive():
            self._thread.join(within_s)

    def begins(self) -> None:
        """The leader goes away."""
        self._times += 1
        self.since = monotonic()
        if self._rests:
            self._rests = False
            self._rouse.release()

    def _watch(self) -> None:
        seen, quiet = 0, 0
        while not self._is_over:
            self._rouse.acquire(timeout=-1 if self._rests else PATIENCE_S)
            since = self.since
            if since and monotonic() - since > PATIENCE_S:
                self._take_over(since)
            quiet = 0 if self._times != seen else quiet + 1
            seen = self._times
            if quiet >= RESTS_AFTER:
                self._rests = True  # and only then: whoever goes away from now on sees it
                if self.since:
                    self._rests = False


def _guarded(call: Call) -> None:
    try:
        call()
    except Exception:  # whoever leads goes on leading
        log.exception("serving failed")
