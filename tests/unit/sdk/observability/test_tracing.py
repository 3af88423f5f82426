"""Traces: one id across device and cloud, the right parents, and nothing at all where nobody asked for them."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from edgesplit.client.request import InferenceRequest
from edgesplit.http1.server import Request, Response
from edgesplit.observability import trace_context, tracing
from edgesplit.observability.trace_context import TraceContext
from edgesplit.observability.tracing import TRACING_OFF, OtelTracer
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import phases
from edgesplit_agent.serving.http_endpoint import Endpoint
from support.agent_engine import CUT, INPUT, LOCAL, unavailable, world
from support.observed_request import INPUTS, MODEL, NO_HEDGE, Collector, both_sides, three_tiers

GIVEN = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", True)


def recording() -> tuple[OtelTracer, InMemorySpanExporter]:
    """A tracer whose spans stay in memory."""
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OtelTracer(provider), exporter


def test_one_trace_shows_device_link_and_cloud_over_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides, configured by the standard's variables, send OTLP: one trace id, each span under its parent."""
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.server.url)
    monkeypatch.setattr(tracing, "SHUTDOWN_TIMEOUT_S", 60.0)
    device, server = (
        tracing.make_tracer(f"edgesplit-{name}", {"edgesplit.emulated": False}) for name in ("agent", "offload")
    )
    assert device is not TRACING_OFF and server is not TRACING_OFF
    try:
        with both_sides(tmp_path, device=device, server=server) as (engine, _), trace_context.request_context(GIVEN):
            report = engine.infer(MODEL, INPUTS, deadline_s=20).report
    finally:
        device.stop()  # sends what is left
        server.stop()
        collector.server.stop()
    by_name = {(service, span.name): span for service, span in collector.received}
    assert {span.trace_id.hex() for span in by_name.values()} == {GIVEN.trace_id} == {report.trace_id}
    root = by_name["edgesplit-agent", "infer handmade"]
    assert root.parent_span_id.hex() == GIVEN.span_id
    asked = by_name["edgesplit-agent", "offload"]
    served = by_name["edgesplit-offload", "offload"]
    assert served.parent_span_id == asked.span_id
    assert {name for (_, name), span in by_name.items() if span.parent_span_id == root.span_id} == {
        "queue", "device", "encode", "offload",
    }  # fmt: skip
    assert {name for (_, name), span in by_name.items() if span.parent_span_id == served.span_id} == {
        "decode", "load", "queue", "run", "encode",
    }  # fmt: skip
    for span in by_name.values():
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    attributes = {one.key: one.value.string_value for one in served.attributes}
    assert attributes["edgesplit.model"] == "handmade@1" and attributes["edgesplit.row"] == "cut-1"


def test_one_trace_goes_through_a_gateway(tmp_path: Path) -> None:
    """Device, gateway, cloud: each server's span is the child of the one that asked it, and the report adds up."""
    (device, here), (edge, between), (cloud, there) = recording(), recording(), recording()
    with three_tiers(tmp_path, device=device, edge=edge, cloud=cloud) as engine, trace_context.request_context(GIVEN):
        report = engine.infer(MODEL, INPUTS, deadline_s=20).report
    assert not report.next_tier_cause and report.next_tier_s >= report.next_tier_server_s > 0
    named = [{span.name: span for span in exporter.get_finished_spans()} for exporter in (here, between, there)]
    assert {span.context.trace_id for tier in named for span in tier.values()} == {int(GIVEN.trace_id, 16)}
    asked, gateway, far = named[0]["offload"], named[1]["offload"], named[2]["offload"]
    assert gateway.parent is not None and gateway.parent.span_id == asked.context.span_id
    assert far.parent is not None and far.parent.span_id == gateway.context.span_id
    assert {"queue", "run", "next_tier", "encode"} <= named[1].keys() and "next_tier" not in named[2]
    split = phases(report)
    assert {"next_tier", "remote"} <= split.keys() and sum(split.values()) == pytest.approx(report.latency_s)


def test_a_request_without_a_trace_begins_one() -> None:
    """Its root has no parent, and the report names it."""
    tracer, exporter = recording()
    with world(LOCAL, CUT, tracer=tracer) as (engine, _, _):
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=20, options=NO_HEDGE).report
    root = next(span for span in exporter.get_finished_spans() if span.name == "infer tiny")
    assert root.parent is None and f"{root.context.trace_id:032x}" == report.trace_id


def test_a_fallback_shows_the_clouds_failure_and_the_tail() -> None:
    """Under one root: what was asked of the cloud, marked failed, and the device's finish."""
    tracer, exporter = recording()
    with world(LOCAL, CUT, tracer=tracer) as (engine, cloud, _):
        cloud.script = unavailable
        assert engine.infer("tiny", {"x": INPUT}, deadline_s=20, options=NO_HEDGE).report.fallback
    by_name = {span.name: span for span in exporter.get_finished_spans()}
    root = by_name["infer tiny"]
    assert root.attributes is not None and root.attributes["edgesplit.fallback"] is True
    assert by_name["offload"].status.description == "server: 500: broken"
    assert by_name["tail"].parent is not None and by_name["tail"].parent.span_id == root.context.span_id


def test_a_request_that_fails_ends_its_span() -> None:
    """With the error, which is the application's to read too."""
    tracer, exporter = recording()
    with world(CUT, tracer=tracer) as (engine, cloud, _):
        cloud.script = unavailable
        with pytest.raises(Exception, match="no fallback"):
            engine.infer("tiny", {"x": INPUT}, deadline_s=20, options=NO_HEDGE)
    root = next(span for span in exporter.get_finished_spans() if span.name == "infer tiny")
    assert not root.status.is_ok and "LinkError" in str(root.status.description)


def test_a_caller_that_does_not_sample_is_obeyed(tmp_path: Path) -> None:
    """Parent-based: no span is recorded on either side, and the trace goes on under its id."""
    (device, here), (server, there) = recording(), recording()
    unsampled = TraceContext(GIVEN.trace_id, GIVEN.span_id, sampled=False)
    with both_sides(tmp_path, device=device, server=server) as (engine, _), trace_context.request_context(unsampled):
        report = engine.infer(MODEL, INPUTS, deadline_s=20).report
    assert report.trace_id == GIVEN.trace_id
    assert here.get_finished_spans() == there.get_finished_spans() == ()


def test_without_opentelemetry_a_trace_is_passed_on_and_named(tmp_path: Path) -> None:
    """The offload server sees the application's own span as its parent; no traceparent, none sent."""
    server, there = recording()
    seen: list[str | None] = []
    with both_sides(tmp_path, server=server) as (engine, _):
        with trace_context.request_context(GIVEN):
            assert engine.infer(MODEL, INPUTS, deadline_s=20).report.trace_id == GIVEN.trace_id
        assert engine.infer(MODEL, INPUTS, deadline_s=20).report.trace_id == ""
    roots = [span for span in there.get_finished_spans() if span.name == "offload"]
    for span in roots:
        seen.append(f"{span.parent.span_id:016x}" if span.parent is not None else None)
    assert seen == [GIVEN.span_id, None]


def test_the_local_endpoint_takes_a_traceparent_and_no_strange_one() -> None:
    """What reaches the cloud is the application's trace, or none."""
    sent: list[tuple[str | None, str | None]] = []

    def noted(request: Request, good: Response) -> Response:
        sent.append((request.headers.get("traceparent"), request.headers.get("tracestate")))
        return good

    with world(CUT) as (engine, cloud, _):
        cloud.script = noted
        endpoint = Endpoint(engine, dict)
        for given in (GIVEN.headers(), {"traceparent": "00-evil\r\nx: y"}, {"tracestate": "a=1"}):
            body, length = oip.encode_request(oip.InferRequest(inputs={"x": INPUT}, parameters={"timeout": 20_000_000}))
            headers = {"host": "localhost", oip.HEADER_LENGTH: str(length), **given}
            joined = b"".join(bytes(part) for part in body)
            assert endpoint(Request("POST", "/v2/models/tiny/infer", headers=headers, body=joined)).status == 200
    assert sent == [(GIVEN.headers()["traceparent"], None), (None, None), (None, None)]


def test_an_application_inside_a_span_of_its_own_is_the_parent() -> None:
    """Whatever it asks by `Client` is in its trace, with nothing to configure; outside of a span nothing is sent."""
    provider = TracerProvider(shutdown_on_exit=False)
    assert InferenceRequest.create("m", {}).trace == {}
    with provider.get_tracer("application").start_as_current_span("work") as span:
        headers, _ = InferenceRequest.create("m", {}).encode(1.0)
    here = span.get_span_context()
    assert headers["traceparent"] == f"00-{here.trace_id:032x}-{here.span_id:016x}-01"
    with trace_context.request_context(GIVEN):
        assert InferenceRequest.create("m", {}).trace == GIVEN.headers()


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_the_environment_decides_as_the_standard_says(environment: dict[str, str], asked: bool) -> None:
    """No variable of ours."""
    assert tracing.is_tracing_enabled(environment) is asked


def test_an_exporter_that_is_not_spoken_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """And nothing breaks."""
    with caplog.at_level(logging.WARNING):
        assert tracing.make_tracer("x", {}, {"OTEL_TRACES_EXPORTER": "zipkin"}) is TRACING_OFF
    assert "only otlp is supported" in caplog.text


def test_opentelemetry_that_is_missing_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what to install."""
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with caplog.at_level(logging.WARNING):
        assert tracing.make_tracer("x", {}, {"OTEL_TRACES_EXPORTER": "otlp"}) is TRACING_OFF
    assert [record.message for record in caplog.records if "pip install 'edgesplit[otel]'" in record.message]


def test_nothing_of_opentelemetry_or_prometheus_is_imported_where_nobody_asked() -> None:
    """Agent and offload server start without either."""
    code = (
        "import sys, edgesplit_agent.main, edgesplit_offload.main; from edgesplit.observability import tracing; "
        "tracing.make_tracer('x', {}, {}); "
        "print([m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'prometheus_client', 'requests')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_collector_that_hangs_holds_up_nobodys_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections and never answers: stopping goes on without it, while it still waits."""
    let_go, waits = threading.Event(), threading.Event()

    class Hanging(InMemorySpanExporter):
        def shutdown(self) -> None:
            waits.set()
            let_go.wait(60)

    monkeypatch.setattr(tracing, "SHUTDOWN_TIMEOUT_S", 0.01)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Hanging()))
    OtelTracer(provider).stop()
    assert waits.wait(20) and not let_go.is_set()
    let_go.set()


def test_spans_of_what_is_not_there_are_nothing() -> None:
    """Off, whatever is told goes nowhere, and the parent stays the parent."""
    span = TRACING_OFF.begin("infer x", GIVEN)
    assert span.child("offload", "client").context == GIVEN
    span.end({"a": 1}, "failed")
    TRACING_OFF.stop()
