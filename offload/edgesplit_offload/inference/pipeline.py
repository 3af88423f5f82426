"""Inference pipeline of one process: each request from receipt to answer, in stages that do not block.

Requests are decoded and checked by the event loop's leader, run (here, at their batcher, or with the next tier), and
answered by the thread that ran them. Slow work on the way (opening a release, loading a model, content codings, numbers
as JSON, waiting for the next tier) is done in other threads. Every request that was begun is answered exactly once,
whatever fails. A gateway relays what it cannot run, because the release is not here or no plan of it has a gateway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic, perf_counter
from typing import NamedTuple, cast

from edgesplit.errors import EdgeError
from edgesplit.http1 import content_coding
from edgesplit.http1.content_coding import MIN_COMPRESSED_BYTES, choose_coding, decode_body, encode_body
from edgesplit.http1.head import ParsedHead
from edgesplit.http1.server import Request, Response, error_response, response_to
from edgesplit.observability.phases import DECODE, ENCODE, LOAD, NEXT_TIER, QUEUE, RUN, Phase
from edgesplit.offload_client.pool import LOAD_HEADER, SECONDS_HEADER
from edgesplit.oip import protocol as oip
from edgesplit.release import boundary_codecs
from edgesplit.runtime import Tensor
from edgesplit_offload.batching.remote_batcher import RemoteBatcher
from edgesplit_offload.frontend.event_loop import EventLoop
from edgesplit_offload.inference.gateway_relay import NOT_HERE, NextTier, RowRequest, Tensors, request_timeout_s
from edgesplit_offload.models.fast_codec import FastRequest
from edgesplit_offload.models.permissions import ReleasePermissions
from edgesplit_offload.models.remote_half import RemoteHalf
from edgesplit_offload.models.repository import VERSION, ModelRepository, RemoteModel
from edgesplit_offload.observability.request_metrics import RELAYED, MetricsRecorder, RequestMetrics, outcome_label
from edgesplit_offload.observability.statistics import StatisticsRecorder
from edgesplit_offload.scheduling.arrivals import ArrivalStats
from edgesplit_offload.scheduling.queue import Job
from edgesplit_offload.scheduling.run_times import RunTimes
from edgesplit_offload.scheduling.scheduler import LOOK_UP_S, Scheduler

log = logging.getLogger(__name__)

QUEUE_HEADER = "edgesplit-queue-seconds"
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
    """An inference request on its way through the pipeline."""

    # What is to be run is known once the request is decoded.
    inputs: Tensors = field(init=False)
    run: Callable[[Sequence[Tensors]], Sequence[Tensors]] = field(init=False)
    run_times: RunTimes = field(init=False)
    model: RemoteModel = field(init=False)
    name: str = ""
    """Name of the model, once it is known to be here."""
    decoded: DecodedRequest = field(init=False)
    request: Request
    route: Route
    metrics: RequestMetrics
    began: float
    answer: Answer
    hop_headers: Mapping[str, str] | None = None
    """Headers that report the hop to the next tier, if there was one."""


class InferencePipeline:
    """The inference requests of this process: run here, in another process of this server, or with the next tier."""

    def __init__(
        self,
        models: ModelRepository,
        scheduler: Scheduler,
        loop: EventLoop,
        remote_batcher: RemoteBatcher | None,
        recorders: tuple[MetricsRecorder, StatisticsRecorder],
        on_requested: Callable[[RemoteHalf], None],
        next_tier: NextTier | None = None,
        *,
        permissions: ReleasePermissions,
    ) -> None:
        """`on_requested` is called with each remote half that is requested, so that its batching benefit is measured
        some time. `next_tier`: of a gateway."""
        self._models = models
        self._permissions = permissions
        self._scheduler = scheduler
        self._loop = loop
        self._remote_batcher = remote_batcher
        self._metrics, self._statistics = recorders
        self._on_requested = on_requested
        self._next_tier = next_tier

    def begin(self, request: Request, route: Route, arrival_stats: ArrivalStats, answer: Answer) -> None:
        """Start the request; `answer` will be called once. Leader only."""
        inference = Inference(
            client=request.peer, is_client_gone=request.is_closed, arrival_stats=arrival_stats, owner=self,
            request=request, route=route, began=perf_counter(), metrics=self._metrics.begin(request), answer=answer,
        )  # fmt: skip
        try:
            model = self._models.open_model(route.name) if route.is_quick else None
            if model is not None:
                self._permissions.check(model.half.digest, request.peer)
        except Exception as error:  # any failure becomes the answer
            self._fail(inference, error)
            return
        if model is None or not (model.half.is_loaded or self._needs_next_tier(model)):
            self._loop.run_in_thread(partial(self._begin_slow, inference))
        elif self._decode(inference, model):
            self._run(inference)

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

    def _needs_next_tier(self, model: RemoteModel) -> bool:
        """Whether the next tier runs a part of the model. Then nothing is loaded before it is known to be needed."""
        return self._next_tier is not None and bool(model.row.hops)

    def _begin_slow(self, inference: Inference) -> None:
        """In another thread: open the release, decode the request and load the model, then run it."""
        metrics = inference.metrics
        try:
            self._permissions.check_model(inference.route.name, inference.request.peer)
            with metrics.trace_scope():
                model = self._models.model(inference.route.name)
            if not self._decode(inference, model):
                return
            if not (model.half.is_loaded or self._needs_next_tier(model)):
                with metrics.timeline.phase(LOAD):
                    model.half.load()
        except Exception as error:  # any failure becomes the answer
            self._fail(inference, error)
            return
        self._loop.call_soon(partial(self._run, inference))

    def _decode(self, inference: Inference, model: RemoteModel) -> bool:
        """Decode and check the request; False if it was answered with an error, or is left to the next tier."""
        if self._next_tier is not None and not model.through_gateway:
            self._relay_soon(inference, self._next_tier)
            return False
        request, route, metrics = inference.request, inference.route, inference.metrics
        inference.model, inference.name = model, model.name
        metrics.model, metrics.row = model.served, model.row.name
        try:
            decoded: DecodedRequest | None = None
            if route.is_quick:
                decoded = model.codec.decode_request(request.body, route.header_length)
            if decoded is not None:
                inference.inputs = decoded.inputs
            else:
                decoded, inference.inputs = _decode_inference(request, model)
            timeout_s = oip.timeout_s(decoded.parameters) if decoded.parameters else None
        except Exception as error:  # any failure becomes the answer
            metrics.timeline.add_until_now(DECODE, inference.began)
            self._fail(inference, error)
            return False
        metrics.timeline.add_until_now(DECODE, inference.began)
        inference.decoded, inference.run, inference.run_times = decoded, model.half.run, model.half.run_times
        inference.arrived = monotonic()
        if timeout_s is not None:
            inference.deadline = inference.arrived + timeout_s
        return True

    def _run(self, inference: Inference) -> None:
        """Run the request: at its batcher, in this process, or with the next tier, whose answer a thread waits for.
        Leader only."""
        half = inference.model.half
        try:
            if self._next_tier is not None and self._needs_next_tier(inference.model):
                self._loop.run_in_thread(partial(self._run_with_next_tier, inference, self._next_tier))
            elif (
                self._remote_batcher is None or not half.worth_forwarding
                or not self._remote_batcher.try_forward(half.kind, inference.name, inference, self._run_here)
            ):  # fmt: skip
                self._run_here(inference)
        except Exception as error:  # any failure becomes the answer
            self._fail(inference, error)

    def _run_here(self, job: Job) -> None:
        try:
            self._scheduler.submit(job)
        except Exception as error:  # Busy, mostly
            job.error = error
            self.on_done([job])
            return
        self._loop.wake_by(min(job.due_at, job.arrived + LOOK_UP_S))

    def _on_inference_done(self, inference: Inference) -> None:
        _record_run(inference.metrics, inference)
        if inference.error is not None:
            self._fail(inference, inference.error)
        elif (
            (inference.decoded.binary_outputs is False or inference.route.accepts)
            and _is_slow_to_encode(inference)
            and self._loop.is_leader
        ):
            self._loop.run_in_thread(partial(self._finish, inference))
        else:
            self._finish(inference)

    def _run_with_next_tier(self, inference: Inference, next_tier: NextTier) -> None:
        """In another thread: run the part that is here, and have the next tier run the rest."""
        metrics = inference.metrics
        row_request = RowRequest(
            inference.decoded.id, inference.inputs, inference.deadline, inference.is_client_gone, metrics.timeline
        )
        try:
            with metrics.trace_scope():
                row = next_tier.finish(inference.model, row_request, partial(self._run_part, inference))
        except Exception as error:  # any failure becomes the answer
            self._fail(inference, error)
            return
        inference.result, inference.hop_headers = row.outputs, row.headers
        self._finish(inference)

    def _run_part(self, inference: Inference, part: RemoteModel, inputs: Tensors) -> Tensors:
        """The outputs of a part of a row; this thread waits for its run."""
        half = part.half
        job = Job(inputs, half.run, half.run_times, inference.client, inference.deadline, inference.is_client_gone)
        try:
            if not half.is_loaded:
                with inference.metrics.timeline.phase(LOAD):
                    half.load()
            return cast(Tensors, self._scheduler.submit_and_wait(job))
        finally:
            _record_run(inference.metrics, job)

    def _relay_soon(self, inference: Inference, next_tier: NextTier) -> None:
        """Have the next tier answer the whole request. From any thread."""
        inference.name, inference.metrics.model, inference.metrics.row = "", RELAYED, ""
        self._loop.run_in_thread(partial(self._relay, inference, next_tier))

    def _relay(self, inference: Inference, next_tier: NextTier) -> None:
        """In another thread: have the next tier answer the whole request."""
        request, metrics = inference.request, inference.metrics
        try:
            with metrics.trace_scope():
                body = decode_body(request.body, request.headers.get("content-encoding", ""))
                with metrics.timeline.phase(NEXT_TIER):
                    response = next_tier.relay(request, request_timeout_s(request, body))
        except Exception as error:  # any failure becomes the answer
            self._fail(inference, error)
            return
        self._metrics.finish(metrics, "answered")
        self._answer(inference, response)

    def _finish(self, inference: Inference) -> None:
        """Encode the outputs and answer."""
        visit, began = inference.metrics, perf_counter()
        try:
            headers, buffers = _encode_answer(inference)
            visit.sent = sum(map(len, buffers))
            now = visit.timeline.add_until_now(ENCODE, began)
            seconds = visit.timeline.seconds_by_phase()
            headers[QUEUE_HEADER] = f"{seconds.get(QUEUE, 0.0):.6f}"
            if inference.hop_headers is not None:
                headers.update(inference.hop_headers)
            visit.add_headers(headers, seconds)
            took_s = now - inference.began
            headers[SECONDS_HEADER], headers[LOAD_HEADER] = f"{took_s:.6f}", f"{self._scheduler.load:.3f}"
        except Exception as error:  # any failure becomes the answer
            self._fail(inference, error)
            return
        self._metrics.finish(visit, "answered", seconds=seconds)
        self._statistics.record_answer(inference.name, seconds, took_s, visit.batch, visit.counts_run)
        self._on_requested(inference.model.half)
        inference.answer(Response(200, headers, buffers, after=self.flush_statistics))

    def flush_statistics(self) -> None:
        """Aggregate statistics after an answer was sent, when no request waits for it."""
        self._metrics.registry.flush_if_due()
        self._statistics.flush_if_due()

    def _fail(self, inference: Inference, error: BaseException) -> None:
        """Answer with `error`, or have the next tier answer what cannot be run here."""
        metrics = inference.metrics
        if inference.name:
            self._statistics.record_failure(inference.name, perf_counter() - inference.began)
        if self._next_tier is not None and isinstance(error, NOT_HERE) and metrics.model != RELAYED:
            log.info("%s is relayed: %s", inference.route.name[:200], error)
            self._relay_soon(inference, self._next_tier)
            return
        with metrics.trace_scope():
            self._metrics.finish(metrics, outcome_label(error), f"{type(error).__name__}: {error}"[:200])
            if not isinstance(error, EdgeError):
                log.error("an inference failed", exc_info=error)
        self._answer(inference, error_to_response(error))

    def _answer(self, inference: Inference, response: Response) -> None:
        """Answer with `response`, and headers for the time spent here and the load."""
        headers = {**response.headers, **self.server_headers(inference.began)}
        inference.answer(Response(response.status, headers, response.body, after=self.flush_statistics))


def _record_run(metrics: RequestMetrics, job: Job) -> None:
    """Record the phases and the batch of a job, whether it was run or not."""
    phases, ran = metrics.timeline.phases, job.arrived + job.queue_s
    if job.batch_size:
        metrics.batch, metrics.counts_run = job.batch_size, job.counts_run
        phases.append(Phase(QUEUE, job.arrived, ran))
        phases.append(Phase(RUN, ran, ran + job.run_s))
    else:
        metrics.counts_run = False
        metrics.timeline.add_until_now(QUEUE, job.arrived or perf_counter())


def _is_slow_to_encode(inference: Inference) -> bool:
    """Whether encoding the answer takes long."""
    size = sum(tensor.nbytes for tensor in inference.result.values())
    if inference.decoded.binary_outputs is False:
        return bool(size > QUICK_JSON_BYTES // 8)
    return bool(size >= MIN_COMPRESSED_BYTES and choose_coding(inference.route.accepts))


def error_to_response(error: BaseException) -> Response:
    """The response for an error."""
    if isinstance(error, content_coding.UnknownCoding):
        return error_response(415, str(error), {"accept-encoding": ", ".join(content_coding.DECODERS)})
    if isinstance(error, EdgeError):
        return response_to(error)
    return error_response(500, f"internal error: {type(error).__name__}")


def _decode_inference(request: Request, model: RemoteModel) -> tuple[DecodedRequest, Mapping[str, Tensor]]:
    """The decoded request and its inputs as the model takes them. MalformedMessage or UsageError if it is invalid."""
    coding = request.headers.get("content-encoding", "")
    body = decode_body(request.body, coding, model.max_body_bytes) if coding else request.body
    decoded_request = oip.decode_request(body, oip.header_length(request.headers))
    inputs = boundary_codecs.decode_tensors(decoded_request.inputs, model.inputs, model.row.codecs)
    oip.check_tensors(inputs, model.inputs)
    if decoded_request.outputs:
        oip.pick_outputs({spec.name: spec for spec in model.outputs}, decoded_request.outputs)
    return decoded_request, inputs


def _encode_answer(inference: Inference) -> tuple[dict[str, str], oip.Buffers]:
    """Headers and body of the answer."""
    model, request, accepts = inference.model, inference.decoded, inference.route.accepts
    outputs, binary = oip.pick_outputs(inference.result, request.outputs), request.binary_outputs
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
    is_number = length_header.isascii() and length_header.isdigit() and len(length_header) <= 12
    length = int(length_header) if is_number else None
    return Route(name, length is not None and length <= QUICK_JSON_BYTES, length, accepts)
