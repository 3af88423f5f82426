"""Event loop of a process with a rotating leader: one thread at a time serves all sockets, and runs models in between.

A request that one thread reads, runs and answers costs no thread switch and no wait for the interpreter lock, so the
leader executes short runs itself. Before a long run it transfers leadership, or passes the work to another thread; if a
run takes longer than expected, a watchdog gives leadership to another thread, which serves the sockets while the run
continues or hangs (docs/decisions/0041). Callbacks registered or posted here are called by the leader, one at a time;
an exception is logged and ends nothing. Linux only (epoll, eventfd).
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
"""Epoll events of a socket, edge-triggered: each change is reported once, so a socket is registered only once."""
GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
READABLE = select.EPOLLIN | GONE
WATCHDOG_S = 0.01
"""A run longer than this keeps the leader away too long: another thread takes over within twice this time."""
IDLE_CHECKS = 100
"""Watchdog checks without a run after which it sleeps until the next run begins."""
MAX_IDLE_THREADS = 4
"""Most idle threads kept for later work."""
_MAX_EVENTS = 256
_ident = threading.get_ident
_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")
Call = Callable[[], object]


# Leadership. Exactly one thread, the leader, polls epoll and calls every callback, so connections, links and timers
# need no locks. A thread is in one of three states, and only these transitions exist:
#
#   idle -> leader      woken by `transfer_leadership` or by the watchdog
#   idle -> working     woken by `run_in_thread`
#   leader -> working   after `transfer_leadership`, or when the watchdog replaced it in the middle of `run_watched`
#   working -> idle     when the work is done; it does not become the leader again by itself
#
# `_leader` is written under `_lock`, and read without it: a thread only asks whether it is the leader itself, and only
# the leader (`transfer_leadership`) or the watchdog, while the leader is inside `run_watched`, changes that.
class _LoopThread:
    """A thread of the loop: it leads, does other work, or is idle."""

    __slots__ = ("ident", "thread", "wake", "work")

    def __init__(self) -> None:
        self.ident = 0
        self.work: Call | None = None
        self.wake = threading.Lock()  # a binary semaphore: released once to wake the thread
        self.wake.acquire()
        self.thread: threading.Thread | None = None


class EventLoop:
    """The sockets of a process and the threads that serve them."""

    def __init__(
        self,
        on_turn_end: Call,
        on_timer: Callable[[float], float],
        ends_turn: Callable[[int], bool] = lambda left: False,
    ) -> None:
        """`on_turn_end` is called when all ready sockets have been served; it may use `run_watched` or
        `transfer_leadership`. `on_timer` is called with the time when the moment it last returned has passed, and
        returns the next one. `ends_turn` is called with the number of ready sockets left, and ends the turn early if
        True: they are served in the next turn."""
        self._on_turn_end = on_turn_end
        self._ends_turn = ends_turn
        self._ready: deque[tuple[int, int]] = deque()
        self._on_timer = on_timer
        self._timer_at = math.inf
        self._epoll = select.epoll()
        self._wakeup_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup_fd, select.EPOLLIN | select.EPOLLET)
        self._watched: dict[int, Callable[[int], object]] = {}
        self._posted: deque[Call] = deque()
        self._is_polling = False
        self._lock = threading.Lock()
        self._threads: set[_LoopThread] = set()
        self._idle: list[_LoopThread] = []
        self._leader: _LoopThread | None = None
        self._is_stopped = False
        self._watchdog = _Watchdog(self._replace_leader)

    def start(self) -> None:
        """Start the first leader and the watchdog."""
        with self._lock:
            self._leader = self._new_thread()
            self._leader.wake.release()
        self._watchdog.start()

    def stop(self, within_s: float) -> None:
        """Stop: no more callbacks. Threads that do other work end when it is done; waits at most `within_s` seconds for
        them."""
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
            threads = list(self._threads)
            for thread in self._idle:
                thread.wake.release()
            self._idle.clear()
        self._watchdog.stop()
        self._wake()
        deadline = monotonic() + within_s
        for thread in threads:
            if thread.thread is not None and thread.thread is not threading.current_thread():
                thread.thread.join(max(0.1, deadline - monotonic()))
        self._watchdog.join(within_s)
        # Closed only if no thread is left: one that still runs may use the descriptors once more.
        if not any(thread.thread is not None and thread.thread.is_alive() for thread in threads):
            self._is_polling = False
            self._epoll.close()
            os.close(self._wakeup_fd)

    @property
    def is_leader(self) -> bool:
        """Whether the calling thread leads."""
        leader = self._leader
        return leader is not None and leader.ident == _ident()

    # Sockets, calls and timers, all served by the leader

    def watch(self, descriptor: int, ready: Callable[[int], object]) -> None:
        """Call `ready` with epoll's events of `descriptor`. Leader only."""
        self._watched[descriptor] = ready
        self._epoll.register(descriptor, EDGES)

    def unwatch(self, descriptor: int) -> None:
        """Stop watching `descriptor`, which is still open. Leader only."""
        if self._watched.pop(descriptor, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(descriptor)
            # Pending events must not reach the next connection, which may get the same descriptor number.
            if self._ready:
                self._ready = deque(event for event in self._ready if event[0] != descriptor)

    def call_soon(self, call: Call) -> None:
        """Have the leader call `call` soon. From any thread."""
        # Append first, then check: the leader sets `_is_polling` before it looks at `_posted`, so either it sees the
        # call or it is woken here. A surplus wake-up is harmless.
        self._posted.append(call)
        if self._is_polling and not self._is_stopped:
            self._is_polling = False
            self._wake()

    def wake_by(self, when: float) -> None:
        """Call the timer callback at time `when` at the latest. Leader only."""
        self._timer_at = min(self._timer_at, when)

    # Long work

    def run_in_thread(self, work: Call) -> None:
        """Run `work` in another thread, or here if no thread is available. From any thread."""
        hand = self._idle_or_new_thread()
        if hand is None:
            _call_logged(work)
            return
        hand.work = work
        hand.wake.release()

    def transfer_leadership(self) -> bool:
        """Transfer leadership to another thread, so that this one may do long work. Leader only; False if no thread is
        available."""
        hand = self._idle_or_new_thread()
        if hand is None:
            return False
        # Set before the new leader is woken: from here on this thread touches no connection.
        with self._lock:
            self._leader = hand
        hand.wake.release()
        return True

    def run_watched(self, work: Callable[[_Argument], _Result], argument: _Argument) -> _Result:
        """`work(argument)`, called in this thread; if it takes long, another thread becomes the leader for good."""
        if not self.is_leader:  # replaced already, or never the leader: nothing to watch
            return work(argument)
        self._watchdog.on_run_start()
        try:
            return work(argument)
        finally:
            # Under the lock: the watchdog either sees that the run is over, or has replaced the leader before. In the
            # latter case the thread finds that it no longer leads, and becomes idle when its work is done; the watch
            # may be over its successor by then.
            with self._lock:
                if self.is_leader:
                    self._watchdog.since = 0.0

    def _replace_leader(self, since: float) -> None:
        """Watchdog callback: the leader has been in a run since `since`; give leadership to another thread."""
        hand = self._idle_or_new_thread()
        if hand is None:
            return
        # The run may have ended, or another one begun, while a thread was found: `since` identifies the run.
        with self._lock:
            is_away = self._watchdog.since == since and not self._is_stopped
            if is_away:
                self._watchdog.since, self._leader = 0.0, hand
            else:  # too late: keep the thread for later
                self._idle.append(hand)
        if is_away:
            hand.wake.release()

    # Threads

    def _idle_or_new_thread(self) -> _LoopThread | None:
        """An idle or new thread; None if none is available."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            try:
                return None if self._is_stopped else self._new_thread()
            except RuntimeError as error:
                log.warning("no further thread: %s", error)
                return None

    def _new_thread(self) -> _LoopThread:
        """Start a thread. The caller holds the lock."""
        hand = _LoopThread()
        hand.thread = threading.Thread(target=self._thread_main, args=(hand,), name="serving", daemon=True)
        hand.thread.start()
        self._threads.add(hand)
        return hand

    def _thread_main(self, thread: _LoopThread) -> None:
        """Body of every thread: work, lead, and wait to be given either."""
        thread.ident = _ident()
        staying = True
        while staying:
            thread.wake.acquire()
            work, thread.work = thread.work, None
            if work is not None:
                _call_logged(work)
            while self._leader is thread and not self._is_stopped:
                self._run_turn()
            with self._lock:
                staying = not self._is_stopped and len(self._idle) < MAX_IDLE_THREADS
                if staying:
                    self._idle.append(thread)
                else:
                    self._threads.discard(thread)

    def _run_turn(self) -> None:
        """One turn of the leader: sockets, posted calls, timer, then `on_turn_end`."""
        # `_is_polling` is set before `_posted` is read, see `call_soon`.
        self._is_polling = True
        wait_s = 0.0 if self._posted or self._ready else max(0.0, self._timer_at - monotonic())
        self._ready += self._epoll.poll(-1 if wait_s == math.inf else wait_s, _MAX_EVENTS)
        self._is_polling = False
        while self._ready:
            descriptor, events = self._ready.popleft()
            ready = self._watched.get(descriptor)
            if ready is not None:
                try:
                    ready(events)
                except Exception:  # the other connections must be served nevertheless
                    log.exception("a connection failed")
            if self._ends_turn(len(self._ready)):  # run before reading on (docs/decisions/0041)
                break
        for _ in range(len(self._posted)):  # calls posted by these run in the next turn, after the sockets
            _call_logged(self._posted.popleft())
        # The timer callback returns its next time; calls to `wake_by` meanwhile may set an earlier one.
        if self._timer_at != math.inf and (now := monotonic()) >= self._timer_at:
            self._timer_at = math.inf
            self.wake_by(self._on_timer(now))
        _call_logged(self._on_turn_end)

    def _wake(self) -> None:
        """Wake the leader from epoll."""
        os.eventfd_write(self._wakeup_fd, 1)


class _Watchdog:
    """Watchdog: detects a leader that spends too long in a run. Sleeps while there are no runs."""

    def __init__(self, replace_leader: Callable[[float], None]) -> None:
        self.since = 0.0
        """When the leader began its run; 0 while it is not in one. Cleared under the loop's lock."""
        self._replace_leader = replace_leader
        self._runs = 0
        self._is_sleeping = False
        self._wake = threading.Lock()
        self._wake.acquire()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._watch, name="watching", daemon=True)

    def start(self) -> None:
        """Start the watchdog's thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog's thread."""
        self._is_stopped = True
        with suppress(RuntimeError):  # released already
            self._wake.release()

    def join(self, within_s: float) -> None:
        """Wait at most `within_s` seconds for the thread."""
        if self._thread.is_alive():
            self._thread.join(within_s)

    def on_run_start(self) -> None:
        """The leader begins a run."""
        self._runs += 1
        self.since = monotonic()
        if self._is_sleeping:
            self._is_sleeping = False
            self._wake.release()

    def _watch(self) -> None:
        runs_seen, idle_checks = 0, 0
        while not self._is_stopped:
            self._wake.acquire(timeout=-1 if self._is_sleeping else WATCHDOG_S)
            # The check interval equals the limit, so a leader is replaced after one to two limits: 10 to 20 ms.
            since = self.since
            if since and monotonic() - since > WATCHDOG_S:
                self._replace_leader(since)
            idle_checks = 0 if self._runs != runs_seen else idle_checks + 1
            runs_seen = self._runs
            if idle_checks >= IDLE_CHECKS:
                # Set first, then check `since` again: a run that began in between has not seen the flag and would not
                # wake the watchdog.
                self._is_sleeping = True
                if self.since:
                    self._is_sleeping = False


def _call_logged(call: Call) -> None:
    try:
        call()
    except Exception:  # the leader must survive its callbacks
        log.exception("serving failed")
