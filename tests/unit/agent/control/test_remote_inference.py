"""Inferences of operators on the device: run once, for the right session, in bounded number, size and time."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from edgesplit.errors import EdgeError, LinkError, MalformedMessage, TrustError, UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.remote_inference import (
    AnswerHead,
    BodyAssembly,
    BodyHead,
    CancelJob,
    InferenceJob,
    InferencePiece,
    JobFailed,
    JobProgress,
    Reply,
    SignedJob,
    pieces,
)
from edgesplit.release.manifest import Signed
from edgesplit_agent.control.remote_inference import (
    MAX_JOBS,
    REPLAY_WINDOW_US,
    JobLedger,
    RemoteInferenceService,
    Replayed,
)

PATIENCE_S = 20.0
BODY = b"q" * (LIMITS.chunk_bytes + 5)


def job(number: int = 1, *, body: bytes = BODY, session: int = 3, deadline_s: float = 5.0) -> InferenceJob:
    return InferenceJob(
        device="cam", id=f"{number:016x}", session=session, number=10**15 + number, process=2, model="m",
        deadline_s=deadline_s, expires=2**40, body=BodyHead.of(body, 7),
    )  # fmt: skip


def signed(job_: InferenceJob) -> SignedJob:
    return SignedJob(messages.encode(Signed(messages.encode(job_), ())))


@dataclass
class ServiceHarness:
    """The service over a fake engine, with a clock that is set by hand."""

    now: float = 100.0
    session: int = 3
    ran: list[bytes] = field(default_factory=list)
    ended: list[EdgeError | None] = field(default_factory=list)
    run_s: float = 0.0
    answer: bytes = b"answer"
    allowed: bool = True
    trust: EdgeError | None = None

    def __post_init__(self) -> None:
        self.replies: queue.Queue[tuple[int, Reply]] = queue.Queue()
        self.gate: queue.Queue[None] | None = None
        self.started: queue.Queue[None] = queue.Queue()
        self.service = RemoteInferenceService(
            self.verify, self.run, lambda process, message, wait_s: self.replies.put((process, message)),
            lambda: self.session, allowed=self.allowed, on_end=self.ended.append, clock=lambda: self.now,
        )  # fmt: skip

    def verify(self, raw: bytes) -> InferenceJob:
        if self.trust is not None:
            raise self.trust
        return messages.decode(messages.decode(raw, Signed).payload, InferenceJob)

    def run(self, model: str, body: bytes, json_bytes: int | None, deadline_s: float) -> tuple[bytes, int | None]:
        self.started.put(None)
        if self.gate is not None:
            self.gate.get(timeout=PATIENCE_S)
        self.now += self.run_s
        self.ran.append(body)
        return self.answer, 3

    def say(self, *said: SignedJob | InferencePiece | CancelJob) -> None:
        for message in said:
            self.service.on_message(messages.encode(message))

    def ask(self, job_: InferenceJob, body: bytes = BODY) -> None:
        self.say(signed(job_), *pieces(job_.id, body))

    def next(self) -> Reply:
        process, message = self.replies.get(timeout=PATIENCE_S)
        assert process == 2
        return message

    def outcome(self) -> bytes | JobFailed:
        """The next answer or refusal."""
        while not isinstance(message := self.next(), JobFailed):
            if isinstance(message, AnswerHead):
                assembly, body = BodyAssembly(message.body), None
                while body is None:
                    piece = self.next()
                    assert isinstance(piece, InferencePiece)
                    body = assembly.add(piece)
                return body
        return message


@pytest.fixture()
def harness() -> Iterator[ServiceHarness]:
    made = ServiceHarness()
    made.service.start()
    yield made
    made.service.stop()


def test_a_job_is_answered_to_the_process_that_sent_it(harness: ServiceHarness) -> None:
    """It reports that it waits and runs; the answer of several pieces is whole."""
    harness.answer = b"a" * (2 * LIMITS.chunk_bytes + 1)
    harness.ask(job())
    assert [harness.next(), harness.next()] == [JobProgress(job().id, "waiting"), JobProgress(job().id, "running")]
    assert harness.outcome() == harness.answer
    assert harness.ran == [BODY] and harness.ended == [None]


def test_a_replayed_job_is_run_once(harness: ServiceHarness) -> None:
    """Delivered twice, and replayed later: one run, one answer; nothing is answered to a replay."""
    harness.say(signed(job()))
    harness.ask(job())
    assert harness.outcome() == b"answer"
    harness.ask(job(2))
    assert harness.outcome() == b"answer"
    harness.ask(job())
    harness.ask(job(3))
    assert harness.outcome() == b"answer"
    assert len(harness.ran) == 3 and harness.ended == [None] * 3


def test_the_ledger_accepts_each_job_once_in_its_session() -> None:
    """Jobs of two controller processes may arrive out of order within the window; older ones may be replays."""
    ledger = JobLedger()
    ledger.accept(job(REPLAY_WINDOW_US), 3)
    ledger.accept(job(1), 3)
    for replayed in (job(1), job(REPLAY_WINDOW_US)):
        with pytest.raises(Replayed):
            ledger.accept(replayed, 3)
    ledger.accept(job(2 * REPLAY_WINDOW_US + 9), 3)
    assert len(ledger.accepted) == 1
    with pytest.raises(Replayed):
        ledger.accept(job(1), 3)
    with pytest.raises(LinkError, match="connected to the broker again"):
        ledger.accept(job(1), 4)


def test_a_job_of_another_session_is_not_run(harness: ServiceHarness) -> None:
    """A job that was recorded before the agent restarted is refused, and the reason says that nothing ran."""
    harness.session = 4
    harness.ask(job())
    refusal = harness.outcome()
    assert isinstance(refusal, JobFailed) and refusal.kind == "LinkError" and "has run nothing" in refusal.reason
    assert harness.ran == []


def test_a_job_that_is_not_trusted_is_not_run(harness: ServiceHarness) -> None:
    """Whatever its body is."""
    harness.trust = TrustError("inference job: it is not signed")
    harness.ask(job())
    refusal = harness.outcome()
    assert isinstance(refusal, JobFailed) and refusal.kind == "TrustError" and harness.ran == []


def test_another_body_than_the_signed_one_is_not_run(harness: ServiceHarness) -> None:
    """Of the same length; pieces that do not fit, too."""
    harness.ask(job(), b"x" * len(BODY))
    assert isinstance(refusal := harness.outcome(), JobFailed) and refusal.kind == "MalformedMessage"
    harness.say(signed(job(2)), InferencePiece(job(2).id, 9, b"x"))
    assert isinstance(refusal := harness.outcome(), JobFailed) and "does not fit" in refusal.reason
    assert harness.ran == []


def test_jobs_beyond_the_bound_are_refused_as_busy(harness: ServiceHarness) -> None:
    """Also jobs whose body never comes; their places are free again after their deadline."""
    for number in range(MAX_JOBS):
        harness.say(signed(job(number)))
    harness.say(signed(job(99)))
    assert isinstance(refusal := harness.outcome(), JobFailed) and (refusal.id, refusal.kind) == (job(99).id, "Busy")
    harness.now += 6.0
    harness.ask(job(100))
    assert harness.outcome() == b"answer"


def test_jobs_take_a_bounded_share_of_the_time(harness: ServiceHarness) -> None:
    """After a run of a second the next one waits three; a job whose deadline is before that is refused with the
    reason."""
    harness.run_s = 1.0
    harness.ask(job(1))
    assert harness.outcome() == b"answer"
    harness.ask(job(2, deadline_s=2.0))
    harness.ask(job(3, deadline_s=9.0))
    harness.now += 2.5
    harness.say(CancelJob("f" * 16))
    assert isinstance(refusal := harness.outcome(), JobFailed)
    assert refusal.kind == "DeadlineExceeded" and "25%" in refusal.reason
    harness.now += 1.0
    harness.say(CancelJob("f" * 16))
    assert harness.outcome() == b"answer" and len(harness.ran) == 2


def test_a_cancelled_job_is_not_run_and_its_answer_not_sent(harness: ServiceHarness) -> None:
    """Where it waits, and where it runs already."""
    harness.gate = queue.Queue()
    harness.ask(job(1))
    harness.started.get(timeout=PATIENCE_S)
    harness.ask(job(2))
    harness.say(CancelJob(job(1).id), CancelJob(job(2).id), CancelJob("f" * 16))
    harness.gate.put(None)
    harness.gate.put(None)
    harness.ask(job(3))
    assert harness.outcome() == b"answer"
    assert len(harness.ran) == 2


def test_a_device_whose_policy_forbids_it_runs_nothing_for_operators() -> None:
    """--no-remote-inference: refused before any body is received."""
    harness = ServiceHarness(allowed=False)
    harness.say(signed(job()))
    refusal = harness.next()
    assert isinstance(refusal, JobFailed) and "--no-remote-inference" in refusal.reason


def test_an_answer_that_is_too_large_is_refused_with_what_to_do(harness: ServiceHarness) -> None:
    """The run counts, the answer does not leave."""
    harness.answer = b"a" * (LIMITS.remote_inference_bytes + 1)
    harness.ask(job())
    refusal = harness.outcome()
    assert isinstance(refusal, JobFailed) and "fewer outputs" in refusal.reason
    assert isinstance(harness.ended[0], UsageError)


def test_an_exception_in_the_engine_is_an_error_and_the_service_goes_on(harness: ServiceHarness) -> None:
    """The caller does not wait for its deadline."""
    harness.answer = None  # type: ignore[assignment]
    harness.ask(job())
    assert isinstance(refusal := harness.outcome(), JobFailed) and refusal.kind == "InferenceFailed"
    harness.answer = b"answer"
    harness.ask(job(2))
    assert harness.outcome() == b"answer"


def test_a_malformed_message_changes_nothing(harness: ServiceHarness) -> None:
    """It raises on the network's thread, which drops it; the service goes on."""
    for raw in (b"", b"\xc1", messages.encode(SignedJob(b"x")), messages.encode(InferencePiece("x", 0, b"y"))):
        with pytest.raises(MalformedMessage):
            harness.service.on_message(raw)
    harness.ask(job())
    assert harness.outcome() == b"answer"
