"""Remote inferences in the controller: bounded, answered by the right device only, cancelled, and honest about devices
that are offline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest

from edgesplit.errors import Busy, DeadlineExceeded, EdgeError, LinkError, MalformedMessage, NotFound, UsageError
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Birth, Death
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
    Request,
    SignedJob,
    pieces,
)
from edgesplit.observability.registry import MetricRegistry
from edgesplit_controller.errors import Conflict
from edgesplit_controller.fleet.remote_inference import (
    MAX_IN_FLIGHT,
    MAX_PER_DEVICE,
    MAX_PER_OPERATOR,
    Inference,
    InferenceAnswer,
    PendingInference,
    RemoteInferences,
)
from support.device_fleet import FleetHarness, new_url


def inference(operator: str = "me", body: bytes = b"q" * 300_000, deadline_s: float = 20.0) -> Inference:
    return Inference(operator, "digits", body, 9, deadline_s)


class Desk:
    """The inferences of one process, and what was sent to which device."""

    def __init__(self, folder: Path) -> None:
        self.world = FleetHarness(new_url(folder))
        self.world.add("cam", "thief", "new")
        self.birth("cam")
        self.birth("thief")
        self.sent: list[tuple[str, Request]] = []
        self.broken: Exception | None = None
        self.metrics = MetricRegistry()
        self.inferences = RemoteInferences(
            self.world.database, messages.encode, self.send, 2, registry=self.metrics, now=lambda: self.world.now,
            check_s=0.01,
        )  # fmt: skip

    def birth(self, name: str, session: int = 3, start_id: str = "s1") -> None:
        birth = Birth(session, 0.5, "0.3", "pi4", True, "http://x", start_id=start_id)
        self.world.devices.ingest([(name, birth)])

    def send(self, device: str, message: Request, wait_s: float | None) -> None:
        if self.broken is not None:
            raise self.broken
        self.sent.append((device, message))

    async def begin(self, name: str = "cam", **more: Any) -> PendingInference:
        return await self.inferences.begin(self.world.devices.get(name), inference(**more))

    def say(self, device: str, *said: Reply) -> list[bool]:
        return [self.inferences.on_reply(device, message) for message in said]

    def cancelled(self) -> list[str]:
        return [message.id for _, message in self.sent if isinstance(message, CancelJob)]


def answer(id_: str, body: bytes = b"answer") -> list[Reply]:
    return [AnswerHead(id_, BodyHead.of(body, None)), *pieces(id_, body)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def rest(states: AsyncIterator[str | InferenceAnswer]) -> list[str | InferenceAnswer]:
    return [state async for state in states]


def test_a_request_reaches_the_device_whole_and_its_answer_comes_back(tmp_path: Path) -> None:
    """Signed for the device's session, with the body's digest and the process that waits."""
    desk = Desk(tmp_path)

    async def work() -> None:
        pending = await desk.begin()
        assert {name for name, _ in desk.sent} == {"cam"}
        first, *body = (message for _, message in desk.sent)
        assert isinstance(first, SignedJob)
        job = messages.decode(first.signed, InferenceJob)
        assert (job.device, job.session, job.process, job.model) == ("cam", 3, 2, "digits")
        assert job.number == int(desk.world.now * 1e6) and desk.world.now < job.expires and job.deadline_s < 20.0
        assembly, whole = BodyAssembly(job.body), None
        for piece in body:
            assert isinstance(piece, InferencePiece)
            whole = assembly.add(piece)
        assert whole == inference().body
        followed = desk.inferences.follow(pending)
        assert await anext(followed) == "sent"
        assert desk.say("cam", JobProgress(pending.id, "running")) == [True]
        assert await anext(followed) == "running"
        desk.say("cam", *answer(pending.id))
        assert await rest(followed) == [InferenceAnswer(b"answer", None)]
        assert desk.cancelled() == []

    run(work())


def test_an_answer_of_another_device_is_ignored(tmp_path: Path) -> None:
    """Also answers to nothing that was asked, and further answers."""
    desk = Desk(tmp_path)

    async def work() -> None:
        pending = await desk.begin()
        assert desk.say("thief", *answer(pending.id, b"forged")) == [False, False]
        assert desk.say("thief", JobFailed(pending.id, "UsageError", "no")) == [False]
        assert desk.say("cam", *answer("f" * 16)) == [False, False]
        desk.say("cam", *answer(pending.id), *answer(pending.id, b"second"))
        assert await rest(desk.inferences.follow(pending)) == ["sent", InferenceAnswer(b"answer", None)]
        assert desk.say("cam", *answer(pending.id)) == [False, False]

    run(work())


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (JobFailed("", "NotFound", "no model digits runs on this device"), NotFound, "cam: no model"),
        (JobFailed("", "Busy", "later"), Busy, "later"),
        (JobFailed("", "SystemExit", "?"), EdgeError, "cam"),
        (JobFailed("", "Busy", "\x1b[31m"), Busy, r"cam: \\x1b"),
        (InferencePiece("", 3, b"x"), MalformedMessage, "spoiled"),
    ],
)
def test_an_error_of_the_device_is_raised_as_its_kind(
    tmp_path: Path, said: JobFailed | InferencePiece, kind: type[Exception], text: str
) -> None:
    """With the device's name; a word that is none of our errors is only an error."""
    desk = Desk(tmp_path)

    async def work() -> None:
        pending = await desk.begin()
        head = AnswerHead(pending.id, BodyHead.of(b"answer", None))
        named = type(said)(pending.id, *[getattr(said, name) for name in said.__struct_fields__[1:]])
        desk.say("cam", head, named)
        with pytest.raises(kind, match=text):
            await rest(desk.inferences.follow(pending))

    run(work())


def test_requests_in_flight_are_bounded_per_device_operator_and_process(tmp_path: Path) -> None:
    """Places are free again when a request ends, also where its caller left before it began to wait."""
    desk = Desk(tmp_path)
    desk.world.add(*(f"d{number}" for number in range(40)))
    for number in range(40):
        desk.birth(f"d{number}")

    async def work() -> None:
        first = [await desk.begin(operator=f"o{number}") for number in range(MAX_PER_DEVICE)]
        with pytest.raises(Busy, match="on cam"):
            await desk.begin(operator="another")
        mine = [await desk.begin(f"d{number}") for number in range(MAX_PER_OPERATOR)]
        with pytest.raises(Busy, match="me has"):
            await desk.begin("d39")
        for number in range(MAX_IN_FLIGHT - len(first) - len(mine)):
            await desk.begin(f"d{9 + number // 2}", operator=f"p{number // 2}")
        with pytest.raises(Busy, match="through this controller"):
            await desk.begin("d38", operator="q")
        desk.say("cam", *answer(first[0].id))
        await rest(desk.inferences.follow(first[0]))
        await desk.begin("cam", operator="another")
        for pending in mine:
            pending.deadline -= 100.0
        await desk.begin("d39")

    run(work())


def test_a_request_that_is_too_large_says_what_to_do() -> None:
    """Before anything is sent; so does a deadline that is too long."""
    with pytest.raises(UsageError, match="Send the picture as JPEG"):
        inference(body=b"x" * (LIMITS.remote_inference_bytes + 1))
    for deadline_s in (0.0, -1.0, 61.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match="deadline"):
            inference(deadline_s=deadline_s)
    for body, text in ((b"", "no body"), (b"12345678", "a JSON part of 9 bytes")):
        with pytest.raises(UsageError, match=text):
            inference(body=body)


def test_an_offline_device_is_called_offline_with_the_time(tmp_path: Path) -> None:
    """Since when, and when it was last seen; a simulated one runs nothing."""
    desk = Desk(tmp_path)
    desk.world.devices.ingest([("cam", Death(3))])
    desk.world.now += 3_700.0
    desk.world.devices.ingest([("thief", Birth(4, 0.5, "0.3", "pi4", True, "http://x", simulated=True))])

    async def work() -> None:
        with pytest.raises(Conflict, match=r"cam is offline since 2027-01-15T08:00:00Z \(last seen 1h1m40s ago\)"):
            await desk.begin()
        with pytest.raises(Conflict, match="has not connected since it enrolled"):
            await desk.begin("new")
        with pytest.raises(Conflict, match="simulated"):
            await desk.begin("thief")
        assert desk.sent == []

    run(work())


def test_a_request_ends_with_the_agent_that_had_it(tmp_path: Path) -> None:
    """Killed or restarted in the middle: an error that says so, not the deadline. Another session of the same agent,
    as after a restart of the broker, may still answer."""
    desk = Desk(tmp_path)

    async def work() -> None:
        gone, restarted, kept = await desk.begin(), await desk.begin("thief"), await desk.begin()
        desk.birth("cam", session=4)
        desk.birth("thief", session=4, start_id="s2")
        with pytest.raises(LinkError, match="was restarted"):
            await rest(desk.inferences.follow(restarted))
        followed = desk.inferences.follow(kept)
        assert await anext(followed) == "sent"
        desk.inferences._check_connected(kept)
        desk.say("cam", *answer(kept.id))
        assert await rest(followed) == [InferenceAnswer(b"answer", None)]
        desk.world.devices.ingest([("cam", Death(4))])
        with pytest.raises(LinkError, match=r"cam is offline since .*may have run"):
            await rest(desk.inferences.follow(gone))

    run(work())


def test_a_deadline_says_how_far_the_device_was(tmp_path: Path) -> None:
    """And cancels the request there."""
    desk = Desk(tmp_path)

    async def work() -> None:
        silent, running = await desk.begin(), await desk.begin("thief")
        desk.say("thief", JobProgress(running.id, "running"))
        for pending, text in ((silent, "its agent did not react"), (running, "was still running it")):
            pending.deadline -= 100.0
            with pytest.raises(DeadlineExceeded, match=text):
                await rest(desk.inferences.follow(pending))
        assert desk.cancelled() == [silent.id, running.id]

    run(work())


def test_a_caller_that_leaves_cancels_its_request(tmp_path: Path) -> None:
    """The device is told, the place is free, and the metric counts it apart."""
    desk = Desk(tmp_path)

    async def work() -> None:
        pending = await desk.begin()
        followed = desk.inferences.follow(pending)
        assert await anext(followed) == "sent"
        await followed.aclose()
        assert desk.cancelled() == [pending.id]
        assert desk.say("cam", *answer(pending.id)) == [False, False]

    run(work())
    assert [(series.labels, series.value) for series in desk.metrics.series()] == [(("cancelled",), 1.0)]


def test_a_broker_that_does_not_accept_the_request_is_an_error(tmp_path: Path) -> None:
    """And takes no place."""
    desk = Desk(tmp_path)

    async def work() -> None:
        for _ in range(MAX_PER_OPERATOR + 1):
            desk.broken = LinkError("the broker is gone")
            with pytest.raises(LinkError):
                await desk.begin()
        desk.broken = None
        await desk.begin()

    run(work())
