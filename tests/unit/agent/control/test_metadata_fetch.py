"""Metadata over MQTT from a controller that means harm: what a device keeps and how long it waits are bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from edgesplit.errors import LinkError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import FetchReply
from edgesplit_agent.control.fetch_window import SLOW_RETRIEVAL_S
from edgesplit_agent.control.fetcher import MetadataFetcher

PATH = "metadata/timestamp.json"


class Answering:
    """A wire on which each request is answered at once by these pieces."""

    def __init__(self, answer: Callable[[], Iterator[FetchReply]], clock: Callable[[], float] = lambda: 0.0) -> None:
        self.fetcher = MetadataFetcher(self, "cam-1", (0.01, 0.01), clock=clock)
        self._answer = answer
        self.asked = 0
        self.most_held = 0

    def publish(self, topic: str, payload: bytes, *, correlation: bytes | None = None, **options: object) -> None:
        self.asked += 1
        for piece in self._answer():
            self.fetcher.on_message(messages.encode(piece), correlation)
            held = sum(map(len, self.fetcher._pieces.values()))
            self.most_held = max(self.most_held, held, len(self.fetcher._pieces))

    def subscribe(self, topics: object, qos: int = 1) -> None: ...

    def unsubscribe(self, topics: object) -> None: ...


def test_overlapping_pieces_never_cost_more_memory_than_the_file() -> None:
    """B8: a thousand pieces at a thousand offsets, each nearly the whole file, are not all kept; the file then is."""
    total = 60_000

    def answer() -> Iterator[FetchReply]:
        for at in range(1_000):
            yield FetchReply(PATH, at, total, b"x" * (total - at - 1))
            yield FetchReply(PATH, at, total, b"")
        yield FetchReply(PATH, 0, total, b"y" * total)

    wire = Answering(answer)
    assert wire.fetcher.fetch(PATH, total) == b"y" * total
    assert wire.most_held <= total


def test_metadata_that_drips_is_given_up() -> None:
    """Slow retrieval: a controller that sends a byte whenever patience is about to end does not hold a device."""
    now = [0.0]

    def slow_clock() -> float:
        now[0] += SLOW_RETRIEVAL_S / 4
        return now[0]

    def drip() -> Iterator[FetchReply]:
        yield FetchReply(PATH, 0, 1_000, b"x")

    wire = Answering(drip, slow_clock)
    with pytest.raises(LinkError, match="no response from the controller"):
        wire.fetcher.fetch(PATH, 1_000)
    assert wire.asked == 2


def test_the_same_piece_again_is_no_progress() -> None:
    """A piece that is repeated for ever keeps no fetch alive: patience counts from the last new byte."""

    def repeat() -> Iterator[FetchReply]:
        for _ in range(500):
            yield FetchReply(PATH, 0, 1_000, b"x")

    ticks = iter(range(10_000))
    wire = Answering(repeat, lambda: next(ticks) * 0.02)
    with pytest.raises(LinkError, match="no response from the controller"):
        wire.fetcher.fetch(PATH, 1_000)


def test_a_file_without_bytes_is_a_file() -> None:
    """An empty file is whole at once; one that is not there is told apart."""
    assert Answering(lambda: iter([FetchReply(PATH, 0, 0, b"")])).fetcher.fetch(PATH, 10) == b""
    with pytest.raises(FileNotFoundError):
        Answering(lambda: iter([FetchReply(PATH, 0, -1, b"")])).fetcher.fetch(PATH, 10)
