"""What a device asks for next, over links that are simulated in virtual time: filled, not flooded, nothing lost."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from edgesplit.limits import LIMITS
from edgesplit_agent.control.fetch_window import MAX_WINDOW_BYTES, OTHER_STREAM_HOLD_S, FetchWindow

SIZE = LIMITS.chunk_bytes


def release(count: int) -> dict[str, int]:
    return {f"{number:064x}": SIZE for number in range(count)}


@dataclass
class Link:
    """A server that sends what is asked for, in order, at a rate, after half a round trip, and loses some."""

    bytes_per_s: float
    rtt_s: float
    loss: float = 0.0
    seed: int = 0
    sent: int = 0
    most_flying: int = 0
    _free_at: float = 0.0
    _flying: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def ask(self, chunks: tuple[str, ...], now: float) -> None:
        for chunk in chunks:
            self.sent += 1
            begin = max(now + self.rtt_s / 2, self._free_at)
            self._free_at = begin + SIZE / self.bytes_per_s
            if self._random.random() >= self.loss:
                heapq.heappush(self._flying, (self._free_at + self.rtt_s / 2, chunk))
        self.most_flying = max(self.most_flying, len(self._flying))

    def run(self, window: FetchWindow, now: float = 0.0) -> float:
        """Until all has come, or the window gives up; the virtual time then."""
        while not window.is_done and not window.failure(now):
            while asked := window.next_request(now):
                assert len(asked) <= LIMITS.fetch_window_chunks
                self.ask(asked, now)
            due = self._flying[0][0] if self._flying else float("inf")
            look = max(window.next_event_at(now), now + 1e-6)
            if due <= look:
                now, chunk = heapq.heappop(self._flying)
                window.on_received(chunk, now)
            else:
                now = look
        return now


@pytest.mark.parametrize("rtt_s", [0.001, 0.05, 0.3])
@pytest.mark.parametrize("mbit", [0.5, 8, 50, 200])
def test_a_link_is_filled(mbit: float, rtt_s: float) -> None:
    """Nine tenths of its rate from the first ask to the last byte, and no chunk asked for twice."""
    link = Link(mbit * 125_000, rtt_s)
    seconds_of_bytes = 20.0
    window = FetchWindow(release(max(8, int(seconds_of_bytes * link.bytes_per_s / SIZE))), 0.0)
    took_s = link.run(window)
    assert window.is_done and window.repeated_requests == 0 and link.sent == len(window.wanted)
    held = MAX_WINDOW_BYTES / rtt_s  # what so many bytes on their way can fill
    assert window.received_bytes / took_s >= 0.9 * min(link.bytes_per_s, held)


def test_a_slow_link_is_not_flooded() -> None:
    """At 64 kbit/s a chunk takes 16 s: a handful is on its way, and patience is long enough for them."""
    link = Link(8_000, 0.2)
    window = FetchWindow(release(20), 0.0)
    link.run(window)
    assert window.is_done and link.most_flying <= 8 and window.repeated_requests == 0


@pytest.mark.parametrize("loss", [0.02, 0.2])
def test_what_is_lost_is_asked_for_again(loss: float) -> None:
    """All comes, and little comes twice."""
    link = Link(1e6, 0.05, loss)
    window = FetchWindow(release(300), 0.0)
    link.run(window)
    assert window.is_done
    assert link.sent <= len(window.wanted) * (1 + 4 * loss)


def test_a_link_that_is_dead_is_given_up() -> None:
    """After a few rounds of asking into silence."""
    window = FetchWindow(release(4), 0.0)
    assert Link(1e6, 0.05, loss=1.0).run(window) < 600
    assert window.failure(600)


def test_a_link_that_drips_is_given_up() -> None:
    """TUF: slow retrieval. A thousand bytes per second is no delivery, however steady."""
    window = FetchWindow(release(100), 0.0)
    end = Link(1_000, 0.05).run(window)
    assert not window.is_done and end < 1_000
    assert "bytes per second" in window.failure(end) or "no chunk received" in window.failure(end)


def test_a_cap_is_kept() -> None:
    """A quarter of what the link could: over the whole, and no burst beyond a second's worth."""
    link = Link(4e6, 0.05)
    window = FetchWindow(release(100), 0.0, cap_bytes_per_s=1e6)
    took_s = link.run(window)
    assert window.is_done and window.received_bytes / took_s <= 1e6 * 1.1
    assert window.received_bytes / took_s >= 0.8e6


@pytest.mark.parametrize("cap_mbit", [0.1, 1, 2, 4, 8, 20, 100])
@pytest.mark.parametrize("seed", range(4))
def test_no_ten_seconds_hold_more_than_the_cap(cap_mbit: float, seed: int) -> None:
    """B12: over any ten seconds at most 5 % more is asked for than the cap allows, or one chunk; stalls, losses and
    late looks at the clock change nothing, and a link that can is filled to nine tenths of the cap."""
    cap, source = cap_mbit * 125_000, random.Random(seed)
    window = FetchWindow(release(max(8, int(60 * cap / SIZE))), 0.0, cap_bytes_per_s=cap)
    asked: list[tuple[float, int]] = []
    flying: list[tuple[float, str]] = []
    now, stalled_until = 0.0, 0.0
    while not window.is_done and not window.failure(now):
        while batch := window.next_request(now):
            asked += [(now, SIZE)] * len(batch)
            for chunk in batch:
                if source.random() > 0.02:
                    heapq.heappush(flying, (max(now + source.uniform(0.01, 0.4), stalled_until), chunk))
        if source.random() < 0.005:
            stalled_until = now + source.uniform(0.0, 3.0)
        look = max(window.next_event_at(now), now + 1e-6) + source.choice([0.0, 0.0, source.uniform(0.0, 0.05)])
        now = min([look, *(max(due, now) for due, _ in flying[:1])])
        while flying and flying[0][0] <= now:
            window.on_received(heapq.heappop(flying)[1], now)
    assert window.is_done
    most = max(10 * cap * 1.05, 10 * cap + SIZE)
    for begin in range(len(asked)):
        end = begin
        while end < len(asked) and asked[end][0] < asked[begin][0] + 10:
            end += 1
        assert sum(size for _, size in asked[begin:end]) <= most
    print(f"seed {seed}: {window.received_bytes / now / cap:.2f} of the cap")


def test_who_hears_a_stream_of_others_asks_nothing() -> None:
    """Until a while after it has ended; then only for the gaps."""
    window = FetchWindow(release(10), 0.0)
    names = list(window.wanted)
    for number, chunk in enumerate(names[2:]):
        assert window.on_received(chunk, 0.1 * number)
        assert window.next_request(0.1 * number + 0.05) == ()
    assert window.next_request(0.7 + OTHER_STREAM_HOLD_S + 0.01) == tuple(names[:2])


def test_what_is_not_wanted_is_not_counted() -> None:
    """Foreign and doubled chunks."""
    window = FetchWindow(release(2), 0.0)
    first, _ = window.wanted
    window.next_request(0.0)
    assert (
        window.on_received(first, 0.1) and not window.on_received(first, 0.2) and not window.on_received("f" * 64, 0.3)
    )
    assert window.received_bytes == SIZE
