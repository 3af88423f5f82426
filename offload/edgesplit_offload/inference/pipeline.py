"""Inference pipeline of one process: each request from receipt to answer, in stages that do not block.

Requests are decoded and checked by the event loop's leader, queued for a run here or at their batcher, and answered by
the thread that ran them. Slow work on the way (opening a release, loading a model, content codings, numbers as JSON) is
done in other threads. Every request that was begun is answered exactly once, whatever fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple

from edgesplit.errors import EdgeError
from edgesplit.http1.content_coding import (
    DECODERS,
    MIN_COMPRESSED_BYTES,
    UnknownCoding,
    choose_coding,
    decode_body,
    encode_body,
)
from edgesplit.http1.head import ParsedHead
from edgesplit.http1.server import Request, Response, error_response, response_to
from edgesplit.observability.phases import DECODE, ENCODE, LOAD, QUEUE, RUN, Phase
from edgesplit.oip import protocol as oip
from edgesplit.oip.fast_codec import FastRequest
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor
from edgesplit_offload.batching.remote_batcher import RemoteBatcher
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.models.remote_half import RemoteHalf
from edgesplit_offload.models.repository import VERSION, ModelRepository, RemoteModel
from edgesplit_offload.observability.request_metrics import MetricsRecorder, RequestMetrics, outcome_label
from edgesplit_offload.observability.statistics import StatisticsRecorder
from edgesplit_offload.scheduling.arrivals import ArrivalStats
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.scheduler import LOOK_UP_S, Scheduler

log = logging.getLogger(__name__)

SECONDS_HEADER = "edgesplit-seconds"
QUEUE_HEADER = "edgesplit-queue-seconds"
LOAD_HEADER = "edgesplit-load"
QUICK_JSON_BYTES = 65_536
"""A longer JSON part is decoded in another thread."""
Answer = Callable[[Response], None]
DecodedRequest = FastRequest | oip.InferRequest


class Route(NamedTuple):
    """What the head of an inference request determines."""

    name: str
    """Name of the model."""
    is_quick: bool
    """Whether its body can be decoded in the leader."""
    header_length: int | None
    """Length of the JSON part, if given."""
    accepts: str
    """The client's Accept-Encoding."""


@dataclass(eq=False, kw_only=True, slots=True)
class Inference(Job):
    """A checked inference request, to be run."""

    model: RemoteModel
    metrics: RequestMetrics
    request: DecodedRequest
    accepts: str
    """The client's Accept-Encoding."""
    began: float
    answer: Answer


class InferencePipeline:
    """The inference requests that this process, or another process of this server, finishes."""

    def __init__(
        self,
        models: ModelRepository,
        scheduler: Scheduler,
        loop: EventLoop,
        remote_batcher: RemoteBatcher | None,
        recorders: tuple[MetricsRecorder, StatisticsRecorder],
        on_requested: Callable[[RemoteHalf], None],
    ) -> None:
        """`on_requested` is called with each remote half that is requested, so that its batching benefit is measured
        some time."""
        self._models = models
        self._scheduler = scheduler
        self._loop = loop
        self._remote_batcher = remote_batcher
        self._metrics, self._statistics = recorders
        self._on_requested = on_requested

    def begin(self, request: Request, route: Route, arrival_stats: ArrivalStats, answer: Answer) -> None:
        """Start the request; `answer` will be called once. Leader only."""
        began = perf_counter()
        visit = self._metrics.begin(request)
        try:
            model = self._models.open_model(route.name) if route.is_quick else None
        except Exception as error:  # any failure becomes the answer
            self._fail(error, visit, "", answer, began)
            return
        if model is None or not model.half.is_loaded:
            self._loop.run_in_thread(partial(self._begin_slow, request, route, arrival_stats, visit, answer, began))
            return
        inference = self._decode(request, route, arrival_stats, model, visit, answer, began)
        if inference is not None:
            self._queue(inference)

    def on_done(self, jobs: Sequence[Job]) -> None:
        """These jobs are done: answer them. From any thread."""
        for job in jobs:
            if isinstance(job, Inference):
                self._on_inference_done(job)

    def server_headers(self, began: float) -> dict[str, str]:
        """Response headers with the seconds spent in this server and its load factor."""
        return {
            SECONDS_HEADER: f"{perf_counter() - began:.6f}", LOAD_HEADER: f"{max(1.0, self._scheduler.load):.3f}"
        }  # fmt: skip

    def _begin_slow(
        self,
        request: Request,
        route: Route,
        arrival_stats: ArrivalStats,
        metrics: RequestMetrics,
        answer: Answer,
        began: float,
    ) -> None:
        """In another thread: open the release, decode the request and load the model, then queue it."""
        try:
            with metrics.trace_scope():
                model = self._models.model(route.name)
                metrics.model, metrics.row = model.served, model.row.name
        except Exception as error:  # any failure becomes the answer
            self._fail(error, metrics, "", answer, began)
            return
        inference = self._decode(request, route, arrival_stats, model, metrics, answer, began)
        if inference is None:
            return
        try:
            if not model.half.is_loaded:
                with metrics.timeline.phase(LOAD):
                    model.half.load()
        except Exception as error:  # any failure becomes the answer
            self._fail(error, metrics, model.name, answer, began)
            return
        self._loop.call_soon(partial(self._queue, inference))

    def _decode(
        self,
        request: Request,
        route: Route,
        arrival_stats: ArrivalStats,
        model: RemoteModel,
        metrics: RequestMetrics,
        answer: Answer,
        began: float,
    ) -> Inference | None:
        """The decoded and checked request; None if it was answered with an error."""
        metrics.model, metrics.row = model.served, model.row.name
        half, timeout_s = model.half, None
        try:
            decoded_request: DecodedRequest | None = None
            if route.is_quick:
                decoded_request = model.codec.decode_request(request.body, route.header_length)
            if decoded_request is not None:
                inputs = decoded_request.inputs
            else:
                decoded_request, inputs = decode_inference(request, model)
            if decoded_request.parameters:
                timeout_s = oip.timeout_s(decoded_request.parameters)
        except Exception as error:  # any failure becomes the answer
            metrics.timeline.add_until_now(DECODE, began)
            self._fail(error, metrics, model.name, answer, began)
            return None
        metrics.timeline.add_until_now(DECODE, began)
        arrived = monotonic()
        return Inference(
            inputs, half.run, half.run_times, request.peer, None if timeout_s is None else arrived + timeout_s,
            request.is_closed, arrival_stats, arrived=arrived, owner=self, model=model, metrics=metrics,
            request=decoded_request, answer=answer, accepts=route.accepts, began=began,
        )  # fmt: skip

    def _queue(self, inference: Inference) -> None:
        """Queue the request at its batcher or in this process."""
        half = inference.model.half
        try:
            if (
                self._remote_batcher is None or not half.worth_forwarding
                or not self._remote_batcher.try_forward(half.kind, inference.model.name, inference, self._run_here)
            ):  # fmt: skip
                self._run_here(inference)
        except Exception as error:  # any failure becomes the answer
            self._fail(error, inference.metrics, inference.model.name, inference.answer, inference.began)

    def _run_here(self, job: Job) -> None:
        try:
            self._scheduler.submit(job)
        except Exception as error:  # Busy, mostly
            job.error = error
            self.on_done([job])
            return
        self._loop.wake_by(min(job.due_at, job.arrived + LOOK_UP_S))

    def _on_inference_done(self, inference: Inference) -> None:
        visit = inference.metrics
        phases, ran = visit.timeline.phases, inference.arrived + inference.queue_s
        if inference.batch_size:
            visit.batch, visit.counts_run = inference.batch_size, inference.counts_run
            phases.append(Phase(QUEUE, inference.arrived, ran))
            phases.append(Phase(RUN, ran, ran + inference.run_s))
        else:
            visit.counts_run = False
            phases.append(Phase(QUEUE, inference.arrived, perf_counter()))
        if inference.error is not None:
            self._fail(inference.error, visit, inference.model.name, inference.answer, inference.began)
        elif (
            (inference.request.binary_outputs is False or inference.accepts)
            and _is_slow_to_encode(inference)
            and self._loop.is_leader
        ):
            self._loop.run_in_thread(partial(self._finish, inference))
        else:
            self._finish(inference)

    def _finish(self, inference: Inference) -> None:
        """Encode the outputs and answer."""
        visit, began = inference.metrics, perf_counter()
        try:
            headers, buffers = encode_answer(inference.model, inference.request, inference.result, inference.accepts)
            visit.sent = sum(map(len, buffers))
            now = visit.timeline.add_until_now(ENCODE, began)
            seconds = visit.timeline.seconds_by_phase()
            headers[QUEUE_HEADER] = f"{seconds[QUEUE]:.6f}"
            visit.add_headers(headers, seconds)
            took_s = now - inference.began
            headers[SECONDS_HEADER], headers[LOAD_HEADER] = f"{took_s:.6f}", f"{self._scheduler.load:.3f}"
        except Exception as error:  # any failure becomes the answer
            self._fail(error, visit, inference.model.name, inference.answer, inference.began)
            return
        self._metrics.finish(visit, "answered", seconds=seconds)
        self._statistics.record_answer(inference.model.name, seconds, took_s, visit.batch, visit.counts_run)
        self._on_requested(inference.model.half)
        inference.answer(Response(200, headers, buffers, after=self.flush_statistics))

    def flush_statistics(self) -> None:
        """Aggregate statistics after an answer was sent, when no request waits for it."""
        self._metrics.registry.flush_if_due()
        self._statistics.flush_if_due()

    def _fail(self, error: BaseException, metrics: RequestMetrics, name: str, answer: Answer, began: float) -> None:
        """Answer with `error`."""
        if name:
            self._statistics.record_failure(name, perf_counter() - began)
        with metrics.trace_scope():
            self._metrics.finish(metrics, outcome_label(error), f"{type(error).__name__}: {error}"[:200])
            if not isinstance(error, EdgeError):
                log.error("an inference failed", exc_info=error)
            response = error_to_response(error)
        answer(
            Response(
                response.status,
                {**response.headers, **self.server_headers(began)},
                response.body,
                after=self.flush_statistics,
            )
        )


def _is_slow_to_encode(inference: Inference) -> bool:
    """Whether encoding the answer takes long."""
    size = sum(tensor.nbytes for tensor in inference.result.values())
    if inference.request.binary_outputs is False:
        return bool(size > QUICK_JSON_BYTES // 8)
    return bool(size >= MIN_COMPRESSED_BYTES and choose_coding(inference.accepts))


def error_to_response(error: BaseException) -> Response:
    """The response for an error."""
    if isinstance(error, UnknownCoding):
        return error_response(415, str(error), {"accept-encoding": ", ".join(DECODERS)})
    if isinstance(error, EdgeError):
        return response_to(error)
    return error_response(500, f"internal error: {type(error).__name__}")


def decode_inference(request: Request, model: RemoteModel) -> tuple[DecodedRequest, Mapping[str, Tensor]]:
    """The decoded request and its inputs as the model takes them. MalformedMessage or UsageError if it is invalid."""
    coding = request.headers.get("content-encoding", "")
    body = decode_body(request.body, coding, model.max_body_bytes) if coding else request.body
    decoded_request = oip.decode_request(body, oip.header_length(request.headers))
    inputs = boundary_codecs.decode_tensors(decoded_request.inputs, model.inputs, model.row.codecs)
    oip.check_tensors(inputs, model.inputs)
    if decoded_request.outputs:
        oip.pick_outputs({spec.name: spec for spec in model.outputs}, decoded_request.outputs)
    return decoded_request, inputs


def encode_answer(
    model: RemoteModel, request: DecodedRequest, outputs_by_name: Mapping[str, Tensor], accepts: str
) -> tuple[dict[str, str], oip.Buffers]:
    """Headers and body of the answer."""
    outputs, binary = oip.pick_outputs(outputs_by_name, request.outputs), request.binary_outputs
    are_bytes = binary if isinstance(binary, bool) else binary.issuperset(outputs)
    buffers: oip.Buffers
    fast = model.codec.encode_response(outputs, request.id) if are_bytes else None
    buffers, length = fast or oip.encode_response(oip.InferResponse(model.name, outputs, VERSION, request.id), binary)
    coding = choose_coding(accepts) if accepts and sum(map(len, buffers)) >= MIN_COMPRESSED_BYTES else ""
    if coding:
        buffers = [encode_body(buffers, coding)]
    headers = {"content-type": "application/json" if length is None else "application/octet-stream"}
    if length is not None:
        headers[oip.HEADER_LENGTH] = str(length)
    if coding:
        headers["content-encoding"] = coding
    return headers, buffers


def route_of(name: str, parsed: ParsedHead) -> Route:
    """The route of requests with this head, for the model `name`."""
    headers = parsed.head.headers
    accepts, length_header = headers.get("accept-encoding", ""), headers.get(oip.HEADER_LENGTH)
    if "content-encoding" in headers:
        return Route(name, False, None, accepts)
    if length_header is None:
        return Route(name, parsed.length <= QUICK_JSON_BYTES, None, accepts)
    length = (
        int(length_header) if length_header.isascii() and length_header.isdigit() and len(length_header) <= 12 else None
    )
    return Route(name, length is not None and length <= QUICK_JSON_BYTES, length, accepts)
