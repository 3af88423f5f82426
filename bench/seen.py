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
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from prometheus_client import CollectorRegistry, Counter, Histogram
from record import Target, arguments, finish

from edgesplit.observability.histogram import SECONDS
from edgesplit.observability.phases import Timeline
from edgesplit.observability.prometheus import rendered
from edgesplit.observability.trace_context import parse
from edgesplit.observability.tracing import OFF, Tracer
from edgesplit.oip.report import Report, phases
from edgesplit_agent.serving.metrics import RequestMetrics
from edgesplit_agent.serving.request_trace import Course
from edgesplit_agent.telemetry.windows import Windows

CALLS, TURNS = 2_000, 15
REPORT = Report(
    release="a" * 64, row="cut-3", after="conv4", latency_s=0.0431, predicted_s=0.041, queue_s=0.0002, device_s=0.0203,
    decode_s=0.0041, encode_s=0.0007, link_s=0.0121, remote_s=0.0089, remote_queue_s=0.0011, remote_decode_s=0.0004,
    remote_encode_s=0.0002, answer_decode_s=0.0001, up_bytes=60_000, down_bytes=4_200,
)  # fmt: skip
TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def counted() -> Callable[[], None]:
    """As the agent counts a request: the ledger, and the window of telemetry."""
    metrics, windows = RequestMetrics(), Windows()

    def one() -> None:
        split = phases(REPORT)
        metrics.observe("digits@1", REPORT, split)
        windows.observe("digits", REPORT, split)

    return one


def counted_by_prometheus_client() -> Callable[[], None]:
    """The same counter and histograms by prometheus_client, which then knows nothing for telemetry."""
    registry = CollectorRegistry()
    requests = Counter("requests", "", ["model", "row", "outcome"], registry=registry)
    whole = Histogram("request_seconds", "", ["model", "row"], registry=registry, buckets=SECONDS)
    parts = Histogram("phase_seconds", "", ["model", "phase"], registry=registry, buckets=SECONDS)
    sent = [Counter(name, "", ["model"], registry=registry) for name in ("up_bytes", "down_bytes")]

    def one() -> None:
        requests.labels("digits@1", "cut-3", "answered").inc()
        whole.labels("digits@1", "cut-3").observe(REPORT.latency_s)
        for name, seconds in phases(REPORT).items():
            parts.labels("digits@1", name).observe(seconds)
        for counter, size in zip(sent, (REPORT.up_bytes, REPORT.down_bytes), strict=True):
            counter.labels("digits@1").inc(size)

    return one


def traced(tracer: Tracer) -> Callable[[], None]:
    """A request's course: its span and its phases, as the engine notes them."""

    def one() -> None:
        course = Course.begin(tracer, "digits")
        began = perf_counter()
        for name in ("queue", "decode", "device", "encode"):
            course.timeline.add(name, began, began)
        with course.offloading("id"):
            pass
        course.answered(REPORT)

    return one


def served() -> Callable[[], None]:
    """What the offload server does for its header: four phases, and their seconds."""
    from edgesplit.observability.phases import server_timing

    def one() -> None:
        timeline = Timeline()
        for name in ("decode", "queue", "run", "encode"):
            with timeline.phase(name):
                pass
        server_timing(timeline.seconds())

    return one


def recording() -> Tracer:
    """OpenTelemetry's SDK, with spans that go nowhere."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from edgesplit.observability.tracing import OtelTracer

    class Nowhere(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            self.clear()
            return super().export(spans)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Nowhere()))
    return OtelTracer(provider)


def microseconds(ways: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Of one call each, medians over turns in which every way is run."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, call in ways.items():
            began = perf_counter()
            for _ in range(CALLS):
                call()
            took[name].append((perf_counter() - began) / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in took.items()}


def scrape_ms() -> float:
    """One page of an agent with twenty models, five rows each."""
    metrics = RequestMetrics()
    for number in range(20):
        for row in range(5):
            report = Report(release="a" * 64, row=f"cut-{row}", latency_s=0.01, device_s=0.005, link_s=0.004)
            metrics.observe(f"model-{number}@1", report)
    took = []
    for _ in range(20):
        began = perf_counter()
        rendered(metrics.ledger.series())
        took.append(perf_counter() - began)
    return statistics.median(took) * 1e3


def main() -> None:
    """Measure, print, write."""
    options = arguments(__doc__).parse_args()
    found = microseconds(
        {
            "counted": counted(),
            "counted by prometheus_client": counted_by_prometheus_client(),
            "course, no tracing": traced(OFF),
            "course, OpenTelemetry recording": traced(recording()),
            "phases and header of the offload server": served(),
            "traceparent parsed": lambda: void(parse(TRACEPARENT)),
        }
    )
    for name, took in found.items():
        print(f"{took:8.1f} µs  {name}")
    page_ms = scrape_ms()
    print(f"{page_ms:8.1f} ms  a page of 20 models, 5 rows each")
    ratio = found["counted"] / found["counted by prometheus_client"]
    targets = [Target("counting beside prometheus_client's counting, telemetry not among it there", ratio, 1.0)]
    finish({"microseconds": found, "page_ms": page_ms}, targets, options.json)


def void(value: object) -> None:
    """Nothing is kept."""


if __name__ == "__main__":
    main()
