"""Lanes: where they are granted, what lies where, whose turn it is, and what a client does with one. Workers that crash
and hang are in tests/faults/test_lane_faults.py."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit import Client
from edgesplit.client.direct import endpoint
from edgesplit.client.direct.endpoint import LaneClosed, LaneEndpoint
from edgesplit.client.direct.grant import ANSWER, ANSWERED, CLOSED, FAILED, Grant, LaneTensor, layout_tensors
from edgesplit.client.direct.request_policy import LONG_LIVED_S, REFUSED, LaneRequestPolicy
from edgesplit.errors import Busy, DeadlineExceeded, InferenceFailed, UsageError
from edgesplit.http1.response import Reply
from edgesplit.oip.report import Report
from edgesplit.plan import Power
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Tensor, Timing
from edgesplit_agent.main import _parser
from edgesplit_agent.power.energy_model import EnergyMeter
from edgesplit_agent.serving.accounting import RequestAccounting
from edgesplit_agent.serving.direct_access import DirectAccess, LaneConditions, reason_against
from edgesplit_agent.worker.direct import shared_state
from edgesplit_agent.worker.direct.broker import LaneBroker, LaneResults, LaneSpec
from edgesplit_agent.worker.direct.child import WorkerLanes
from edgesplit_agent.worker.direct.shared_state import MAX_LANES, RING_ENTRIES, LaneSharedState
from edgesplit_agent.worker.ipc import Channel
from edgesplit_agent.worker.watchdog_policy import Bounds
from support.agent_engine import LOCAL as TWO_SLICES
from support.agent_engine import REMOTE, RecordList, active, eventually
from support.direct_access import GrantingAgent, asking, descriptors, grant, order

INPUT = np.arange(4, dtype=np.float32).reshape(1, 4)

# Where one is granted


USUAL = LaneConditions(allowed=True, models=1, row_in_use="local", traced=False, watts=None, settled=True)


class LanedHost:
    """Stands for a worker's host."""

    slices = frozenset[str]()

    def __init__(self) -> None:
        self.specs: list[LaneSpec] = []
        self.lanes = self

    def open(self, spec: LaneSpec, descriptor: int, *, shared: bool) -> None:
        self.specs.append(spec)

    def end_all(self) -> None: ...

    def collect(self, predicted_s: float, scale: float) -> None: ...


def laned(*rows: Any) -> Any:
    return dataclasses.replace(active(*rows), host=LanedHost())


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"allowed": False}, "switched off"),
        ({"models": 2}, "share this device"),
        ({"row_in_use": ""}, "answered no request yet"),
        ({"traced": True}, "traced"),
        ({"watts": 4.0}, "power budget"),
        ({"settled": False}, "on trial"),
    ],
)
def test_a_lane_is_granted_only_where_nothing_is_decided(changed: dict[str, Any], why: str) -> None:
    """One way to answer, one model, no budget, no trial, no traces, and an operator who allows it."""
    said = reason_against(laned(TWO_SLICES), dataclasses.replace(USUAL, **changed))
    assert why in said and bool(said) == bool(why)


def test_a_plan_that_may_offload_has_no_lanes() -> None:
    """Unless its operator has forced the device's own row; and models in the agent's own process have none."""
    assert "several rows" in reason_against(laned(TWO_SLICES, REMOTE), USUAL)
    assert "agent's own process" in reason_against(active(TWO_SLICES), USUAL)
    forced = laned(TWO_SLICES, REMOTE)
    forced = dataclasses.replace(forced, plan=msgspec.structs.replace(forced.plan, forced_row="local"))
    assert reason_against(forced, USUAL) == ""


def test_the_operator_may_switch_them_off() -> None:
    """`--no-direct-access`; without it they are granted."""
    for words, lanes in ([], True), (["--no-direct-access"], False):
        assert _parser().parse_args(["run", "--data", "d", *words]).direct_access is lanes


def test_what_came_of_lanes_is_told_as_of_every_request() -> None:
    """Each answer is a report, with the joules that the plan's figures make of its seconds; failures are the release's
    own; what slices took is learnt."""
    power = Power(idle_watts=2.0, busy_watts=5.0)
    release = laned(TWO_SLICES)
    release = dataclasses.replace(release, plan=msgspec.structs.replace(release.plan, power=power))
    kept, spent, accounting = RecordList(), list[float](), RequestAccounting()
    accounting.add(kept)
    access = DirectAccess(
        lambda model: release, lambda model: dataclasses.replace(USUAL, serving=release), accounting, EnergyMeter(),
        spent.append, lambda: 1.0,
    )  # fmt: skip
    release.lease()
    granted = access.open("tiny", 0, shared=True)
    assert (granted.row, granted.busy_watts, granted.idle_watts) == ("local", 5.0, 2.0)
    release.host.specs[0].on_results(LaneResults([(0.03, 0.02), (0.05, 0.04)], failures=1, slice_s=(0.02, 0.01)))
    assert kept.records == []
    accounting.deliver()
    told = [record.outcome for record in kept.records if isinstance(record.outcome, Report)]
    assert [(one.release, one.row, one.latency_s, one.device_s) for one in told] == [
        (release.digest, "local", 0.03, 0.02), (release.digest, "local", 0.05, 0.04),
    ]  # fmt: skip
    assert [one.joules for one in told] == pytest.approx([5 * 0.02 + 2 * 0.01, 5 * 0.04 + 2 * 0.01])
    assert {one.joules_basis for one in told} == {"predicted"} and spent == pytest.approx([3 * 0.02, 3 * 0.04])
    own = [error for record in kept.records for error in record.device_runs]
    assert own[0] is None and isinstance(own[1], InferenceFailed) and len(own) == 2
    assert [record.timing.seconds for record in kept.records if record.timing] == [{"a": 0.02, "b": 0.01}]


# What lies where


def test_tensors_lie_apart_and_aligned() -> None:
    """Inputs first, then outputs, each where an engine reads it in place; a size that only a run tells has no place."""
    specs = [TensorSpec("a", "UINT8", (3,)), TensorSpec("b", "FP32", (2, 2)), TensorSpec("c", "BOOL", ())]
    placed = layout_tensors(specs, 64)
    assert placed is not None
    assert [(one.name, one.offset, one.bytes) for one in placed[0]] == [("a", 64, 3), ("b", 128, 16), ("c", 192, 1)]
    assert placed[1] == 256
    for shape, datatype in ((-1, 3), "FP32"), ((2,), "BYTES"), ((2,), "FP3"), ((2**40,), "FP32"), ((0,), "FP32"):
        assert layout_tensors([TensorSpec("x", datatype, shape)], 0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"bytes": 64},
        {"outputs_offset": 2**30},
        {"inputs": (LaneTensor("x", "FP32", (1, 4), 64),)},
        {"inputs": (LaneTensor("x", "FP32", (1, 4), 4),)},
        {"outputs": (LaneTensor("y", "FP32", (2**30,), 64),)},
        {"outputs": (LaneTensor("y", "BYTES", (1,), 64),)},
    ],
)
def test_a_grant_of_places_that_are_none_is_refused(spoilt: dict[str, Any]) -> None:
    """A client maps nothing that an agent which has gone mad tells it."""
    good = grant()
    assert good.is_valid and not msgspec.structs.replace(good, **spoilt).is_valid


# Words


def words() -> LaneSharedState:
    return LaneSharedState(memoryview(bytearray(shared_state.BYTES)))


def test_what_is_noted_is_read_once_and_whole() -> None:
    """Each answer's times in their order; of more than the ring holds, the newest."""
    own = words()
    for number in range(3):
        own.record_answer(0.5 + number, 0.25)
        own.record_slice_times([0.1, 0.2])
    assert own.answers_between(0, 3) == [(0.5, 0.25), (1.5, 0.25), (2.5, 0.25)] and own.answers_between(3, 3) == []
    assert own.slice_totals[0] == 3 and own.slice_totals[1][:3] == pytest.approx([0.3, 0.6, 0.0])
    for _ in range(RING_ENTRIES + 7):
        own.record_answer(2.0, 1.0)
    assert len(own.answers_between(3, own.answer_count)) == RING_ENTRIES


def test_what_comes_while_it_is_read_is_told_the_next_time(bench: Bench) -> None:
    """None twice: a worker goes on writing."""
    bench.open()
    own = bench.lanes.state
    assert own is not None
    told: list[int] = []
    bench.desk._spec = dataclasses.replace(order(), on_results=lambda notes: told.append(len(notes.answers)))
    between = shared_state.LaneSharedState.answers_between

    def meanwhile(self: LaneSharedState, taken: int, answers: int) -> list[tuple[float, float]]:
        own.record_answer(1.0, 1.0)
        return between(self, taken, answers)

    own.record_answer(1.0, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_state.LaneSharedState, "answers_between", meanwhile)
        bench.desk.collect()
    bench.desk.collect()
    bench.desk.collect()
    assert told == [1, 1]


def test_words_that_cannot_be_are_not_believed() -> None:
    """A worker that a model has taken over writes what it likes; times stay times, and a run has a beginning."""
    memory = bytearray(os.urandom(16) * (shared_state.BYTES // 16))
    own = LaneSharedState(memoryview(memory))
    own.record_answer(float("nan"), 1.0)
    own.record_answer(1.0, 2.0)
    own.record_answer(-1.0, -2.0)
    own.record_answer(1e300, 1.0)
    assert own.answers_between(own.answer_count - 4, own.answer_count) == []
    for since in (float("nan"), -5.0, 1e300):
        own.begin_run(since, since)
        busy = own.current_run(100.0)
        assert busy is not None and busy[0] < 1.0 and busy[1] == 0.0
    own.begin_run(99.0, 2.0)
    assert own.current_run(100.0) == (99.0, 2.0)
    own.end_run()
    assert own.current_run(100.0) is None


# The worker's side, in this process


class Bench:
    """A worker's lanes and the agent's desk, without a worker: `turn` does one thing. Runs double x."""

    def __init__(self) -> None:
        self.desk = LaneBroker(Bounds(2**30))
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = theirs
        self.done: list[str] = []
        self.notes: list[LaneResults] = []
        self.fails: Exception | None = None
        self.while_running: Callable[[], None] = lambda: None
        self.lanes = WorkerLanes(theirs.fileno(), self._run)
        self.desk.connect_worker(Channel(self.agent, Any))  # type: ignore[arg-type]
        raw, files, _, _ = socket.recv_fds(theirs, 65_536, 2)
        assert raw
        self.lanes.connect_agent(files)

    def _run(
        self, order: Sequence[str], wants: Sequence[str], tensors: Mapping[str, Tensor], timing: Timing
    ) -> Mapping[str, Tensor]:
        if self.fails is not None:
            raise self.fails
        self.done.append("lane")
        self.while_running()
        timing.seconds["s"] = 0.001
        return {"y": np.asarray(tensors["x"]) * np.float32(2)}

    def open(self, *, shared: bool = True) -> LaneEndpoint:
        """The client's end of a lane."""
        mine, theirs = socket.socketpair()
        with theirs:
            self.desk.open(order(self.notes.append), theirs.fileno(), shared=shared)
        one = grant()
        self.lanes.serve_one()
        return LaneEndpoint(one, mine, endpoint.receive_memory(one, mine, shared=shared), shared=shared)

    def turn(self) -> None:
        """One, in which the agent's message is taken if there is one."""
        if self.lanes.serve_one():
            self.channel.recv(65_536)
            self.done.append("agent")

    def close(self) -> None:
        self.desk.close()
        self.agent.close()
        self.channel.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    own = Bench()
    yield own
    own.close()


def reply_of(end: LaneEndpoint) -> tuple[int, int]:
    """Number and status of the next answer."""
    number, status = ANSWER.unpack(end.sock.recv(ANSWER.size))[:2]
    return number, status


@pytest.mark.parametrize("shared", [True, False])
def test_a_request_gets_its_answer_and_is_counted_before(bench: Bench, shared: bool) -> None:
    """By shared memory and by bytes; whoever has the answer finds it noted."""
    end = bench.open(shared=shared)
    assert end.start_request({"x": INPUT}, (), endpoint.monotonic() + 10, endpoint.monotonic()) > 0
    end.sock.sendall(b"".join(end.outgoing))
    bench.turn()
    end.reply[:] = end.sock.recv(ANSWER.size)
    if more := end.remaining_body:
        more[:] = end.sock.recv(len(more))
    answer = end.decode_answer(())
    assert answer is not None and answer.report is not None
    np.testing.assert_array_equal(answer.outputs["y"], 2 * INPUT)
    assert answer.report.device_s == 0.001 and answer.report.row == "local"
    bench.desk.collect()
    assert [len(one.answers) for one in bench.notes] == [1] and bench.notes[0].slice_s == pytest.approx((0.001,))


def test_turns_are_taken(bench: Bench) -> None:
    """Two lanes that never pause and an agent with many requests: each gets its turn, one each."""
    first, second = bench.open(), bench.open()
    for number in range(1, 5):
        first.sock.send(asking(number))
        second.sock.send(asking(number))
        bench.agent.send(b"a request")
    for _ in range(8):
        bench.turn()
    assert bench.done[:8] == ["lane", "agent"] * 4 and bench.done.count("lane") == 8
    for end in (first, second):
        assert [reply_of(end) for _ in range(4)] == [(number, ANSWERED) for number in range(1, 5)]


def test_what_has_not_begun_when_a_lane_ends_is_not_answered(bench: Bench) -> None:
    """A request lies in the socket when another release is activated: the old one does not run for it any more."""
    end = bench.open()
    end.sock.send(asking(1))
    bench.desk.end_all()
    bench.turn()
    assert reply_of(end) == (1, CLOSED) and bench.done == []
    with pytest.raises(OSError, match=r"pipe|reset"):
        for _ in range(3):
            end.sock.send(asking(2))
            bench.lanes.serve_one()
    assert bench.desk.count == 0


def test_a_number_of_its_own_keeps_an_old_lane_out_of_a_new_ones_place(bench: Bench) -> None:
    """The place in the words is free again at once; what comes late by the old lane is not answered for the new."""
    old = bench.open()
    old.sock.send(asking(1))
    bench.desk.end_all()
    mine, theirs = socket.socketpair()
    with theirs, mine:
        bench.desk.open(order(), theirs.fileno(), shared=True)
        bench.turn()
        assert reply_of(old) == (1, CLOSED) and bench.done == []


def test_a_model_that_fails_is_told_and_the_lane_stays(bench: Bench) -> None:
    """The client asks the agent, which says what is wrong; the failure is the release's."""
    end = bench.open()
    bench.fails = ValueError("no")
    end.sock.send(asking(1))
    bench.turn()
    assert reply_of(end) == (1, FAILED)
    bench.fails = None
    end.sock.send(asking(2))
    bench.turn()
    assert reply_of(end) == (2, ANSWERED)
    bench.desk.collect()
    assert sum(one.failures for one in bench.notes) == 1 and sum(len(one.answers) for one in bench.notes) == 1


def test_a_client_that_does_not_read_or_goes_costs_nobody_else_anything(bench: Bench) -> None:
    """Its lane ends, with its descriptors; the next one is served as ever."""
    before = descriptors()
    for shared in (True, False):
        hostile = bench.open(shared=shared)
        hostile.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        hostile.sock.setblocking(False)
        body = b"" if shared else bytes(grant().outputs_offset)
        for _ in range(3_000):
            with contextlib.suppress(OSError):
                hostile.sock.send(asking(7) + body)
            if bench.lanes._due or _readable(bench):
                bench.turn()
        good = bench.open()
        good.sock.send(asking(1))
        while not _readable_at(good):
            bench.turn()
        assert reply_of(good) == (1, ANSWERED)
        good.sock.close()
        hostile.sock.close()
        while _readable(bench):
            bench.lanes.serve_one()
        bench.desk.check(perf_counter())
        del good, hostile  # their memory holds a descriptor for as long as it is mapped
    assert bench.desk.count == 0 and descriptors() <= before


def test_a_request_whose_answer_found_the_socket_full_ran_a_second_time(bench: Bench) -> None:
    """A client that sends many requests before it reads: each runs once, is counted once and is answered once."""
    end, requests, numbers = bench.open(), 50, list[int]()
    for lane in bench.lanes._lanes.values():
        lane.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least
    for number in range(1, requests + 1):
        end.sock.send(asking(number))
        _turn_if_due(bench)
    assert len(bench.done) < requests, "the socket is full"
    for _ in range(20 * requests):
        if _readable_at(end):
            numbers.append(reply_of(end)[0])
        _turn_if_due(bench)
    assert numbers == list(range(1, requests + 1)) and len(bench.done) == requests
    bench.desk.collect()
    assert sum(len(results.answers) for results in bench.notes) == requests and bench.desk.count == 1


def test_a_client_that_closed_its_lane_during_a_run_left_a_run_without_end(bench: Bench) -> None:
    """The answer cannot be sent, but the run is over: the watchdog must not kill the worker for it."""
    end = bench.open()
    bench.while_running = end.sock.close
    end.sock.send(asking(1))
    bench.turn()
    assert bench.done == ["lane"] and bench.desk.current_task(perf_counter()) is None


def _turn_if_due(bench: Bench) -> None:
    if bench.lanes._due or _readable(bench):
        bench.turn()


def _readable(bench: Bench) -> bool:
    return bool(bench.lanes._poll.poll(0))


def _readable_at(end: LaneEndpoint) -> bool:
    return bool(select.select([end.sock], [], [], 0)[0])


def test_bytes_that_are_no_request_confuse_nobody(bench: Bench) -> None:
    """Whatever is written on a lane is a number and a time; one that ends in the middle of it is over."""
    rng = np.random.default_rng(7)
    for size in (1, 15, 16, 17, 40, 333):
        end = bench.open()
        end.sock.send(rng.bytes(size))
        end.sock.shutdown(socket.SHUT_WR)
        while _readable(bench) or bench.lanes._due:
            bench.lanes.serve_one()
        said = end.sock.recv(65_536)
        assert len(said) == ANSWER.size * (size // 16)
        end.sock.close()
        bench.desk.check(perf_counter())
    assert bench.desk.count == 0


# The agent's desk


def test_only_a_connected_stream_socket_is_a_lane(bench: Bench) -> None:
    """Another descriptor is refused, and the client's stays its own."""
    read, write = os.pipe()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind("")
    listening.listen()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with socket.socket() as tcp, listening, left, right:
        before = descriptors()
        for descriptor in (read, listening.fileno(), left.fileno(), tcp.fileno()):
            with pytest.raises((UsageError, OSError)):
                bench.desk.open(order(), descriptor, shared=True)
        assert descriptors() <= before
    os.close(read)
    os.close(write)


def test_lanes_are_bounded_and_leave_nothing(bench: Bench) -> None:
    """As many as there are places; clients that open and die, a thousand times, cost no descriptor."""
    ends = [bench.open() for _ in range(MAX_LANES)]
    with pytest.raises(Busy):
        bench.open()
    for end in ends:
        end.sock.close()
    while _readable(bench):
        bench.lanes.serve_one()
    bench.desk.check(perf_counter())
    before = descriptors()
    for _ in range(300):
        bench.open().sock.close()
        bench.lanes.serve_one()
        bench.desk.check(perf_counter())
    assert bench.desk.count == 0 and descriptors() <= before


def test_a_worker_that_does_not_run_as_it_was_opened_has_no_lanes(bench: Bench) -> None:
    """Its accelerator is gone, say: the agent is to hear of it, by its own requests."""
    bench.open()
    own = bench.lanes.state
    assert own is not None
    own.signal_change()
    bench.desk.check(perf_counter())
    assert bench.desk.count == 0
    with pytest.raises(Busy):
        bench.open()


def test_a_run_for_a_lane_has_the_limit_that_every_run_has(bench: Bench) -> None:
    """The agent sees since when it runs, and takes it for one run for as long as it is."""
    bench.open()
    own = bench.lanes.state
    assert own is not None and bench.desk.current_task(100.0) is None
    own.begin_run(99.5, 10.0)
    task = bench.desk.current_task(100.0)
    assert task is not None and task.since == 99.5 and task.limit_s == 1.0 and bench.desk.current_task(101.0) is task
    own.begin_run(100.5, 0.4)
    later = bench.desk.current_task(101.0)
    assert later is not None and later.since == 100.5 and later.limit_s == pytest.approx(0.2)


# The client


def test_when_a_lane_is_asked_for() -> None:
    """Not before the agent has answered; refused, ever more rarely; at once after one that stayed."""
    hope = LaneRequestPolicy()
    assert not hope.should_request(0.0)
    hope.has_agent_answered = True
    assert hope.should_request(0.0)
    now = 0.0
    for refusals in range(12):
        pause_s = REFUSED.pause_s(refusals)
        hope.on_refused(now)
        hope.has_agent_answered = True
        assert not hope.should_request(now + 0.99 * pause_s) and hope.should_request(now + pause_s)
        now += pause_s
    hope.on_granted(now)
    hope.on_ended(now + LONG_LIVED_S)
    hope.has_agent_answered = True
    assert hope.should_request(now + LONG_LIVED_S)


def test_a_forked_child_does_not_use_its_parents_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would read each other's answers; and what the child gives up stays the parent's."""
    mine, theirs = socket.socketpair()
    with theirs, mine.dup() as parents:
        one = grant()
        end = LaneEndpoint(one, mine, memoryview(bytearray(one.bytes)), shared=True)
        monkeypatch.setattr(endpoint, "_forks", endpoint._forks + 1)
        with pytest.raises(LaneClosed, match="forked"):
            end.start_request({"x": INPUT}, (), endpoint.monotonic() + 1, endpoint.monotonic())
        end.close()
        theirs.send(b"for the parent")
        assert parents.recv(100) == b"for the parent"


def silent(sock: socket.socket, raw: bytes) -> None: ...


def closes(sock: socket.socket, raw: bytes) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def answers_another(sock: socket.socket, raw: bytes) -> None:
    sock.send(ANSWER.pack(77, ANSWERED, 0.0, 0.0, 0.0))


def says_it_is_over(sock: socket.socket, raw: bytes) -> None:
    sock.send(ANSWER.pack(int.from_bytes(raw[:8], "little"), CLOSED, 0.0, 0.0, 0.0))


def could_not(sock: socket.socket, raw: bytes) -> None:
    sock.send(ANSWER.pack(int.from_bytes(raw[:8], "little"), FAILED, 0.0, 0.0, 0.0))


def half(sock: socket.socket, raw: bytes) -> None:
    sock.send(b"\0" * 10)


@pytest.mark.parametrize("mood", [silent, closes, answers_another, says_it_is_over, could_not, half])
def test_where_a_lane_does_not_answer_the_agent_does(
    mood: Any, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a worker does or does not say, the application has its answer."""
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.05)
    agent = GrantingAgent(socket_folder, mood)
    try:
        with Client(agent.url) as client:
            for factor in (1, 2, 3, 4):
                answer = client.infer("one", {"x": factor * INPUT}, deadline_s=30)
                np.testing.assert_array_equal(answer.outputs["y"], 2 * factor * INPUT)
        assert agent.asked[1] == "/v2/edgesplit/lane" and sum(one.endswith("infer") for one in agent.asked) == 4
    finally:
        agent.stop()


def test_where_neither_answers_there_is_an_error_in_words(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that is silent leaves time to ask the agent; silent too, and the deadline is told."""
    monkeypatch.setattr(endpoint, "TIMEOUT_S", 0.05)
    agent = GrantingAgent(socket_folder, silent)
    try:
        with Client(agent.url) as client:
            client.infer("one", {"x": INPUT}, deadline_s=30)
            agent.may_answer.clear()
            with pytest.raises(DeadlineExceeded):
                client.infer("one", {"x": INPUT}, deadline_s=0.5)
    finally:
        agent.stop()


def test_a_closed_client_wakes_who_waits(socket_folder: Path) -> None:
    """In a thread that waits for a lane's answer; it is told that the client was closed."""
    waits = threading.Event()
    agent = GrantingAgent(socket_folder, lambda sock, raw: waits.set())
    client, said = Client(agent.url), list[Exception]()

    def ask() -> None:
        try:
            for _ in range(3):
                client.infer("one", {"x": INPUT}, deadline_s=60)
        except Exception as error:
            said.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert waits.wait(20)
        client.close()
        thread.join(20)
        eventually("the thread ends", lambda: not thread.is_alive())
        assert [type(one).__name__ for one in said] == ["LinkError"]
    finally:
        agent.stop()


def test_grants_are_read_strictly() -> None:
    """What is no grant is none."""
    for body in (b"", b"{}", b"[1]", b"\xff", msgspec.json.encode(msgspec.structs.replace(grant(), bytes=1))):
        with pytest.raises(LaneClosed):
            endpoint.decode_grant(Reply(200, {}, memoryview(body)))
    assert isinstance(endpoint.decode_grant(Reply(200, {}, memoryview(msgspec.json.encode(grant())))), Grant)
