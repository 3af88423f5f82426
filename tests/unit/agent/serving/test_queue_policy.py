"""The device's processor queue: who is next, which frame is dropped, who is notified. No engine here."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import pytest

from edgesplit.errors import Busy, DeadlineExceeded, Dropped
from edgesplit.oip.options import Drop, InferOptions
from edgesplit_agent.serving.device_queue import DeviceQueue, Withdrawn
from edgesplit_agent.serving.queue_policy import FairShares, QueueEntry, entry_to_drop
from support.agent_engine import eventually

FAR = 1e9


def place(
    number: int = 0, *, drop: Drop = "none", queue: int | None = None, stream: str = "", model: str = "m",
    begun: bool = False, deadline: float = FAR,
) -> QueueEntry:  # fmt: skip
    return QueueEntry(
        model, InferOptions(stream=stream, drop=drop, queue=queue), deadline, number=number, has_begun=begun
    )


def test_no_frame_is_dropped_while_there_is_room() -> None:
    """Whatever the policies say."""
    here = [place(number, drop="oldest") for number in range(3)]
    for new in (place(9), place(9, drop="newest"), place(9, drop="oldest", queue=4)):
        assert entry_to_drop(new, here, room=4) is None


def test_full_queue_refuses_a_request_without_a_policy() -> None:
    """With Busy, to be retried. It displaces no other request, and none displaces it."""
    here = [place(1), place(2, drop="oldest")]
    with pytest.raises(Busy):
        entry_to_drop(place(9), here, room=2)
    with pytest.raises(Dropped):
        entry_to_drop(place(9, drop="oldest"), [place(1), place(2)], room=2)


def test_each_model_has_its_own_queue_bound() -> None:
    """Together the models have twice that."""
    flood = [place(number) for number in range(4)]
    assert entry_to_drop(place(9, model="n"), flood, room=4) is None
    with pytest.raises(Busy):
        entry_to_drop(place(9, model="n"), flood + [place(number, model="o") for number in range(4)], room=4)


def test_policy_newest_drops_the_arriving_frame() -> None:
    """Waiting frames are kept."""
    with pytest.raises(Dropped):
        entry_to_drop(place(9, drop="newest"), [place(1, drop="newest")], room=1)
    with pytest.raises(Dropped):
        entry_to_drop(place(9, drop="newest", queue=1), [place(1, drop="newest")], room=32)


def test_policy_oldest_drops_the_streams_oldest_waiting_frame() -> None:
    """Not one that runs or is offloaded, not another stream's, not another model's."""
    begun, other, foreign = (
        place(1, drop="oldest", stream="cam", begun=True),
        place(2, drop="oldest", stream="other"),
        place(3, drop="oldest", stream="cam", model="n"),
    )
    older, newer = place(4, drop="oldest", stream="cam"), place(5, drop="oldest", stream="cam")
    new = place(9, drop="oldest", stream="cam")
    assert entry_to_drop(new, [newer, begun, foreign, older, other], room=4) is older
    with pytest.raises(Dropped):
        entry_to_drop(new, [begun, other, foreign], room=2)


def test_stream_may_bound_its_own_queue() -> None:
    """A stream's bound on waiting frames holds however much room there is; frames that have started do not count."""
    begun = place(1, drop="oldest", begun=True)
    waiting = place(2, drop="oldest")
    assert entry_to_drop(place(9, drop="oldest", queue=1), [begun], room=32) is None
    assert entry_to_drop(place(9, drop="oldest", queue=1), [begun, waiting], room=32) is waiting
    assert entry_to_drop(place(9, drop="oldest", queue=2), [begun, waiting], room=32) is None


def test_earliest_deadline_first_within_a_model() -> None:
    """Then in order of arrival. A tail that is about to miss its deadline overtakes a frame that has time."""
    shares = FairShares()
    late, soon, early = place(1, deadline=5.0), place(2, deadline=2.0), place(3, deadline=2.0)
    assert shares.next([late, early, soon]) is soon
    assert shares.next([]) is None


def test_models_share_the_processor_by_seconds() -> None:
    """Ten frames of one model and two of another: each has half the processor while both want it, by seconds, not
    turns."""
    shares, waiting, order = FairShares(), [place(number) for number in range(10)], ""
    waiting += [place(20 + number, model="n") for number in range(2)]
    while waiting:
        chosen = shares.next(waiting)
        assert chosen is not None
        waiting.remove(chosen)
        order += chosen.model
        shares.begin(chosen.model)
        shares.end(chosen.model, 0.125 if chosen.model == "m" else 0.375)
    assert order == "mnmmmnmmmmmm"


def test_idle_model_accumulates_no_credit() -> None:
    """After an hour of one model the other gets its half, not the next hour."""
    shares = FairShares()
    for _ in range(1000):
        shares.begin("m")
        shares.end("m", 1.0)
    order = ""
    for number in range(8):
        chosen = shares.next([place(number), place(number, model="n")])
        assert chosen is not None
        order += chosen.model
        shares.begin(chosen.model)
        shares.end(chosen.model, 1.0)
    assert order in ("nmnmnmnm", "nnmnmnmn")
    assert len(shares.used) <= 2


@contextmanager
def taken(processor: DeviceQueue) -> Iterator[None]:
    """While somebody has it."""
    with processor.turn(place(), FAR):
        yield


class Waiter:
    """A thread that wants a turn."""

    def __init__(self, processor: DeviceQueue, mine: QueueEntry, by: float = FAR) -> None:
        self.got: str = ""
        self.finish = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(processor, mine, by), daemon=True)
        self._thread.start()

    def _run(self, processor: DeviceQueue, mine: QueueEntry, by: float) -> None:
        try:
            with processor.turn(mine, by):
                self.got = "turn"
                self.finish.wait(20)
        except Exception as error:
            self.got = type(error).__name__

    def end(self) -> str:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.got


def test_processor_is_passed_on_exactly_once() -> None:
    """Never held by two at once, no waiter forgotten; afterwards it is free."""
    processor, places = DeviceQueue(32), [place(deadline=FAR + number) for number in range(3)]
    with taken(processor):
        waiters = []
        for entry in places:
            waiters.append(Waiter(processor, entry))
            eventually("it waits", lambda: len(processor._waiting) == len(waiters))
        assert processor.has_waiting
    for waiter in waiters:
        eventually("its turn", lambda waiter=waiter: waiter.got)  # type: ignore[misc]
        assert sum(waiter.got == "turn" and not waiter.finish.is_set() for waiter in waiters) == 1
        waiter.finish.set()
        assert waiter.end() == "turn"
    assert not processor.has_waiting
    with taken(processor):
        pass  # it is free


def test_wait_timeout_raises_and_takes_no_turn() -> None:
    """And the next waiter is not held up."""
    processor = DeviceQueue(32)
    with taken(processor):
        assert Waiter(processor, place(), by=perf_counter()).end() == "DeadlineExceeded"
        with pytest.raises(DeadlineExceeded), processor.turn(place(), perf_counter() + 0.01):
            pass
    with taken(processor):
        pass


def test_cancelled_waiter_leaves_the_queue() -> None:
    """A tail whose race is over stops waiting at once."""
    processor, mine = DeviceQueue(32), place()
    with taken(processor):
        waiter = Waiter(processor, mine)
        eventually("it waits", lambda: processor.has_waiting)
        processor.withdraw(mine)
        assert waiter.end() == Withdrawn.__name__
        processor.withdraw(mine)


def test_dropped_frame_is_notified_while_waiting_and_before() -> None:
    """Both the one that waits for its turn and the one that has not asked for it yet; each frees its place at once."""
    processor = DeviceQueue(32)
    waiting, asleep = (place(drop="oldest", queue=1, stream="cam") for _ in range(2))
    with taken(processor), processor.admitted(waiting):
        waiter = Waiter(processor, waiting)
        eventually("it waits", lambda: processor.has_waiting)
        with processor.admitted(asleep):
            assert waiter.end() == "Dropped"
            with processor.admitted(place(drop="oldest", queue=1, stream="cam")):
                assert processor.in_flight == 1
                with pytest.raises(Dropped), processor.turn(asleep, FAR):
                    pass
                with pytest.raises(Dropped):
                    processor.begin(asleep)
    assert processor.dropped == 2 and processor.in_flight == 0


def test_place_in_the_queue_is_always_released() -> None:
    """Whatever happens inside; a full queue refuses."""
    processor = DeviceQueue(1)
    with pytest.raises(ZeroDivisionError), processor.admitted(place()):
        with pytest.raises(Busy), processor.admitted(place()):
            pass
        with pytest.raises(Dropped), processor.admitted(place(drop="newest")):
            pass
        raise ZeroDivisionError
    assert processor.in_flight == 0 and processor.dropped == 1


def test_concurrent_waiters_hold_the_processor_one_at_a_time() -> None:
    """Seeded threads take turns, time out, are cancelled and dropped: each ends, one at a time holds the processor, and
    the queue is empty at the end."""
    processor, inside, most = DeviceQueue(6), [0], [0]
    endings: list[str] = []
    lock = threading.Lock()

    def one(dice: random.Random) -> str:
        mine = place(
            drop=dice.choice(["none", "oldest", "newest"]), stream=dice.choice("ab"), model=dice.choice("mn"),
            deadline=dice.random(),
        )  # fmt: skip
        try:
            with processor.admitted(mine):
                if dice.random() < 0.2:
                    threading.Thread(target=processor.withdraw, args=(mine,), daemon=True).start()
                with processor.turn(mine, perf_counter() + dice.choice([0.0, 0.001, 30.0])):
                    inside[0] += 1
                    most[0] = max(most[0], inside[0])
                    inside[0] -= 1
                    if dice.random() < 0.1:
                        raise ZeroDivisionError
        except (Busy, Dropped, DeadlineExceeded, Withdrawn, ZeroDivisionError) as error:
            return type(error).__name__
        return "turn"

    def storm(seed: str) -> None:
        dice = random.Random(seed)
        for _ in range(300):
            ending = one(dice)
            with lock:
                endings.append(ending)

    seed = os.environ["EDGESPLIT_SEED"]
    threads = [threading.Thread(target=storm, args=(f"{seed}/{number}",), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(endings) == 8 * 300, "somebody waits for ever"
    assert most[0] == 1
    assert (processor.in_flight, processor.has_waiting) == (0, False)
    with taken(processor):
        pass  # it is free
    assert endings.count("turn") > 0
