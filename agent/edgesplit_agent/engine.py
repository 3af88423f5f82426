"""Answers requests: chooses the row, runs the device's part, lets the cloud finish, or finishes alone.

Promises, per request id: one answer or one typed error, before the deadline, whatever cloud and link do. The first of
cloud and local tail to finish wins; the other is dropped. A request keeps the release it began with. How the
link is estimated is `link_meter`, how long the cloud is waited for `patience`, when it is left alone `breaker`.
"""

from __future__ import annotations

import difflib
import logging
import queue
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, perf_counter

from edgesplit import codecs, oip, plan
from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, InferenceFailed, LinkError, NotFound, UsageError
from edgesplit.plan import Conditions, Link, Plan, Row
from edgesplit.remote import PROBE_BYTES, Ask, Call, Outcome, Remote, RemoteAnswer, RemoteFailure, ask
from edgesplit.report import Report
from edgesplit.runtime import Tensor, Timing, execute
from edgesplit.runtime.emulated import wait_out
from edgesplit.seen import timeline, trace
from edgesplit.seen.spans import OFF, Tracer
from edgesplit_agent.active import ActiveRelease
from edgesplit_agent.breaker import Breaker
from edgesplit_agent.course import DECODE, ENCODE, QUEUE, TAIL_QUEUE, Course
from edgesplit_agent.link_meter import LinkMeter, probe_due
from edgesplit_agent.once import Once, key_of
from edgesplit_agent.patience import MARGIN_S, patience_s, tail_s

log = logging.getLogger(__name__)

DEADLINE_S = 2.0
"""Where a request names none."""
LONGEST_DEADLINE_S = 3600.0
IN_FLIGHT = 32
"""Requests that may run or wait; more are turned away at once."""
IDLE_PROBE_S = 2.0
"""The link is probed when nothing else was sent for this long."""
PING_TIMEOUT_S = 1.0
PROBE_TIMEOUT_S = 5.0
WAKE_UP = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.05)
"""Assumed until the first plan says what link it was made for."""


@dataclass(frozen=True)
class Answer:
    """What a request gets."""

    outputs: Mapping[str, Tensor]
    report: Report


@dataclass
class Request:
    """One request on its way."""

    id: str
    release: ActiveRelease
    inputs: Mapping[str, Tensor]
    deadline: float
    """Of perf_counter."""
    began: float = field(default_factory=perf_counter)
    timing: Timing = field(default_factory=Timing)
    course: Course = field(default_factory=Course)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - perf_counter()


@dataclass(frozen=True)
class Settings:
    """What an operator could turn."""

    in_flight: int = IN_FLIGHT
    idle_probe_s: float = IDLE_PROBE_S
    margin_s: float = MARGIN_S


Observer = Callable[[str, "Answer | Exception"], None]
"""Told of each finished request, by model."""
OwnPart = Callable[[str, "Exception | None"], None]
"""Told, by release, each time the device's own part of it has done its work (None) or has failed."""


class Engine:
    """The models that this device serves. Thread-safe."""

    def __init__(
        self,
        device_class: str,
        remote: Remote | None,
        *,
        settings: Settings | None = None,
        observe: Observer | None = None,
        own_part: OwnPart | None = None,
        tracer: Tracer = OFF,
    ) -> None:
        self._tracer = tracer
        self._device_class = device_class
        self._remote = remote
        self._settings = settings or Settings()
        self._observe = observe or (lambda model, result: None)
        self._own_part = own_part or (lambda release, error: None)
        self._lock = threading.Lock()
        self._serving: dict[str, ActiveRelease] = {}
        self._rows: dict[str, str] = {}
        self._meter: LinkMeter | None = None
        self._breaker = Breaker()
        self._last_sent = float("-inf")
        self._running = 0
        self._processor = threading.Lock()
        self._once: Once[Answer] = Once(size_of=lambda answer: sum(one.nbytes for one in answer.outputs.values()))
        self._threads = ThreadPoolExecutor(2 * self._settings.in_flight, thread_name_prefix="answering")
        self._watch = threading.Condition()
        self._stopping = False
        self._watcher = threading.Thread(target=self._watch_link, name="link", daemon=True)

    # What owners call

    def start(self) -> None:
        """Begin to watch the link."""
        if self._remote is not None:
            self._watcher.start()

    def stop(self) -> None:
        """Close the offload connections; what waits on them finishes alone."""
        with self._watch:
            self._stopping = True
            self._watch.notify_all()
        if self._remote is not None:
            self._remote.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def serve(self, model: str, release: ActiveRelease) -> None:
        """Answer `model` by this release from now on; requests that run finish with theirs."""
        with self._lock:
            self._serving = {**self._serving, model: release}
            self._rows.pop(model, None)
            if self._meter is None:
                self._meter = LinkMeter.of(release.plan.link)
        self._wake_watcher()

    def drop(self, model: str) -> None:
        """Answer `model` no more."""
        with self._lock:
            self._serving = {name: release for name, release in self._serving.items() if name != model}
            self._rows.pop(model, None)

    @property
    def serving(self) -> Mapping[str, ActiveRelease]:
        """What is answered now, by model."""
        return self._serving

    def row_of(self, model: str) -> str:
        """The row in use, empty before the first request."""
        return self._rows.get(model, "")

    @property
    def conditions(self) -> Conditions:
        """What is known of link, server and device now."""
        with self._lock:
            meter = self._meter or LinkMeter.of(WAKE_UP)
            return meter.conditions(self._remote is not None and self._breaker.lets_through)

    @property
    def breaker(self) -> Breaker:
        """How the cloud is doing."""
        return self._breaker

    @property
    def joined(self) -> int:
        """Retries that were given a running or finished request's answer."""
        return self._once.joined

    def infer(
        self, model: str, inputs: Mapping[str, Tensor], *, deadline_s: float = DEADLINE_S, request_id: str = ""
    ) -> Answer:
        """One answer, by the deadline. UsageError, NotFound, Busy, DeadlineExceeded, InferenceFailed, LinkError."""
        began = perf_counter()
        release = self._serving.get(model)
        if release is None:
            raise NotFound(f"no model {model[:80]!r} runs here; {known(model, self._serving)}")
        oip.check_tensors(inputs, release.inputs)
        if not 0 < deadline_s <= LONGEST_DEADLINE_S:
            raise UsageError(f"a deadline of {deadline_s} s")
        request = Request(request_id or uuid.uuid4().hex, release, inputs, began + deadline_s, began)
        if not request_id:
            return self._admit(model, request)
        key = key_of(model, request_id, inputs)
        return self._once.answer(key, request.left_s, lambda: self._admit(model, request))

    # One request

    def _admit(self, model: str, request: Request) -> Answer:
        request.course = Course.begin(self._tracer, model)
        try:
            with trace.working_for(request.course.span.context, request.id), self._counted():
                answer = self._answer(model, request)
        except Exception as error:
            request.course.failed(error)
            self._observe(model, error)
            raise
        request.course.answered(answer.report)
        self._observe(model, answer)
        return answer

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            if self._running >= self._settings.in_flight:
                raise Busy(f"{self._running} requests run or wait already")
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def _answer(self, model: str, request: Request) -> Answer:
        now = self.conditions
        row = self._choose(model, request.release, now)
        if row is None:
            raise LinkError("the plan has no way to answer without the cloud, and the cloud does not answer")
        live = self._run(request, request.release.order(row.device), request.inputs, request.timing)
        self._compare(request)
        expected = Expected(
            row, plan.latency_s(row, now), plan.link_s(row, now.link) + (row.decode_s + row.remote_s) * now.server_load
        )
        if row.is_local or self._remote is None:
            return self._finished(request, expected, live)
        return self._with_the_cloud(request, expected, live, now)

    def _choose(self, model: str, release: ActiveRelease, now: Conditions) -> Row | None:
        with self._lock:
            row = plan.choose(release.plan, now, self._rows.get(model))
            if row is not None and self._serving.get(model) is release:
                self._rows[model] = row.name
            return row

    def _run(
        self, request: Request, slices: list[str], tensors: Mapping[str, Tensor], timing: Timing, *, tail: bool = False
    ) -> dict[str, Tensor]:
        """Run slices on the device's one processor, once it is free."""
        if not slices:
            return dict(tensors)
        queued = perf_counter()
        if not self._processor.acquire(timeout=max(0.0, request.left_s - self._settings.margin_s)):
            raise DeadlineExceeded("the device's processor was not free before the deadline")
        request.course.waited(queued, tail=tail)
        began = perf_counter()
        try:
            live = execute(request.release.programs, slices, tensors, timing)
        except UsageError:  # the application's, not the release's
            raise
        except Exception as error:
            self._own_part(request.release.digest, error)
            raise
        finally:
            self._processor.release()
            request.course.ran(slices, request.release, timing, began, tail=tail)
        self._own_part(request.release.digest, None)
        return live

    def _compare(self, request: Request) -> None:
        """Learn how fast this device is beside its plan."""
        request.release.learn(request.timing)
        predicted = request.release.predicted_s(request.timing.seconds)
        measured = sum(s for name, s in request.timing.seconds.items() if name in request.release.plan.slice_s)
        with self._lock:
            if self._meter is not None:
                self._meter = self._meter.computed(measured, predicted)

    def _with_the_cloud(
        self, request: Request, expected: Expected, live: Mapping[str, Tensor], now: Conditions
    ) -> Answer:
        race = Race(request, expected, live, self._encode(request, expected, live))
        handshake_s = 0.0 if self._remote is not None and self._remote.is_warm else 3 * now.link.rtt_s
        self._send(race)
        tail = request.release.tail(expected.row)
        local_s = None if tail is None else self._tail_s(request.release, tail, now)
        wait_s = patience_s(request.left_s, local_s, expected.remote_s + handshake_s, self._settings.margin_s)
        outcome = race.next(wait_s)
        if isinstance(outcome, RemoteAnswer):
            return self._finished(request, expected, live, race, outcome)
        if tail is None:
            return self._without_a_tail(race, outcome)
        race.cause = outcome.cause if isinstance(outcome, RemoteFailure) else "timeout"
        race.alone_from = perf_counter()
        self._threads.submit(self._run_tail, race, tail)
        return self._first_of_both(race)

    def _tail_s(self, release: ActiveRelease, tail: list[str], now: Conditions) -> float:
        return tail_s(tail, release.measured_s, release.plan.slice_s, now.device_slowdown)

    def _encode(self, request: Request, expected: Expected, live: Mapping[str, Tensor]) -> Encoded:
        """The request's body, each tensor by its codec. An emulated device takes its own time to make it."""
        row, release = expected.row, request.release
        private = set(row.sends) & set(release.plan.never_leaves)
        if private:  # the rows were sifted when the release was loaded; this is where bytes would leave
            raise UsageError(f"{sorted(private)} may not leave this device")
        start = perf_counter()
        name = oip.remote_name(release.digest, self._device_class, row.name)
        sends = codecs.encode_all({tensor: live[tensor] for tensor in row.sends}, row.codecs)
        asked = ask(name, request.id, sends, release.receives(row), left_s=request.left_s, compress=row.compress)
        if release.emulated:
            wait_out(start, row.encode_s)
        request.course.timeline.add(ENCODE, start, perf_counter())
        return Encoded(asked, perf_counter() - start)

    def _send(self, race: Race) -> None:
        timeout_s = max(0.01, race.request.left_s)
        with self._lock:
            self._last_sent = monotonic()
        self._threads.submit(self._ask, race, timeout_s)

    def _ask(self, race: Race, timeout_s: float) -> None:
        """On a thread of its own: the exchange with the cloud, and what it teaches."""
        assert self._remote is not None
        with race.request.course.offloading(race.request.id) as told:
            try:
                outcome = self._remote.infer(race.encoded.asked, race.call, timeout_s)
            except Exception as error:
                log.exception("the exchange with the cloud failed")
                outcome = RemoteFailure("link", str(error))
            told(outcome)
        if not race.call.dropped:
            self._learn(race.encoded.asked.up_bytes, outcome)
        race.put(outcome)

    def _run_tail(self, race: Race, tail: list[str]) -> None:
        """On a thread of its own: finish alone, slice by slice, unless the cloud is quicker after all."""
        with trace.working_for(race.request.course.span.context, race.request.id):
            self._tail_of(race, tail)

    def _tail_of(self, race: Race, tail: list[str]) -> None:
        live: Mapping[str, Tensor] = race.live
        timing = Timing()
        try:
            for name in tail:
                if race.over:
                    return
                live = self._run(race.request, [name], live, timing, tail=True)
            race.put(TailDone(live, timing))
        except Exception as error:
            if not isinstance(error, EdgeError):
                log.exception("the local tail failed")
            race.put(error if isinstance(error, EdgeError) else InferenceFailed(f"the local tail failed: {error}"))

    def _first_of_both(self, race: Race) -> Answer:
        """Cloud and local tail are both under way (or the cloud has failed): take what comes first."""
        request, cloud_is_out = race.request, race.cause != "timeout"
        while True:
            outcome = race.next(request.left_s - self._settings.margin_s / 2)
            if isinstance(outcome, RemoteAnswer):
                race.over = True
                return self._finished(request, race.expected, race.live, race, outcome)
            if isinstance(outcome, RemoteFailure):
                cloud_is_out, race.cause = True, outcome.cause
                continue
            if isinstance(outcome, EdgeError) and not cloud_is_out:
                return self._without_a_tail(race, None)
            if not cloud_is_out:
                self._give_up(race)
            race.over = True
            if isinstance(outcome, TailDone):
                request.release.learn(outcome.timing)
                request.timing.seconds.update(outcome.timing.seconds)
                request.timing.late += outcome.timing.late
                race.tail_s = outcome.timing.total_s
                return self._finished(request, race.expected, outcome.live, race)
            raise outcome or DeadlineExceeded("neither the cloud nor the device was done before the deadline")

    def _without_a_tail(self, race: Race, outcome: Arrival | None) -> Answer:
        """Only the cloud can answer: wait for it to the last, and say why it did not."""
        while outcome is None and race.request.left_s > self._settings.margin_s / 2:
            outcome = race.next(race.request.left_s - self._settings.margin_s / 2)
        if isinstance(outcome, RemoteAnswer):
            return self._finished(race.request, race.expected, race.live, race, outcome)
        if isinstance(outcome, RemoteFailure) and outcome.cause != "timeout":
            raise LinkError(f"the cloud did not answer ({outcome.cause}: {outcome.text}), and the plan has no fallback")
        self._give_up(race)
        raise DeadlineExceeded("the cloud did not answer before the deadline, and the plan has no fallback")

    def _give_up(self, race: Race) -> None:
        """Nobody waits for the cloud's answer any more: close its connection, and remember that it was slow."""
        race.call.drop()
        race.over = True
        self._learn(race.encoded.asked.up_bytes, RemoteFailure("timeout", "given up", race.waited_s))

    def _finished(
        self,
        request: Request,
        expected: Expected,
        live: Mapping[str, Tensor],
        race: Race | None = None,
        cloud: RemoteAnswer | None = None,
    ) -> Answer:
        outputs = {**live, **(cloud.outputs if cloud else {})}
        missing = [spec.name for spec in request.release.outputs if spec.name not in outputs]
        if missing:
            raise InferenceFailed(f"no output {missing[0]!r} came of the row {expected.row.name!r}")
        if request.left_s <= 0:
            raise DeadlineExceeded("the answer was ready only after the deadline")
        wanted = {spec.name: outputs[spec.name] for spec in request.release.outputs}
        return Answer(wanted, _report(request, expected, race, cloud))

    # What is learnt of the cloud

    def _learn(self, up_bytes: int, outcome: Outcome) -> None:
        with self._lock:
            was = self._breaker.state
            if isinstance(outcome, RemoteAnswer):
                self._breaker = self._breaker.succeeded()
                if self._meter is not None:
                    down = outcome.down_bytes
                    self._meter = self._meter.transferred(up_bytes, down, outcome.link_s).loaded(outcome.load)
            elif outcome.cause != "rejected":  # a bad input says nothing about the cloud
                refused = outcome.cause == "refused"
                self._breaker = self._breaker.failed(monotonic(), random.random(), refused=refused)
                if outcome.cause == "timeout" and self._meter is not None:
                    self._meter = self._meter.gave_up(up_bytes, outcome.elapsed_s)
            now = self._breaker.state
        if isinstance(outcome, RemoteFailure):
            log.info("cloud: %s: %s", outcome.cause, outcome.text)
        if was != now:
            log.warning("breaker: %s -> %s", was, now)
            self._wake_watcher()

    def _wake_watcher(self) -> None:
        with self._watch:
            self._watch.notify_all()

    def _watch_link(self) -> None:
        """Probe: a cloud that failed, when its pause is over; a link on which nothing else was sent for a while."""
        assert self._remote is not None
        while True:
            with self._watch:
                if self._stopping:
                    return
                pause_s = self._until_probe()
                if pause_s > 0:
                    self._watch.wait(pause_s)
                    continue
            try:
                self._probe(self._remote)
            except Exception:
                log.exception("the link's probe failed")
                with self._watch:
                    self._watch.wait(self._settings.idle_probe_s)

    def _until_probe(self) -> float:
        with self._lock:
            if self._meter is None:
                return 3600.0
            if not self._breaker.lets_through:
                return self._breaker.probe_at - monotonic()
            if probe_due(monotonic(), self._last_sent, self._settings.idle_probe_s):
                return 0.0
            return self._last_sent + self._settings.idle_probe_s - monotonic()

    def _probe(self, remote: Remote) -> None:
        """First the round trip, on a connection that is open afterwards; then the rate."""
        with self._lock:
            self._last_sent = monotonic()
            ping_s = PING_TIMEOUT_S + 8 * (self._meter.rtt_s if self._meter else 0.0)
        rtt_s = remote.ping(ping_s)
        if isinstance(rtt_s, RemoteFailure):
            self._learn(0, rtt_s)
            return
        with self._lock:
            if not self._breaker.lets_through:
                log.warning("breaker: the cloud is there again, trying it")
            self._breaker = self._breaker.probed()
            if self._meter is not None:
                self._meter = self._meter.round_trip(rtt_s)
        outcome = remote.probe(PROBE_TIMEOUT_S)
        with self._lock:
            self._last_sent = monotonic()
            if self._meter is None:
                return
            if isinstance(outcome, RemoteAnswer):
                self._meter = self._meter.transferred(outcome.up_bytes, outcome.down_bytes, outcome.link_s)
            elif outcome.cause == "timeout":
                self._meter = self._meter.gave_up(PROBE_BYTES, outcome.elapsed_s)


@dataclass(frozen=True)
class Expected:
    """What the plan promised for the row that was chosen."""

    row: Row
    latency_s: float
    remote_s: float
    """Link and cloud together: how long the cloud should be away."""


@dataclass(frozen=True)
class Encoded:
    """A body ready to send, and what making it took."""

    asked: Ask
    seconds: float


@dataclass
class Race:
    """A request whose rest is with the cloud, and perhaps with the device too."""

    request: Request
    expected: Expected
    live: Mapping[str, Tensor]
    encoded: Encoded
    call: Call = field(default_factory=Call)
    cause: str = ""
    """Why the cloud is out of it, or late."""
    over: bool = False
    """There is a winner, or none will be waited for: the tail stops where it is."""
    alone_from: float = 0.0
    """When the device began to finish alone."""
    tail_s: float = 0.0
    """Of the slices that finished it alone."""
    began: float = field(default_factory=perf_counter)
    _arrivals: queue.SimpleQueue[Arrival] = field(default_factory=queue.SimpleQueue)

    @property
    def waited_s(self) -> float:
        """Since the cloud was asked."""
        return perf_counter() - self.began

    def put(self, arrival: Arrival) -> None:
        """A runner has arrived, or has given up."""
        self._arrivals.put(arrival)

    def next(self, timeout_s: float) -> Arrival | None:
        """The next to arrive, or None if none does in time."""
        try:
            return self._arrivals.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None


@dataclass(frozen=True)
class TailDone:
    """The device has finished alone."""

    live: Mapping[str, Tensor]
    timing: Timing


Arrival = RemoteAnswer | RemoteFailure | TailDone | EdgeError


def _report(request: Request, expected: Expected, race: Race | None, cloud: RemoteAnswer | None) -> Report:
    row = expected.row
    fell_back = race is not None and cloud is None
    seconds = request.course.timeline.seconds()
    remote = cloud.phases if cloud else {}
    return Report(
        release=request.release.digest,
        row=row.name,
        after=row.after,
        fallback=fell_back,
        cause=race.cause if race is not None and fell_back else "",
        emulated=request.release.emulated,
        late=request.timing.late > 0,
        latency_s=perf_counter() - request.began,
        queue_s=seconds.get(QUEUE, 0.0) + (seconds.get(TAIL_QUEUE, 0.0) if fell_back else 0.0),
        decode_s=seconds.get(DECODE, 0.0),
        tail_s=race.tail_s if race else 0.0,
        waited_s=race.alone_from - race.began if race and fell_back else 0.0,
        remote_queue_s=remote.get(timeline.QUEUE, 0.0),
        remote_decode_s=remote.get(timeline.DECODE, 0.0),
        remote_encode_s=remote.get(timeline.ENCODE, 0.0),
        answer_decode_s=cloud.decode_s if cloud else 0.0,
        trace_id=request.course.trace_id,
        predicted_s=expected.latency_s,
        device_s=request.timing.total_s,
        encode_s=race.encoded.seconds if race else 0.0,
        link_s=cloud.link_s if cloud else 0.0,
        remote_s=cloud.server_s if cloud else 0.0,
        up_bytes=race.encoded.asked.up_bytes if race else 0,
        down_bytes=cloud.down_bytes if cloud else 0,
    )


def predictions(plan_: Plan, now: Conditions) -> dict[str, float]:
    """Seconds that each row would take now, by name; for people."""
    return {row.name: plan.latency_s(row, now) for row in plan_.rows}


def known(model: str, serving: Iterable[str]) -> str:
    """What to ask for instead of a model that does not run here."""
    there = sorted(serving)
    near = difflib.get_close_matches(model, there, 3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"these do: {', '.join(there)}" if there else "no model does yet: `edgectl deploy` sends one"
