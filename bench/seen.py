"""What it costs a request to be seen: counted, timed, traced; beside prometheus_client's own counting, in one run.

Each way is repeated in turns and its median taken. The requests are reports as the agent makes them, of a row that is
cut in the middle: a counter, two histograms of the request, one for each of its phases, and the window of telemetry.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from prometheus_client import CollectorRegistry, Counter, Histogram
from record import Target, finish, make_parser

from edgesplit.observability.histogram import SECONDS_BOUNDS
from edgesplit.observability.phases import Timeline
from edgesplit.observability.prometheus import render_metrics
from edgesplit.observability.trace_context import parse
from edgesplit.observability.tracing import TRACING_OFF, Tracer
from edgesplit.oip.report import Report, phases
from edgesplit_agent.serving.metrics import RequestMetrics
from edgesplit_agent.serving.request_trace import RequestTrace
from edgesplit_agent.telemetry.request_record import RequestRecord
from edgesplit_agent.telemetry.windows import TelemetryWindows

CALLS, TURNS = 2_000, 15
REPORT = Report(
    release="a" * 64, row="cut-3", split_after="conv4", latency_s=0.0431, predicted_s=0.041, queue_s=0.0002,
    device_s=0.0203,
    decode_s=0.0041, encode_s=0.0007, link_s=0.0121, remote_s=0.0089, remote_queue_s=0.0011, remote_decode_s=0.0004,
    remote_encode_s=0.0002, answer_decode_s=0.0001, up_bytes=60_000, down_bytes=4_200,
)  # fmt: skip
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _release(version: str) -> Any:
    """A release of which nothing but its model's name and version is known."""
    return SimpleNamespace(manifest=SimpleNamespace(model=version))


RELEASE = _release("digits@1")


def counting_call() -> Callable[[], None]:
    """A function that counts one request as the agent does: in the metric registry and in the telemetry window."""
    metrics, windows = RequestMetrics(), TelemetryWindows()

    def one() -> None:
        record = RequestRecord("digits", RELEASE, REPORT)
        metrics.finished(record)
        windows.finished(record)

    return one


def prometheus_client_call() -> Callable[[], None]:
    """A function that records the same counter and histograms with prometheus_client, without telemetry."""
    registry = CollectorRegistry()
    requests = Counter("requests", "", ["model", "row", "outcome"], registry=registry)
    whole = Histogram("request_seconds", "", ["model", "row"], registry=registry, buckets=SECONDS_BOUNDS)
    parts = Histogram("phase_seconds", "", ["model", "phase"], registry=registry, buckets=SECONDS_BOUNDS)
    sent = [Counter(name, "", ["model"], registry=registry) for name in ("up_bytes", "down_bytes")]

    def one() -> None:
        requests.labels("digits@1", "cut-3", "answered").inc()
        whole.labels("digits@1", "cut-3").observe(REPORT.latency_s)
        for name, seconds in phases(REPORT).items():
            parts.labels("digits@1", name).observe(seconds)
        for counter, size in zip(sent, (REPORT.up_bytes, REPORT.down_bytes), strict=True):
            counter.labels("digits@1").inc(size)

    return one


def tracing_call(tracer: Tracer) -> Callable[[], None]:
    """A function that traces one request as the engine does: its span and its phases."""

    def one() -> None:
        course = RequestTrace.begin(tracer, "digits")
        began = perf_counter()
        for name in ("queue", "decode", "device", "encode"):
            course.timeline.add(name, began, began)
        with course.offloading("id"):
            pass
        course.answered(REPORT)

    return one


def server_timing_call() -> Callable[[], None]:
    """A function that records what the offload server's header reports: four phases and their seconds."""
    from edgesplit.observability.phases import format_server_timing

    def one() -> None:
        timeline = Timeline()
        for name in ("decode", "queue", "run", "encode"):
            with timeline.phase(name):
                pass
        format_server_timing(timeline.seconds_by_phase())

    return one


def discarding_provider() -> Tracer:
    """A tracer provider of OpenTelemetry's SDK that discards its spans."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from edgesplit.observability.tracing import OtelTracer

    class DiscardingExporter(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            self.clear()
            return super().export(spans)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(DiscardingExporter()))
    return OtelTracer(provider)


def microseconds(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Microseconds of one call of each function, medians over turns in which every function is run."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            began = perf_counter()
            for _ in range(CALLS):
                call()
            took[name].append((perf_counter() - began) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in took.items()}


def scrape_ms() -> float:
    """Milliseconds that one metrics page takes, of an agent with twenty models and five rows each."""
    metrics = RequestMetrics()
    for number in range(20):
        for row in range(5):
            report = Report(release="a" * 64, row=f"cut-{row}", latency_s=0.01, device_s=0.005, link_s=0.004)
            metrics.finished(RequestRecord("", _release(f"model-{number}@1"), report))
    took = []
    for _ in range(20):
        began = perf_counter()
        render_metrics(metrics.registry.series())
        took.append(perf_counter() - began)
    return statistics.median(took) * 1e3


def main() -> None:
    """Measure, print, write."""
    options = make_parser(__doc__).parse_args()
    times_us = microseconds(
        {
            "counted": counting_call(),
            "counted by prometheus_client": prometheus_client_call(),
            "course, no tracing": tracing_call(TRACING_OFF),
            "course, OpenTelemetry recording": tracing_call(discarding_provider()),
            "phases and header of the offload server": server_timing_call(),
            "traceparent parsed": lambda: discard(parse(TRACEPARENT)),
        }
    )
    for name, took in times_us.items():
        print(f"{took:8.1f} µs  {name}")
    page_ms = scrape_ms()
    print(f"{page_ms:8.1f} ms  a page of 20 models, 5 rows each")
    ratio = times_us["counted"] / times_us["counted by prometheus_client"]
    targets = [Target("counting beside prometheus_client's counting, telemetry not among it there", ratio, 1.0)]
    finish({"microseconds": times_us, "page_ms": page_ms}, targets, options.json)


def discard(value: object) -> None:
    """Discard a value."""


if __name__ == "__main__":
    main()
