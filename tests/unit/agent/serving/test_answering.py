"""How the engine answers under its application's options: hedges, dropped frames, streams, stale answers, errors.

Slices and clouds that a test blocks stand for slow ones: no test depends on timing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import msgspec
import numpy as np
import pytest

from edgesplit.errors import Busy, DeadlineExceeded, Dropped, EdgeError, InferenceFailed, LinkError
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.oip.options import InferOptions
from edgesplit.oip.report import Report
from edgesplit.plan import Row
from edgesplit_agent.offload.target import TargetTimeouts
from edgesplit_agent.policy.row_selection import RowChoice
from edgesplit_agent.serving.engine import Answer, Engine, Settings
from edgesplit_agent.telemetry.request_record import DeviceRunObserver
from edgesplit_agent.telemetry.windows import Tally
from support.agent_engine import (
    CLASS,
    EXPECTED,
    INPUT,
    REMOTE,
    RecordList,
    ScriptedCloud,
    Step,
    active,
    eventually,
    programs,
    unavailable,
)

CUT = Row(name="cut-1", device=("a",), remote=("b",), sends=("h",), receives=("y",), up_bytes=1, device_s=0.0)
LOCAL = Row(name="local", device=("a", "b"), device_s=5.0)
"""The cut is always predicted the better of the two."""
LONG_S = 60.0
SHORT_S = 0.5
PATIENT = TargetTimeouts(overdue_s=1000.0, doubt_s=30.0)
"""However slow this machine is, a cloud that a test holds is not taken for dead."""


class Asking:
    """A request on a thread of its own."""

    def __init__(self, engine: Engine, deadline_s: float = LONG_S, *, model: str = "tiny", **how: Any) -> None:
        self.result: Answer | Exception | None = None
        self._ask = lambda: engine.infer(model, {"x": INPUT}, deadline_s=deadline_s, **how)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._ask()
        except Exception as error:
            self.result = error

    @property
    def answer(self) -> Answer:
        self._thread.join(30)
        assert isinstance(self.result, Answer), self.result
        return self.result

    @property
    def error(self) -> Exception:
        self._thread.join(30)
        assert isinstance(self.result, EdgeError), self.result
        return self.result


@contextmanager
def engine_with(
    *rows: Row,
    steps: dict[str, Step] | None = None,
    idle_probe_s: float = 1e6,
    timeouts: TargetTimeouts = PATIENT,
    client: Callable[[str], OffloadClient] = OffloadClient,
    **settings: Any,
) -> Iterator[tuple[Engine, ScriptedCloud, dict[str, Step]]]:
    """An engine that serves the tiny model; its link is watched only where a test starts that."""
    cloud, own = ScriptedCloud(), steps or programs()
    cloud.start()
    timings = Settings(idle_probe_s=idle_probe_s, timeouts=timeouts, **settings)
    engine = Engine(CLASS, client(cloud.server.url), settings=timings)
    engine.serve("tiny", active(*rows, steps=own))
    try:
        yield engine, cloud, own
    finally:
        for step in own.values():
            step.may_run.set()
        engine.stop()
        cloud.stop()


def to_half_open(engine: Engine) -> None:
    """Open the breaker of the engine's own target, and let a probe find the cloud answering."""
    engine.own_target.on_overdue(0.0)
    assert not engine.breaker.is_allowing
    engine.own_target.probe()
    assert engine.breaker.state == "trial"


def hang(*steps: Step) -> None:
    for step in steps:
        step.may_run.clear()


def settle(engine: Engine, deadline_s: float, **how: Any) -> None:
    """Have one request answered, or told that a machine as busy as this one was not in time."""
    with contextlib.suppress(DeadlineExceeded):
        engine.infer("tiny", {"x": INPUT}, deadline_s=deadline_s, **how)


# Hedging


def test_hedge_won_by_the_device_cancels_the_cloud_and_is_counted() -> None:
    """The cloud is silent: the tail runs early, its answer is returned, and the call's connection is closed."""
    with engine_with(LOCAL, CUT) as (engine, cloud, _):
        cloud.script = cloud.hold
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
        assert report.fallback and report.hedged and report.cause == "timeout"
        counts = engine.hedge_budget.counts
        assert (counts["hedges"], counts["by_choice"], counts["device_won"], counts["cancelled"]) == (1, 1, 1, 1)
        eventually("its connection is closed", lambda: not engine.own_target._remote._busy)  # type: ignore[union-attr]


@pytest.mark.parametrize("alone", [True, False])
def test_planned_race_won_by_the_device_is_no_fallback(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cloud was neither late nor gone: the device started when the plan for this request said so, and finished
    first."""
    slow = msgspec.structs.replace(CUT, remote_s=5.0)
    with engine_with(LOCAL, slow) as (engine, cloud, _):
        cloud.script = cloud.hold
        monkeypatch.setattr(
            "edgesplit_agent.policy.row_selection.select_row",
            lambda *_: RowChoice(slow, early_s=0.0, local_was_chosen=alone, finish=LOCAL),
        )
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
        assert (report.fallback, report.cause, report.hedged) == (False, "", True)
        assert (report.row, report.raced) == (LOCAL.name, slow.name)


def test_race_against_a_failing_cloud_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's answer would have been needed anyway."""
    with engine_with(LOCAL, CUT) as (engine, cloud, _):
        cloud.script = unavailable
        monkeypatch.setattr(
            "edgesplit_agent.policy.row_selection.select_row", lambda *_: RowChoice(CUT, early_s=LONG_S, finish=LOCAL)
        )
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
        assert report.fallback and report.cause and not report.raced


def test_race_winner_does_not_count_as_a_switch() -> None:
    """A switch counts a different selection, not which side finished first."""
    tally = Tally()
    local, cloud = Report(release="r", row="local", raced="cut-1"), Report(release="r", row="cut-1", raced="cut-1")
    for report in (local, cloud, local, cloud):
        tally.add_answer(report, {})
    assert (tally.switches, tally.row) == (0, "local")
    tally.add_answer(Report(release="r", row="cut-1"), {})
    assert (tally.switches, tally.row) == (1, "cut-1")


def test_hedge_won_by_the_cloud_stops_the_tail_and_counts_its_waste() -> None:
    """The device's wasted work is reported in seconds, and in joules where the plan has figures."""
    costed = msgspec.structs.replace(LOCAL, device_joules=10.0)  # 2 W
    with engine_with(costed, CUT) as (engine, cloud, steps):
        hang(steps["b"])
        cloud.script = cloud.hold
        asking = Asking(engine)
        assert steps["b"].entered.wait(20), "the tail has begun"
        cloud.let_go.set()
        report = asking.answer.report
        assert report.hedged and not report.fallback
        assert engine.hedge_budget.counts["cloud_won"] == engine.hedge_budget.counts["cancelled"] == 1
        steps["b"].may_run.set()
        eventually("the loser's time is counted", lambda: engine.hedge_budget.counts["wasted_s"] > 0)
        assert engine.hedge_budget.counts["wasted_j"] == pytest.approx(2.0 * engine.hedge_budget.counts["wasted_s"])


def test_early_hedge_needs_a_budget() -> None:
    """Without one, the tail waits until the deadline demands it: then it runs whatever it costs."""
    with engine_with(LOCAL, CUT, hedge_budget=0.0) as (engine, cloud, _):
        cloud.script = cloud.hold
        settle(engine, 5.0)
        assert (
            engine.hedge_budget.counts["held_back"],
            engine.hedge_budget.counts["by_choice"],
            engine.hedge_budget.counts["hedges"],
        ) == (
            1,
            0,
            1,
        )


def test_early_hedge_does_not_delay_waiting_requests() -> None:
    """While a frame waits for the processor, only deadlines cause hedges."""
    with engine_with(LOCAL, REMOTE) as (engine, cloud, steps):
        cloud.script = cloud.hold
        hang(steps["a"])
        engine.serve("other", active(LOCAL, steps=steps))
        others = [Asking(engine, model="other") for _ in range(2)]
        eventually("one has the processor, and one waits for it", lambda: engine.queue.has_waiting)
        asking = Asking(engine)
        eventually("its patience is over", lambda: engine.hedge_budget.counts["held_back"] == 1)
        assert engine.hedge_budget.counts["hedges"] == 0
        steps["a"].may_run.set()
        cloud.let_go.set()
        for request in (asking, *others):
            assert np.array_equal(request.answer.outputs["y"], EXPECTED)


def test_lost_races_do_not_slow_the_cloud_estimate() -> None:
    """Both start at once and the device wins each time: a cloud with recent answers is not counted as slow."""
    never = replace(PATIENT, slow_s=1000.0, unheard_s=1000.0, unanswered_s=1000.0)
    with engine_with(LOCAL, CUT, hedge="always", timeouts=never) as (engine, cloud, _):
        assert not engine.infer(
            "tiny", {"x": INPUT}, deadline_s=LONG_S, options=InferOptions(hedge="never")
        ).report.fallback
        cloud.script = cloud.hold
        for _ in range(5):
            assert engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report.hedged
        assert (engine.breaker.state, engine.breaker.failures) == ("closed", 0)
        assert engine.hedge_budget.counts["device_won"] == 5


@pytest.mark.parametrize("by_request", [True, False])
def test_hedge_always_starts_at_once(by_request: bool) -> None:
    """Cloud and tail run beside each other from the start, budget or not; the request's option overrides the
    agent's."""
    settings = Settings().hedge if by_request else "always"
    with engine_with(LOCAL, CUT, hedge=settings, hedge_budget=0.0) as (engine, cloud, _):
        cloud.script = cloud.hold
        wishes = InferOptions(hedge="always") if by_request else InferOptions()
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=wishes).report.hedged
        assert engine.hedge_budget.counts["by_choice"] == 1


def test_hedge_never_still_covers_deadline_and_cloud_failure() -> None:
    """It only rules out early hedges."""
    with engine_with(LOCAL, CUT, hedge="never") as (engine, cloud, _):
        cloud.script = cloud.hold
        settle(engine, 1.0)
        assert engine.hedge_budget.counts["hedges"] == 1
        assert engine.hedge_budget.counts["by_choice"] == engine.hedge_budget.counts["held_back"] == 0
        cloud.script = unavailable
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
        assert report.fallback and not report.hedged


# Streams and queues


def test_stream_frames_are_pipelined() -> None:
    """While the cloud has frame i, the device's part of frame i+1 is done, and i+2 and i+3: nothing is answered yet."""
    with engine_with(LOCAL, CUT, hedge="never") as (engine, cloud, steps):
        cloud.script = cloud.hold
        frames = []
        for number in range(1, 5):
            frames.append(Asking(engine, options=InferOptions(stream="cam")))
            eventually("the cloud has this frame too", lambda number=number: len(cloud.asked) == number)  # type: ignore[misc]
            assert steps["a"].runs == number
        assert all(frame.result is None for frame in frames)
        cloud.let_go.set()
        assert all(np.array_equal(frame.answer.outputs["y"], EXPECTED) for frame in frames)


def test_stream_drops_its_oldest_waiting_frame() -> None:
    """The processor is busy and one frame may wait: each new frame drops the waiting one, whose caller is told at
    once."""
    with engine_with(LOCAL) as (engine, _, steps):
        hang(steps["a"])
        wishes = InferOptions(stream="cam", drop="oldest", queue=1)
        running = Asking(engine, options=wishes)
        assert steps["a"].entered.wait(20)
        frames = []
        for number in range(4):
            frames.append(Asking(engine, options=wishes))
            eventually("the one before gave way", lambda number=number: engine.queue.dropped == number)  # type: ignore[misc]
            eventually("it waits", lambda: engine.queue.has_waiting)
        for dropped in frames[:-1]:
            assert isinstance(dropped.error, Dropped)
        steps["a"].may_run.set()
        assert np.array_equal(running.answer.outputs["y"], EXPECTED)
        assert np.array_equal(frames[-1].answer.outputs["y"], EXPECTED)


def test_stream_drop_policy_affects_only_its_own_frames() -> None:
    """`newest` drops the frame that arrives; another stream, and a request without a policy, keep their places."""
    with engine_with(LOCAL, in_flight=3) as (engine, _, steps):
        hang(steps["a"])
        running = Asking(engine, options=InferOptions(stream="cam", drop="newest", queue=1))
        assert steps["a"].entered.wait(20)
        waiting = Asking(engine, options=InferOptions(stream="cam", drop="newest", queue=1))
        eventually("it waits", lambda: engine.queue.has_waiting)
        assert isinstance(Asking(engine, options=InferOptions(stream="cam", drop="newest", queue=1)).error, Dropped)
        plain = Asking(engine)
        eventually("it has its place", lambda: engine.queue.in_flight == 3)
        assert isinstance(Asking(engine).error, Busy)
        assert isinstance(Asking(engine, options=InferOptions(drop="oldest")).error, Dropped), (
            "nobody there would give way"
        )
        steps["a"].may_run.set()
        for request in (running, waiting, plain):
            assert np.array_equal(request.answer.outputs["y"], EXPECTED)
        assert engine.queue.dropped == 2


def test_hanging_model_does_not_block_other_requests_past_their_deadline() -> None:
    """Its own request and the one behind it get an error by their deadlines, while it still hangs."""
    with engine_with(LOCAL) as (engine, _, steps):
        hang(steps["a"])
        for _ in range(3):
            assert isinstance(Asking(engine, SHORT_S).error, DeadlineExceeded)
        assert steps["a"].runs == 1, "a slice that hangs has the processor"
        eventually("only it keeps a thread", lambda: engine._device_threads.busy == 1)
        assert engine.queue.in_flight == 0


# Stale answers


def test_stale_answer_is_the_last_resort_and_marked() -> None:
    """The stream's own last good one, with its age; never counted as an answer, never without being asked for."""
    with engine_with(REMOTE) as (engine, cloud, _):
        kept = RecordList()
        engine.observe(kept)
        wishes = InferOptions(stream="cam", stale_ok_s=3600.0)
        good = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=wishes)
        cloud.script = unavailable
        stale = engine.infer("tiny", {"x": INPUT + 1}, deadline_s=LONG_S, request_id="r-1", options=wishes)
        assert stale.outputs is good.outputs
        assert stale.report.stale and stale.report.age_s > 0 and not good.report.stale
        assert [type(record.outcome) for record in kept.records] == [Report, LinkError]
        assert engine.stale_answers.given == 1
        again = engine.infer("tiny", {"x": INPUT + 1}, deadline_s=LONG_S, request_id="r-1", options=wishes)
        assert again is stale, "an id stands for one answer"
        for other in (
            InferOptions(),
            InferOptions(stream="other", stale_ok_s=3600.0),
            InferOptions(stream="cam", stale_ok_s=1e-9),
        ):
            with pytest.raises(LinkError):
                engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=other)


@pytest.mark.parametrize("what", ["deadline", "model", "queue"])
def test_stale_answer_covers_every_failure(what: str) -> None:
    """Too late, a failing model, a full queue: a stream with the option gets its last answer in each case."""
    with engine_with(LOCAL, in_flight=1, margin_s=1.0) as (engine, _, steps):
        wishes = InferOptions(stale_ok_s=3600.0)
        good = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=wishes)
        if what == "model":
            steps["a"].error = InferenceFailed("the accelerator has gone")
        else:
            hang(steps["a"])
        if what == "queue":
            steps["a"].entered.clear()
            Asking(engine)
            assert steps["a"].entered.wait(20)
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=1.5, options=wishes).outputs is good.outputs


def test_new_release_has_no_stale_answer() -> None:
    """An answer of one release is never returned for another, as halves of two releases are never combined."""
    with engine_with(REMOTE) as (engine, cloud, _):
        wishes = InferOptions(stale_ok_s=3600.0)
        engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=wishes)
        engine.serve("tiny", active(REMOTE, digest="b" * 64))
        cloud.script = unavailable
        with pytest.raises(LinkError):
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, options=wishes)


# The next-best means


def test_memory_per_streams_and_ids_is_bounded() -> None:
    """Over a thousand streams of one frame each, with ids and stale answers: nothing grows with their number."""
    with engine_with(LOCAL) as (engine, _, steps):
        for number in range(1200):
            wishes = InferOptions(stream=f"s-{number}", drop="oldest", stale_ok_s=3600.0)
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, request_id=f"r-{number}", options=wishes)
        assert engine.stale_answers.held_bytes <= 64 * INPUT.nbytes
        engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S, request_id="r-0")
        assert steps["a"].runs == 1201, "the oldest id was evicted"
        assert engine.queue.in_flight == 0 and len(engine.queue._shares.used) <= 1
        assert engine._device_threads.threads <= 128


def test_device_failure_falls_back_to_the_cloud_row() -> None:
    """Its own part crashes, and the plan has a row that needs none of it."""
    with engine_with(CUT, REMOTE) as (engine, cloud, steps):
        steps["a"].error = InferenceFailed("the worker was killed")
        for _ in range(2):
            answer = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
            assert np.array_equal(answer.outputs["y"], EXPECTED)
            assert (answer.report.row, answer.report.cause, answer.report.fallback) == ("remote", "device", False)
        cloud.script = unavailable
        with pytest.raises(LinkError, match="500"):
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
        assert engine.own_target.in_flight == 0


def test_device_failure_without_fallback_raises_its_reason() -> None:
    """There is no such row, or no cloud."""
    for rows in ((LOCAL, CUT), (LOCAL, REMOTE)):
        with engine_with(*rows) as (engine, _, steps):
            steps["a"].error = InferenceFailed("the worker was killed")
            engine.own_target.on_overdue(0.0)  # opens the breaker
            with pytest.raises(InferenceFailed, match="killed"):
                engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)


# Never silence


def test_observer_that_raises_costs_no_answer() -> None:
    """Nor does it keep the record from the next observer."""

    def fails(*_: object) -> None:
        raise ZeroDivisionError

    engine, kept = Engine(CLASS, None), RecordList()
    engine.observe(DeviceRunObserver(fails))
    engine.observe(kept)
    steps = programs()
    engine.serve("tiny", active(LOCAL, steps=steps))
    assert np.array_equal(engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).outputs["y"], EXPECTED)
    steps["a"].error = InferenceFailed("gone")
    with pytest.raises(InferenceFailed, match="gone"):
        engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
    assert [record.device_runs for record in kept.records] == [(None,), (steps["a"].error,)]
    engine.stop()


def test_slices_with_enforced_deadlines_run_in_the_request_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process enforces its deadline, so no other thread has to wait for it; what it raises is still a typed
    error."""
    with engine_with(LOCAL) as (engine, _, steps):
        monkeypatch.setattr("edgesplit_agent.worker.host.InProcess.in_time", True)
        assert np.array_equal(engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).outputs["y"], EXPECTED)
        steps["a"].error = KeyError("no such slice")
        with pytest.raises(InferenceFailed):
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
        assert engine._device_threads.threads == 0


@pytest.mark.parametrize("error", [KeyError("no such slice"), MemoryError(), SystemExit("a thread's end")])
def test_slice_exceptions_become_typed_errors(error: BaseException) -> None:
    """In the device's part and in the tail."""
    with engine_with(LOCAL) as (engine, _, steps):
        steps["a"].error = error  # type: ignore[assignment]
        with pytest.raises(InferenceFailed):
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
    with engine_with(LOCAL, CUT) as (engine, cloud, steps):
        cloud.script = unavailable
        steps["b"].error = error  # type: ignore[assignment]
        with pytest.raises(InferenceFailed):
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)


@pytest.mark.parametrize("error", [ZeroDivisionError(), SystemExit("a thread's end")])
def test_exception_in_the_offload_thread_is_a_link_failure(error: BaseException) -> None:
    """Whatever happens to the thread that asks the cloud, the device finishes."""

    class FailingClient(OffloadClient):
        def infer(self, *_: object) -> NoReturn:
            raise error

    with engine_with(LOCAL, CUT, client=FailingClient) as (engine, _, _steps):
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
        assert report.fallback and report.cause == "link"


def refuse(work: Callable[[], None]) -> bool:
    """No thread is to be had."""
    return False


def test_every_request_is_answered_or_fails_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread for the cloud: the device answers. None to finish here: the cloud may. None at all: a typed error."""
    with engine_with(LOCAL, CUT) as (engine, cloud, _):
        with monkeypatch.context() as patched:
            patched.setattr(engine._offload_threads, "start", refuse)
            assert engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report.cause == "link"
        with monkeypatch.context() as patched:
            patched.setattr(engine._offload_race.tail_threads, "start", _only_first(engine._device_threads.start))
            cloud.script = cloud.hold
            asking = Asking(engine, options=InferOptions(hedge="always"))
            eventually("the tail was refused", lambda: engine.hedge_budget.counts["hedges"] == 1)
            cloud.let_go.set()
            assert not asking.answer.report.fallback
        monkeypatch.setattr(engine._device_threads, "start", refuse)
        with pytest.raises(Busy):
            engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S)
        assert engine.queue.in_flight == engine.own_target.in_flight == 0


def _only_first(start: Callable[[Callable[[], None]], bool]) -> Callable[[Callable[[], None]], bool]:
    """The device's part gets its thread, the tail none."""
    begun: list[object] = []

    def begin(work: Callable[[], None]) -> bool:
        begun.append(work)
        return len(begun) == 1 and start(work)

    return begin


# Clouds


def test_each_offload_server_has_its_own_breaker() -> None:
    """A release with a server of its own is not affected by another server's failure; the server's state is dropped
    with the release."""
    own = ScriptedCloud()
    own.start()
    elsewhere = OffloadClient(own.server.url)
    mine, theirs = active(LOCAL, CUT), active(LOCAL, CUT, digest="b" * 64)
    cloud = ScriptedCloud()
    cloud.start()
    engine = Engine(
        CLASS, OffloadClient(cloud.server.url), settings=Settings(idle_probe_s=1e6, timeouts=PATIENT),
        client_for=lambda release: elsewhere if release is theirs else None,
    )  # fmt: skip
    engine.serve("mine", mine)
    engine.serve("theirs", theirs)
    cloud.stop()
    while engine.breaker.is_allowing:
        assert engine.infer("mine", {"x": INPUT}, deadline_s=LONG_S).report.fallback
    assert not engine.infer("theirs", {"x": INPUT}, deadline_s=LONG_S).report.fallback
    assert len(own.asked) == 1
    engine.drop("theirs")
    assert elsewhere.is_closed
    engine.stop()
    own.stop()


def test_request_keeps_the_server_of_its_release() -> None:
    """Meanwhile another release without a server of its own serves the model: the request still goes to its own
    release's server."""
    own, steps = ScriptedCloud(), programs()
    own.start()
    elsewhere, theirs = OffloadClient(own.server.url), active(CUT, steps=steps)
    engine = Engine(
        CLASS, None, settings=Settings(idle_probe_s=1e6, timeouts=PATIENT),
        client_for=lambda release: elsewhere if release is theirs else None,
    )  # fmt: skip
    engine.serve("tiny", theirs)
    hang(steps["a"])
    asking = Asking(engine)
    assert steps["a"].entered.wait(20)
    engine.serve("tiny", active(LOCAL, digest="b" * 64))
    steps["a"].may_run.set()
    assert asking.answer.report.row == "cut-1"
    assert len(own.asked) == 1
    engine.drop("tiny")
    assert elsewhere.is_closed
    engine.stop()
    own.stop()


def test_recovering_cloud_gets_one_request_first() -> None:
    """Twenty arrive at once while the breaker is half open: one is offloaded, the others are answered here; each
    success doubles the number."""
    with engine_with(LOCAL, CUT) as (engine, cloud, _):
        to_half_open(engine)
        cloud.script = cloud.hold
        out = Asking(engine, options=InferOptions(hedge="never"))
        assert cloud.holding.wait(20)
        for _ in range(5):
            report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
            assert (report.row, report.fallback) == ("local", False)
        assert len(cloud.asked) == 1
        cloud.let_go.set()
        assert out.answer.report.row == "cut-1"
        assert (engine.breaker.state, engine.breaker.room) == ("trial", 2)


def test_request_that_loses_its_place_is_selected_again_and_counted_once() -> None:
    """Both saw the one place of a half-open breaker; the second is answered by another row, and is one request to the
    selector."""
    with engine_with(LOCAL, CUT) as (engine, cloud, _):
        target = engine.own_target
        to_half_open(engine)
        reserve, taken = target.reserve, list[object]()

        def taken_by_another() -> Any:
            if not taken:
                taken.append(reserve())
            return reserve()

        target.reserve = taken_by_another  # type: ignore[method-assign]
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report
        assert (report.row, report.fallback) == ("local", False) and taken[0] is not None
        assert cloud.asked == [] and engine.selector.row_of("tiny") == "local" and target.in_flight == 1
        assert len(engine.selector._arrivals["tiny"]) == 1


def test_earlier_hanging_requests_take_no_place_of_the_half_open_breaker() -> None:
    """The link died under three requests with an hour left; when the cloud is back, the next request may try it."""
    with engine_with(REMOTE) as (engine, cloud, _):
        cloud.script = cloud.hold
        hanging = [Asking(engine) for _ in range(3)]
        eventually("they are all there", lambda: len(cloud.asked) == 3)
        to_half_open(engine)
        cloud.script = lambda request, good: good
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report.row == "remote"
        assert engine.own_target.in_flight == 3
        cloud.let_go.set()
        for request in hanging:
            assert np.array_equal(request.answer.outputs["y"], EXPECTED)


def test_age_of_hanging_requests_opens_the_breaker() -> None:
    """No refusal, no timeout: requests with a long deadline hang, and the breaker opens while they do."""
    with engine_with(REMOTE, timeouts=TargetTimeouts(doubt_s=30.0)) as (engine, cloud, _):
        cloud.script = cloud.hold
        asking = Asking(engine)
        eventually("the breaker opens", lambda: not engine.breaker.is_allowing)
        assert asking.result is None, "what may still be answered is waited for"
        assert isinstance(Asking(engine).error, LinkError), "what comes now is told at once"
        cloud.let_go.set()
        assert np.array_equal(asking.answer.outputs["y"], EXPECTED)
        eventually("its answer is a sign of life", lambda: engine.breaker.state == "trial")


def test_ping_tells_a_dead_server_from_a_slow_one() -> None:
    """One request was given up: a server that still answers its health check keeps its breaker closed, a dead one does
    not."""
    for healthy in (True, False):
        with engine_with(LOCAL, CUT) as (engine, cloud, _):
            engine.start()
            eventually("the first look at the link", lambda cloud=cloud: cloud.probes >= 2)  # type: ignore[misc]
            cloud.script, cloud.healthy = cloud.hold, healthy
            probes = cloud.probes
            assert engine.infer("tiny", {"x": INPUT}, deadline_s=LONG_S).report.hedged
            eventually("it was looked at", lambda cloud=cloud, before=probes: cloud.probes > before)  # type: ignore[misc]
            if healthy:
                assert engine.breaker.is_allowing
            else:
                eventually("the breaker opens", lambda engine=engine: not engine.breaker.is_allowing)  # type: ignore[misc]
