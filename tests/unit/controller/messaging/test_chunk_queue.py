"""The chunk queue: when a requested chunk is sent, and to which devices."""

from __future__ import annotations

from collections import Counter

import pytest

from edgesplit_controller.messaging.chunk_queue import (
    CROWD,
    GATHER_S,
    LONGEST_GATHER_S,
    RECENT_S,
    REPEAT_S,
    WAITING_CHUNKS_PER_DEVICE,
    ChunkQueue,
    Due,
    gather_s,
)

LATER_S = LONGEST_GATHER_S


def test_a_single_device_is_served_immediately() -> None:
    """There is no gathering delay while no other device fetches."""
    chunks = ChunkQueue()
    chunks.request("cam", "r", ("1", "2"), now=10.0)
    assert chunks.take(10.0) == [Due("1"), Due("2")] and chunks.next_due() is None


def test_the_gathering_time_grows_with_the_number_of_devices() -> None:
    """None for a single device, the usual time for a few, at most a second for many."""
    waits = [gather_s(count) for count in (1, 2, 8, 50, 10_000)]
    assert waits == sorted(waits)
    assert (waits[0], waits[1], waits[2], waits[-1]) == (0.0, GATHER_S, GATHER_S, 1.0)


def test_simultaneous_requests_share_one_published_chunk() -> None:
    """Each chunk once for all requests within the gathering time; again for a request after it was sent."""
    chunks = ChunkQueue()
    chunks.request("cam-1", "r", ("0",), now=10.0)
    chunks.take(10.0)
    for number, device in enumerate(("cam-2", "cam-1", "cam-3")):
        chunks.request(device, "r", ("1", "2"), now=10.0 + number * 0.01)
    assert chunks.take(10.0 + GATHER_S - 0.001) == []
    assert chunks.next_due() == pytest.approx(10.0 + GATHER_S)
    assert chunks.take(10.0 + GATHER_S) == [Due("1"), Due("2")]
    chunks.request("cam-4", "r", ("1",), now=10.06)
    assert [chunk.sha256 for chunk in chunks.take(10.06 + GATHER_S)] == ["1"]


def test_a_past_fetch_adds_no_gathering_time() -> None:
    """A device that is the only one again is served immediately; other releases do not count."""
    chunks = ChunkQueue()
    chunks.request("cam-1", "r", ("1",), now=10.0)
    chunks.request("cam-2", "other", ("2",), now=10.0)
    assert chunks.take(10.0) == [Due("1"), Due("2")]
    chunks.request("cam-3", "r", ("3",), now=10.0 + RECENT_S + 0.1)
    assert chunks.take(10.0 + RECENT_S + 0.1) == [Due("3")]


CROWDED = [f"cam-{number}" for number in range(CROWD + 1)]


def test_a_late_request_is_sent_a_private_copy() -> None:
    """The shared copy was sent a moment ago: another one would reach every device whose first is still on a slow
    link."""
    chunks = ChunkQueue()
    for name in CROWDED:
        chunks.request(name, "r", ("1",), now=10.0, accepts_own_copy=True)
    assert chunks.take(10.0 + LATER_S) == [Due("1")]
    for name in CROWDED:  # they go on with the next one
        chunks.request(name, "r", ("2",), now=11.0, accepts_own_copy=True)
    chunks.request("late", "r", ("1",), now=11.0, accepts_own_copy=True)
    assert chunks.take(11.0 + LATER_S) == [Due("2"), Due("1", recipients=("late",))]


def test_a_small_group_shares_a_resent_chunk() -> None:
    """The others most likely missed it too, and one copy serves all of them."""
    chunks = ChunkQueue()
    for name in CROWDED[:20]:
        chunks.request(name, "r", ("1",), now=10.0, accepts_own_copy=True)
    assert chunks.take(10.0 + LATER_S) == [Due("1")]
    chunks.request("late", "r", ("1",), now=11.0, accepts_own_copy=True)
    assert chunks.take(11.0 + LATER_S) == [Due("1")]


def test_a_chunk_most_devices_missed_is_published_again() -> None:
    """One shared copy for all that lost it, instead of one for each."""
    chunks = ChunkQueue()
    for now in (10.0, 12.0):
        for name in CROWDED:
            chunks.request(name, "r", ("1",), now=now, accepts_own_copy=True)
        assert chunks.take(now + LATER_S) == [Due("1")]


def test_an_old_chunk_is_published_again() -> None:
    """The subscribers of now are not those of then."""
    chunks = ChunkQueue()
    for now in (10.0, 10.0 + REPEAT_S + LATER_S):
        for name in CROWDED:
            chunks.request(name, "r", ("2",), now=now, accepts_own_copy=True)
        chunks.request("cam", "r", ("1",), now=now, accepts_own_copy=True)
        assert Due("1") in chunks.take(now + LATER_S)


def test_an_older_agent_receives_shared_chunks_only() -> None:
    """Its request does not offer to take a private copy, so the shared copy serves it and all who ask with it."""
    chunks = ChunkQueue()
    for name in CROWDED:
        chunks.request(name, "r", ("1",), now=10.0, accepts_own_copy=True)
    chunks.take(10.0 + LATER_S)
    chunks.request("old", "r", ("1",), now=12.0)
    assert chunks.take(12.0 + LATER_S) == [Due("1")]


def test_shared_copies_are_limited_to_one_in_ten_seconds() -> None:
    """When ten thousand devices began over a minute, the broker had copied every chunk to all of them each second."""
    chunks, now = ChunkQueue(), 0.0
    sent: list[Due] = []
    for number in range(600):
        now = number * 0.1
        chunks.request(f"cam-{number}", "r", ("1",), now=now, accepts_own_copy=True)
        for other in range(max(0, number - 40), number):  # those before it are at it still, further on
            chunks.request(f"cam-{other}", "r", (f"{number - other + 1}",), now=now, accepts_own_copy=True)
        due = [chunk for chunk in chunks.take(now) if chunk.sha256 == "1"]
        sent += due if number > 3 * CROWD else []  # from when on they are a crowd
    to_all = sum(not item.recipients for item in sent)
    alone = Counter(name for item in sent for name in item.recipients)
    assert 0 < to_all <= now / REPEAT_S + 2
    assert sum(alone.values()) > 400 and set(alone.values()) == {1}


def test_a_repeated_request_is_queued_once() -> None:
    """Its share of the queue is what it waits for, and is free again after the answer."""
    chunks = ChunkQueue()
    names = [str(number) for number in range(WAITING_CHUNKS_PER_DEVICE)]
    assert chunks.request("cam", "r", names, now=1.0) == chunks.request("cam", "r", names, now=1.0) == 0
    assert chunks.request("cam", "r", ("more",), now=1.0) == 1
    assert len(chunks.take(1.0)) == len(names)
    assert chunks.request("cam", "r", names, now=2.0) == 0
