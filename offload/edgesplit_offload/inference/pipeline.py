"""Inference requests of one process, each from whole request to answer, in stages that wait for nothing.

Read and checked by the thread that leads (`loop`), queued for a run here or at the process that gathers its kind, and
answered by whoever ran it. What takes long on the way (opening a release, loading a model, undoing or making a content
coding, numbers as JSON) is left to another thread. Every request that was begun here is answered once, whatever fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple

from edgesplit.errors import EdgeError
from edgesplit.http1.content_coding import CODINGS, COMPRESSED_FROM, UnknownCoding, accepted, decoded, encoded
from edgesplit.http1.head import Asked
from edgesplit.http1.server import Request, Response, error_response, response_to
from edgesplit.observability.phases import DECODE, ENCODE, LOAD, QUEUE, RUN, Phase
from edgesplit.oip import protocol as oip
from edgesplit.oip.fast_codec import Exact
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor
from edgesplit_offload.batching.remote_batcher import Elsewhere
from edgesplit_offload.frontend.event_loop import Loop
from edgesplit_offload.models.remote_half import FarHalf
from edgesplit_offload.models.repository import VERSION, RemoteModel, Shelf
from edgesplit_offload.observability.request_metrics import Visit, Visits, outcome
from edgesplit_offload.observability.statistics import Counts
from edgesplit_offload.scheduling.arrivals import Habit
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import LOOK_UP_S, Turns

log = logging.getLogger(__name__)

SECONDS_HEADER = "edgesplit-seconds"
QUEUE_HEADER = "edgesplit-queue-seconds"
LOAD_HEADER = "edgesplit-load"
QUICK_JSON_BYTES = 65_536
"""A JSON part that is longer is read by another thread."""
Answer = Callable[[Response], None]
Wanted = Exact | oip.InferRequest


class Route(NamedTuple):
    """What a request's head says."""

    name: str
    """Of the model."""
    is_quick: bool
    """Can its body be read in no time?"""
    header_length: int | None
    """Of the JSON part, where it is told."""
    accepts: str
    """Content codings that its client takes."""


@dataclass(eq=False, kw_only=True, slots=True)
class Inference(Job):
    """One request, once it is known to be one that can run."""

    model: RemoteModel
    visit: Visit
    asked: Wanted
    accepts: str
    """Content codings that its client takes."""
    began: float
    answer: Answer


class Inferring:
    """All of one process's that are finished by itself, or by another process of this server."""

    def __init__(
        self,
        shelf: Shelf,
        turns: Turns,
        loop: Loop,
        elsewhere: Elsewhere | None,
        seen: tuple[Visits, Counts],
        asked: Callable[[FarHalf], None],
    ) -> None:
        """`asked`: told of each half that is asked for, so that it is measured some time."""
        self._shelf = shelf
        self._turns = turns
        self._loop = loop
        self._elsewhere = elsewhere
        self._visits, self._counts = seen
        self._asked = asked

    def begin(self, request: Request, route: Route, habit: Habit, answer: Answer) -> None:
        """See to it that it is answered. By the leader."""
        began = perf_counter()
        visit = self._visits.begin(request)
        try:
            model = self._shelf.known(route.name) if route.is_quick else None
        except Exception as error:  # whatever it is, it is the answer
            self._fail(error, visit, "", answer, began)
            return
        if model is None or not model.half.is_loaded:
            self._loop.lend(partial(self._slowly, request, route, habit, visit, answer, began))
            return
        inference = self._read(request, route, habit, model, visit, answer, began)
        if inference is not None:
            self._queue(inference)

    def over(self, jobs: Sequence[Job]) -> None:
        """These have been run, or never will be. From any thread."""
        for one in jobs:
            if isinstance(one, Inference):
                self._over(one)

    def told(self, began: float) -> dict[str, str]:
        """What the client of a request is told of what it took in here, and of how loaded that is."""
        return {
            SECONDS_HEADER: f"{perf_counter() - began:.6f}", LOAD_HEADER: f"{max(1.0, self._turns.load):.3f}"
        }  # fmt: skip

    def _slowly(self, request: Request, route: Route, habit: Habit, visit: Visit, answer: Answer, began: float) -> None:
        """What the leader has no time for; then it goes on as ever."""
        try:
            with visit.working():
                model = self._shelf.model(route.name)
                visit.model, visit.row = model.served, model.row.name
        except Exception as error:  # whatever it is, it is the answer
            self._fail(error, visit, "", answer, began)
            return
        inference = self._read(request, route, habit, model, visit, answer, began)
        if inference is None:
            return
        try:
            if not model.half.is_loaded:
                with visit.timeline.phase(LOAD):
                    model.half.load()
        except Exception as error:  # whatever it is, it is the answer
            self._fail(error, visit, model.name, answer, began)
            return
        self._loop.post(partial(self._queue, inference))

    def _read(
        self,
        request: Request,
        route: Route,
        habit: Habit,
        model: RemoteModel,
        visit: Visit,
        answer: Answer,
        began: float,
    ) -> Inference | None:
        """The request as it can run; None where it has its answer, that it cannot."""
        visit.model, visit.row = model.served, model.row.name
        half, patience_s = model.half, None
        try:
            asked: Wanted | None = None
            if route.is_quick:
                asked = model.words.exactly(request.body, route.header_length)
            if asked is not None:
                inputs = asked.inputs
            else:
                asked, inputs = given(request, model)
            if asked.parameters:
                patience_s = oip.timeout_s(asked.parameters)
        except Exception as error:  # whatever it is, it is the answer
            visit.timeline.since(DECODE, began)
            self._fail(error, visit, model.name, answer, began)
            return None
        visit.timeline.since(DECODE, began)
        arrived = monotonic()
        return Inference(
            inputs, half.run, half.pace, request.peer, None if patience_s is None else arrived + patience_s,
            request.closed, habit, arrived=arrived, home=self, model=model, visit=visit, asked=asked, answer=answer,
            accepts=route.accepts, began=began,
        )  # fmt: skip

    def _queue(self, one: Inference) -> None:
        """For a run, wherever that is."""
        half = one.model.half
        try:
            if (
                self._elsewhere is None or not half.travels
                or not self._elsewhere.takes(half.kind, one.model.name, one, self._here)
            ):  # fmt: skip
                self._here(one)
        except Exception as error:  # whatever it is, it is the answer
            self._fail(error, one.visit, one.model.name, one.answer, one.began)

    def _here(self, job: Job) -> None:
        try:
            self._turns.put(job)
        except Exception as error:  # Busy, mostly
            job.error = error
            self.over([job])
            return
        self._loop.look_by(min(job.end, job.arrived + LOOK_UP_S))

    def _over(self, one: Inference) -> None:
        visit = one.visit
        phases, ran = visit.timeline.phases, one.arrived + one.queue_s
        if one.together:
            visit.batch, visit.leads = one.together, one.leads
            phases.append(Phase(QUEUE, one.arrived, ran))
            phases.append(Phase(RUN, ran, ran + one.run_s))
        else:
            visit.leads = False
            phases.append(Phase(QUEUE, one.arrived, perf_counter()))
        if one.error is not None:
            self._fail(one.error, visit, one.model.name, one.answer, one.began)
        elif (one.asked.binary_outputs is False or one.accepts) and _is_long(one) and self._loop.is_mine:
            self._loop.lend(partial(self._finish, one))
        else:
            self._finish(one)

    def _finish(self, one: Inference) -> None:
        """It was run: encode what it gave."""
        visit, began = one.visit, perf_counter()
        try:
            headers, buffers = encoded_answer(one.model, one.asked, one.value, one.accepts)
            visit.sent = sum(map(len, buffers))
            now = visit.timeline.since(ENCODE, began)
            seconds = visit.timeline.seconds()
            headers[QUEUE_HEADER] = f"{seconds[QUEUE]:.6f}"
            visit.tell(headers, seconds)
            took_s = now - one.began
            headers[SECONDS_HEADER], headers[LOAD_HEADER] = f"{took_s:.6f}", f"{self._turns.load:.3f}"
        except Exception as error:  # whatever it is, it is the answer
            self._fail(error, visit, one.model.name, one.answer, one.began)
            return
        self._visits.ended(visit, "answered", seconds=seconds)
        self._counts.answered(one.model.name, seconds, took_s, visit.batch, visit.leads)
        self._asked(one.model.half)
        one.answer(Response(200, headers, buffers, after=self.add_up))

    def add_up(self) -> None:
        """What was noted of many requests is counted when one more answer has gone, and nobody waits for that."""
        self._visits.ledger.add_up_if_due()
        self._counts.add_up_if_due()

    def _fail(self, error: BaseException, visit: Visit, name: str, answer: Answer, began: float) -> None:
        """Its answer is this error."""
        if name:
            self._counts.failed(name, perf_counter() - began)
        with visit.working():
            self._visits.ended(visit, outcome(error), f"{type(error).__name__}: {error}"[:200])
            if not isinstance(error, EdgeError):
                log.error("an inference failed", exc_info=error)
            response = error_answer(error)
        answer(Response(response.status, {**response.headers, **self.told(began)}, response.body, after=self.add_up))


def _is_long(one: Inference) -> bool:
    """Does it take long to write its answer?"""
    size = sum(tensor.nbytes for tensor in one.value.values())
    if one.asked.binary_outputs is False:
        return bool(size > QUICK_JSON_BYTES // 8)
    return bool(size >= COMPRESSED_FROM and accepted(one.accepts))


def error_answer(error: BaseException) -> Response:
    """The response that tells of it."""
    if isinstance(error, UnknownCoding):
        return error_response(415, str(error), {"accept-encoding": ", ".join(CODINGS)})
    if isinstance(error, EdgeError):
        return response_to(error)
    return error_response(500, f"internal error: {type(error).__name__}")


def given(request: Request, model: RemoteModel) -> tuple[Wanted, Mapping[str, Tensor]]:
    """What is asked, and the inputs as the model takes them; MalformedMessage or UsageError where it cannot be."""
    coding = request.headers.get("content-encoding", "")
    body = decoded(request.body, coding, model.most_body_bytes) if coding else request.body
    asked = oip.decode_request(body, oip.header_length(request.headers))
    inputs = boundary_codecs.decode_all(asked.inputs, model.inputs, model.row.codecs)
    oip.check_tensors(inputs, model.inputs)
    if asked.outputs:
        oip.pick_outputs({spec.name: spec for spec in model.outputs}, asked.outputs)
    return asked, inputs


def encoded_answer(
    model: RemoteModel, asked: Wanted, made: Mapping[str, Tensor], accepts: str
) -> tuple[dict[str, str], oip.Buffers]:
    """Headers and body that answer it."""
    outputs, binary = oip.pick_outputs(made, asked.outputs), asked.binary_outputs
    are_bytes = binary if isinstance(binary, bool) else binary.issuperset(outputs)
    buffers: oip.Buffers
    exact = model.words.answer(outputs, asked.id) if are_bytes else None
    buffers, length = exact or oip.encode_response(oip.InferResponse(model.name, outputs, VERSION, asked.id), binary)
    coding = accepted(accepts) if accepts and sum(map(len, buffers)) >= COMPRESSED_FROM else ""
    if coding:
        buffers = [encoded(buffers, coding)]
    headers = {"content-type": "application/json" if length is None else "application/octet-stream"}
    if length is not None:
        headers[oip.HEADER_LENGTH] = str(length)
    if coding:
        headers["content-encoding"] = coding
    return headers, buffers


def route_of(name: str, asked: Asked) -> Route:
    """Of a request with that head, for the model `name`."""
    headers = asked.head.headers
    accepts, told = headers.get("accept-encoding", ""), headers.get(oip.HEADER_LENGTH)
    if "content-encoding" in headers:
        return Route(name, False, None, accepts)
    if told is None:
        return Route(name, asked.length <= QUICK_JSON_BYTES, None, accepts)
    length = int(told) if told.isascii() and told.isdigit() and len(told) <= 12 else None
    return Route(name, length is not None and length <= QUICK_JSON_BYTES, length, accepts)
