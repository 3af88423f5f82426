"""Metrics: counted right, summed right, bounded whatever comes, in Prometheus' text format."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import MalformedMessage
from edgesplit.observability import metrics, metrics_reference
from edgesplit.observability.histogram import SECONDS_BOUNDS, Histogram, quantile
from edgesplit.observability.metrics import FAMILIES, MetricFamily
from edgesplit.observability.metrics_server import make_metrics_server
from edgesplit.observability.phases import (
    MAX_PHASE_S,
    SERVER_PHASES,
    Timeline,
    format_server_timing,
    parse_server_timing,
)
from edgesplit.observability.prometheus import metrics_response, render_metrics
from edgesplit.observability.registry import (
    OTHER_LABEL,
    Entry,
    MetricRegistry,
    Series,
    decode_series,
    encode_series,
    gauge_series,
    merge_series,
)
from edgesplit_offload.processes.metric_totals import MetricTotals, metrics_answer
from support import REPOSITORY
from support.observed_request import asked, samples, value

NOT_IN_A_LABEL = {"id", "request_id", "trace_id", "address", "peer", "path", "release"}
times = st.floats(0, 100)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_metric_names_follow_prometheus(family: MetricFamily) -> None:
    """Its unit in its name, `_total` on counters only, no label that a request could fill."""
    assert re.fullmatch("edgesplit_(agent|offload|controller)_[a-z_]+", family.name)
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert "milli" not in family.name and not NOT_IN_A_LABEL & set(family.labels)
    if family.kind == "histogram" and family.bounds is SECONDS_BOUNDS:
        assert family.name.endswith("_seconds")


def test_metrics_reference_is_up_to_date() -> None:
    """Regenerate docs/metrics.md by `python -m edgesplit.observability.metrics_reference > docs/metrics.md`."""
    assert (REPOSITORY / "docs/metrics.md").read_text(encoding="utf-8") == metrics_reference.render_page()


@given(st.lists(times))
def test_histogram_buckets_are_inclusive(values: list[float]) -> None:
    """`le` includes its bound; the sum and the count are those of the values."""
    histogram = Histogram()
    for seconds in values:
        histogram.observe(seconds)
    for place, bound in enumerate(SECONDS_BOUNDS):
        assert sum(histogram.counts[: place + 1]) == sum(seconds <= bound for seconds in values)
    assert histogram.count == len(values) and histogram.total == pytest.approx(sum(values))


@given(st.lists(st.floats(1e-5, 9.9), min_size=1), st.floats(0.01, 1.0))
def test_quantile_lies_in_the_true_quantiles_bucket(values: list[float], part: float) -> None:
    """Interpolated within the bucket."""
    histogram = Histogram()
    for seconds in values:
        histogram.observe(seconds)
    ranked = sorted(values)
    true = ranked[max(0, min(len(ranked) - 1, -int(-part * len(ranked) // 1) - 1))]
    low = max((bound for bound in SECONDS_BOUNDS if bound < true), default=0.0)
    high = min(bound for bound in SECONDS_BOUNDS if bound >= true)
    assert low - 1e-12 <= histogram.quantile(part) <= high + 1e-12


def test_quantiles_of_empty_and_overflowing_histograms() -> None:
    """An empty one gives 0; what lies beyond the last bound gives that bound."""
    assert quantile(SECONDS_BOUNDS, (), 0.5) == 0.0
    assert quantile(SECONDS_BOUNDS, ((len(SECONDS_BOUNDS), 3),), 0.5) == SECONDS_BOUNDS[-1]


@given(st.lists(st.tuples(st.sampled_from("ab"), times, st.integers(1, 32))))
def test_batch_counting_equals_single_counting(happened: list[tuple[str, float, int]]) -> None:
    """Counters and histograms, in any order."""
    forms = {
        name: (
            (metrics.OFFLOAD_REQUESTS, (name, "row", "answered")), (metrics.OFFLOAD_REQUEST_S, (name, "row")),
            (metrics.OFFLOAD_BATCH, (name,)),
        )
        for name in "ab"
    }  # fmt: skip
    together, singly = MetricRegistry(), MetricRegistry()
    for name, seconds, batch in happened:
        values = (1.0, seconds, batch)
        together.record_batch(forms[name], values)
        singly.record([(family, labels, value) for (family, labels), value in zip(forms[name], values, strict=True)])
    assert sorted(samples_of(together)) == sorted(samples_of(singly))


def samples_of(ledger: MetricRegistry) -> list[tuple[Any, ...]]:
    return [(sample.family, sample.labels, pytest.approx(sample.value), sample.counts) for sample in ledger.series()]


def test_concurrent_counts_are_all_counted() -> None:
    """Nothing is lost, and Prometheus' parser reads the page."""
    ledger = MetricRegistry()

    def work() -> None:
        for _ in range(500):
            ledger.record(
                (
                    (metrics.OFFLOAD_REQUESTS, ("m@1", "cut-1", "answered"), 1.0),
                    (metrics.OFFLOAD_REQUEST_S, ("m@1", "cut-1"), 0.004),
                )
            )

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = samples(render_metrics(ledger.series(), {"emulated": "true"}))
    labels = {"model": "m@1", "row": "cut-1", "emulated": "true"}
    assert value(found, "edgesplit_offload_requests_total", **labels, outcome="answered") == 2000
    assert value(found, "edgesplit_offload_request_seconds_count", **labels) == 2000
    assert value(found, "edgesplit_offload_request_seconds_sum", **labels) == pytest.approx(8.0)
    assert value(found, "edgesplit_offload_request_seconds_bucket", **labels, le="0.002") == 0
    assert value(found, "edgesplit_offload_request_seconds_bucket", **labels, le="0.005") == 2000
    assert value(found, "edgesplit_offload_request_seconds_bucket", **labels, le="+Inf") == 2000


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=20))
def test_label_values_are_escaped(names: list[str]) -> None:
    """Quotes, line breaks, braces and other alphabets come back as they went in."""
    ledger = MetricRegistry()
    for name in names:
        ledger.count(metrics.AGENT_UP_BYTES, name, by=1.0)
    found = samples(render_metrics(ledger.series()))
    for name in set(names):
        assert value(found, "edgesplit_agent_up_bytes_total", model=name) == names.count(name)


def test_series_are_bounded() -> None:
    """Beyond the bound they are counted together, and none is lost."""
    ledger = MetricRegistry(max_series=10)
    for number in range(1000):
        ledger.count(metrics.AGENT_REQUESTS, f"model-{number}@1", "local", "answered")
        ledger.observe(metrics.AGENT_REQUEST_S, f"model-{number}@1", "local", value=0.1)
    series = ledger.series()
    assert len(series) == 2 * 11
    others = {sample.family: sample for sample in series if OTHER_LABEL in sample.labels}
    assert others["edgesplit_agent_requests_total"].value == 990
    assert sum(others["edgesplit_agent_request_seconds"].counts) == 990


def test_processes_are_combined_by_metric_kind() -> None:
    """Counters and histograms add up; of loads the highest counts."""
    one, other = MetricRegistry(), MetricRegistry()
    for ledger, count in ((one, 3), (other, 4)):
        for _ in range(count):
            ledger.count(metrics.OFFLOAD_SENT, "m@1", by=10)
            ledger.observe(metrics.OFFLOAD_BATCH, "m@1", value=2)
    load, running = metrics.OFFLOAD_LOAD, metrics.OFFLOAD_RUNNING
    processes = [
        [*one.series(), gauge_series(load, 1.5), gauge_series(running, 1)],
        [*other.series(), gauge_series(load, 1.2), gauge_series(running, 2)],
    ]
    found = samples(render_metrics(merge_series([decode_series(encode_series(process)) for process in processes])))
    assert value(found, "edgesplit_offload_sent_bytes_total", model="m@1") == 70
    assert value(found, "edgesplit_offload_batch_size_count", model="m@1") == 7
    assert value(found, "edgesplit_offload_load_factor") == 1.5
    assert value(found, "edgesplit_offload_running") == 3


def _process_metrics(mark: str, sent: int, running: int) -> list[Any]:
    ledger = MetricRegistry()
    ledger.count(metrics.OFFLOAD_SENT, "m@1", by=sent)
    ledger.observe(metrics.OFFLOAD_BATCH, "m@1", value=2)
    return metrics_answer(mark, [*ledger.series(), gauge_series(metrics.OFFLOAD_RUNNING, running)])


def _sums(totals: MetricTotals, *answers: list[Any]) -> tuple[float, float, float]:
    found = samples(render_metrics(totals.update(answers)))
    names = ("edgesplit_offload_sent_bytes_total", "edgesplit_offload_batch_size_count")
    sent, batches = (value(found, name, model="m@1") for name in names)
    return sent, batches, value(found, "edgesplit_offload_running")


def test_late_or_dead_process_stays_in_the_sums() -> None:
    """Sums never fall; the gauges of such a process count no more."""
    totals = MetricTotals()
    assert _sums(totals, _process_metrics("a", 5, 1), _process_metrics("b", 1, 2)) == (6, 2, 3)
    assert _sums(totals, _process_metrics("b", 3, 2)) == (8, 2, 2)
    assert _sums(totals, _process_metrics("b", 3, 2), _process_metrics("c", 1, 1)) == (9, 3, 3)
    assert _sums(totals, _process_metrics("a", 6, 0)) == (10, 3, 0)


def test_dead_processes_are_merged_into_one_total() -> None:
    """Bounded memory, and no request is lost."""
    totals = MetricTotals(remembered=4)
    for number in range(100):
        assert _sums(totals, _process_metrics(f"process-{number}", 1, 0)) == (number + 1, number + 1, 0)
    assert len(totals._counters) == 4


def test_malformed_process_metrics_are_ignored() -> None:
    """And the others' counts are shown."""
    totals = MetricTotals()
    assert _sums(totals, ["a", b"\xff"], _process_metrics("b", 3, 1)) == (3, 1, 1)


@pytest.mark.parametrize(
    "series",
    [
        Series("edgesplit_unknown", (), 1.0),
        Series("edgesplit_offload_sent_bytes_total", (), 1.0),
        Series("edgesplit_offload_batch_size", ("m",), 1.0, (1, 2)),
        Series("edgesplit_offload_sent_bytes_total", ("m",), 1.0, (1,)),
    ],
)
def test_metrics_of_another_version_are_refused(series: Series) -> None:
    """An update may meet the files of the previous version."""
    with pytest.raises(MalformedMessage):
        decode_series(encode_series([series]))


@given(st.dictionaries(st.sampled_from(SERVER_PHASES), times))
def test_server_timing_header_has_the_phases(seconds: dict[str, float]) -> None:
    """To a microsecond."""
    read = parse_server_timing(format_server_timing(seconds))
    assert read.keys() == seconds.keys()
    assert all(read[name] == pytest.approx(seconds[name], abs=1e-6) for name in seconds)


@given(st.text())
def test_unknown_phases_and_insane_numbers_are_ignored(value: str) -> None:
    """Whatever a server or a proxy wrote into the header."""
    for name, seconds in parse_server_timing(value).items():
        assert name in SERVER_PHASES and 0 <= seconds <= MAX_PHASE_S


@pytest.mark.parametrize(
    "value",
    ["run;dur=-1", "run;dur=nan", "run;dur=1e9", "cdn;dur=5", "run;dur=99999999999", "run;dur=1" * 200, 'run;desc="x"'],
)
def test_hostile_timing_header_is_ignored(value: str) -> None:
    """No phase is read from it."""
    assert parse_server_timing(value) == {}


def test_failed_phase_is_timed() -> None:
    """And times that a clock gave in the wrong order are none."""
    timeline = Timeline()
    with pytest.raises(ZeroDivisionError), timeline.phase("run"):
        raise ZeroDivisionError
    timeline.add("queue", 2.0, 1.0)
    seconds = timeline.seconds_by_phase()
    assert seconds.keys() == {"run", "queue"} and seconds["queue"] == 0.0


def test_metrics_port_serves_only_the_metrics_page() -> None:
    """No model can be requested there, and nothing changed."""
    ledger = MetricRegistry()
    ledger.count(metrics.OFFLOAD_SENT, "m@1", by=5)
    server = make_metrics_server(("127.0.0.1", 0), lambda: metrics_response(ledger.series()))
    server.start()
    try:
        got = {
            (method, path): asked(server.port, path, method)
            for method, path in (("GET", "/metrics"), ("POST", "/metrics"), ("GET", "/v2"), ("GET", "/"))
        }
    finally:
        server.stop()
    assert {key: status for key, (status, _) in got.items()} == {
        ("GET", "/metrics"): 200, ("POST", "/metrics"): 405, ("GET", "/v2"): 404, ("GET", "/"): 404,
    }  # fmt: skip
    assert value(samples(got["GET", "/metrics"][1]), "edgesplit_offload_sent_bytes_total", model="m@1") == 5


def test_reading_processes_queued_records_and_skips_broken_ones() -> None:
    """A page never shows less than was counted before; a record that raises while it is added is logged."""
    ledger = MetricRegistry()

    def breaks() -> Iterator[Entry]:
        yield metrics.OFFLOAD_REQUESTS, ("m", "r", "answered"), 1.0
        raise ZeroDivisionError

    ledger.record(breaks())
    ledger.count(metrics.OFFLOAD_REQUESTS, "m", "r", "answered")
    (series,) = ledger.series()
    assert series.value == 2.0
