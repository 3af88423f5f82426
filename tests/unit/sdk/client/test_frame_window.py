"""The window of a stream: which frames are taken, started, dropped and returned, decided without threads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.client.answer import Answer
from edgesplit.client.frame_window import FrameWindow, StreamSettings
from edgesplit.errors import Dropped, InferenceFailed, UsageError
from edgesplit.oip.options import Drop, InferOptions


def answer(number: int) -> Answer:
    return Answer({}, None, str(number))


def given_out(window: FrameWindow[int]) -> list[tuple[int, str]]:
    """Everything that can be given out now, by its kind."""
    out = []
    while (given := window.next_result()) is not None:
        out.append((given[0], type(given[1]).__name__))
    return out


def test_source_waits_until_an_answer_was_returned() -> None:
    """Two in flight: the third frame is read only when the first answer was taken."""
    window: FrameWindow[int] = FrameWindow(2, "none")
    for number in (0, 1):
        assert window.can_accept
        window.add(number)
        assert window.start_next() == (number, number)
    assert not window.can_accept
    window.set_result(1, answer(1))
    assert window.next_result() is None and not window.can_accept
    window.set_result(0, answer(0))
    assert not window.can_accept
    assert window.next_result() == (0, answer(0))
    assert window.can_accept


def test_policy_oldest_replaces_the_waiting_frame() -> None:
    """One in flight, one waiting: each new frame replaces the waiting one; a frame in flight is never dropped."""
    window: FrameWindow[int] = FrameWindow(1, "oldest")
    window.add(0)
    assert window.start_next() == (0, 0)
    for number in (1, 2, 3):
        assert window.can_accept
        window.add(number)
        assert window.start_next() is None
    window.set_result(0, answer(0))
    assert given_out(window) == [(0, "Answer"), (1, "Dropped"), (2, "Dropped")]
    assert window.start_next() == (3, 3)


def test_policy_newest_drops_the_arriving_frame() -> None:
    """The first frame that finds the window full waits; all later ones are dropped."""
    window: FrameWindow[int] = FrameWindow(1, "newest")
    for number in range(4):
        window.add(number)
        window.start_next()
    window.set_result(0, answer(0))
    assert window.start_next() is None  # its answer was not taken away yet
    assert given_out(window) == [(0, "Answer")]
    assert window.start_next() == (1, 1)
    window.set_result(1, answer(1))
    assert given_out(window) == [(1, "Answer"), (2, "Dropped"), (3, "Dropped")]


def test_dropped_frames_of_a_slow_consumer_take_bounded_memory() -> None:
    """A hundred thousand dropped frames between two answers are one entry, and each is still reported in its turn."""
    window: FrameWindow[int] = FrameWindow(1, "oldest")
    for number in range(100_000):
        window.add(number)
        window.start_next()
    assert len(window._entries) <= 3
    window.set_result(0, answer(0))
    window.end_source()
    out = given_out(window)
    assert out[0] == (0, "Answer") and len(out) == 99_999 and {kind for _, kind in out[1:]} == {"Dropped"}
    assert window.start_next() == (99_999, 99_999) and not window.is_over


def test_frame_dropped_by_the_server_is_a_result() -> None:
    """`Dropped` from the server is passed on as it came."""
    window: FrameWindow[int] = FrameWindow(2, "oldest")
    window.add(0)
    window.start_next()
    window.set_result(0, Dropped("elsewhere"))
    given = window.next_result()
    assert given is not None and str(given[1]) == "elsewhere"


@given(seed=st.integers(0, 2**32), in_flight=st.integers(1, 4), drop=st.sampled_from(["none", "oldest", "newest"]))
def test_each_frame_is_returned_once_and_in_order(seed: int, in_flight: int, drop: Drop) -> None:
    """Random steps: never more in flight than allowed, no number left out or repeated, nothing dropped by `none`."""
    rng = random.Random(seed)
    window: FrameWindow[int] = FrameWindow(in_flight, drop)
    taken, running, out = 0, [], []
    for _ in range(200):
        step = rng.choice("tbfg")
        if step == "t" and window.can_accept and taken < 40:
            window.add(taken)
            taken += 1
        elif step == "b" and (begun := window.start_next()) is not None:
            running.append(begun[0])
            assert len(running) <= in_flight
        elif step == "f" and running:
            number = running.pop(rng.randrange(len(running)))
            window.set_result(number, answer(number) if rng.random() < 0.8 else InferenceFailed("no"))
        elif step == "g" and (given_one := window.next_result()) is not None:
            out.append(given_one)
    window.end_source()
    while not window.is_over:
        while (begun := window.start_next()) is not None:
            running.append(begun[0])
        while running:
            window.set_result(number := running.pop(), answer(number))
        while (given_one := window.next_result()) is not None:
            out.append(given_one)
    assert [number for number, _ in out] == list(range(taken))
    assert all(result.id == str(number) for number, result in out if isinstance(result, Answer))
    assert drop != "none" or not any(isinstance(result, Dropped) for _, result in out)


@pytest.mark.parametrize("wrong", [{"in_flight": 0}, {"in_flight": 65}, {"drop": "all"}, {"errors": "hide"},
                                   {"deadline_s": float("nan")}])  # fmt: skip
def test_invalid_stream_settings_are_refused(wrong: dict[str, object]) -> None:
    """Before a frame is taken."""
    with pytest.raises(UsageError):
        StreamSettings(**{"model": "m", "in_flight": 1, "drop": "none", "deadline_s": 1.0, "errors": "raise", **wrong})  # type: ignore[arg-type]


def test_frame_carries_its_stream_and_drop_policy() -> None:
    """With the application's other options."""
    settings = StreamSettings("m", 1, "oldest", 1.0, "raise", options=InferOptions(hedge="never"))
    told = settings.request("cam", {"x": b"1"}).parameters
    assert told == {"edgesplit_stream": "cam", "edgesplit_drop": "oldest", "edgesplit_hedge": "never"}
    with pytest.raises(UsageError, match="list"):
        settings.request("cam", [1])
