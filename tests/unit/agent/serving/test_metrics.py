"""Metrics of requests: the agent's and the offload server's counters, reports, telemetry, and where they agree."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgesplit.errors import Busy, DeadlineExceeded, Dropped, EdgeError, InferenceFailed, LinkError, UsageError
from edgesplit.http1.server import Request, Response
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import PhaseSeconds, Telemetry, TelemetryWindow
from edgesplit.observability.prometheus import render_metrics
from edgesplit.oip import protocol as oip
from edgesplit.oip.report import PHASES, Report, from_parameters, phases, to_parameters
from edgesplit.plan import Conditions
from edgesplit_agent.main import build_parser
from edgesplit_agent.power.sensors import Readings
from edgesplit_agent.serving.http_endpoint import Endpoint
from edgesplit_agent.serving.metrics import RequestMetrics, engine_series, outcome_label, power_gauges
from edgesplit_agent.telemetry.windows import TelemetryWindows, build_telemetry, shorten_to_fit
from edgesplit_offload.observability.request_metrics import outcome_label as server_outcome
from support.agent_engine import CUT, INPUT, LINK, LOCAL, RecordList, active, record, unavailable, world
from support.handmade_release import CUT as HANDMADE_CUT
from support.handmade_release import DIGEST, MID
from support.observed_request import INPUTS, MODEL, NO_HEDGE, asked, both_sides, samples, value

NOW = Conditions(link=LINK)
SPLIT = msgspec.structs.replace(CUT, device_s=0.0)


def test_report_phases_sum_to_the_latency() -> None:
    """Nothing counts twice: a phase within the device's or the server's seconds is subtracted there."""
    report = Report(
        release="r", row="cut-1", latency_s=0.1, queue_s=0.001, device_s=0.02, decode_s=0.005, encode_s=0.002,
        link_s=0.03, remote_s=0.04, remote_queue_s=0.004, remote_decode_s=0.003, remote_encode_s=0.001,
        answer_decode_s=0.002,
    )  # fmt: skip
    found = phases(report)
    assert list(found) == [name for name in PHASES if name in found]
    assert sum(found.values()) == pytest.approx(report.latency_s)
    assert found["device"] == pytest.approx(0.015) and found["remote"] == pytest.approx(0.032)
    alone = Report(
        release="r", row="cut-1", fallback=True, latency_s=0.1, remote_wait_s=0.04, device_s=0.05, local_finish_s=0.03
    )
    assert phases(alone) == {
        "device": pytest.approx(0.02), "remote_wait": 0.04, "local_finish": 0.03, "other": pytest.approx(0.01),
    }  # fmt: skip


def test_reports_are_compatible_with_older_clients_and_agents() -> None:
    """Unknown parameters are ignored; absent ones are zero."""
    report = Report(release="r", row="local", queue_s=0.5, latency_s=0.7, trace_id="a" * 32)
    sent = to_parameters(report)
    assert from_parameters({**sent, "edgesplit_of_a_later_day": 1}) == report
    old = {name: sent[name] for name in ("edgesplit_release", "edgesplit_row", "edgesplit_latency_s")}
    assert from_parameters(old) == Report(release="r", row="local", latency_s=0.7)


def test_device_and_server_counters_agree(tmp_path: Path) -> None:
    """Ten requests over both tiers: ten in each side's counters, and the phase sums are those of the ten reports."""
    metrics, kept = RequestMetrics(), RecordList()
    with both_sides(tmp_path, observer=metrics) as (engine, offload):
        engine.observe(kept)
        for _ in range(10):
            assert np.array_equal(engine.infer(MODEL, INPUTS, deadline_s=20).outputs["out"], np.full((1, 4), 4.0))
        page = samples(render_metrics([*metrics.registry.series(), *engine_series(engine, connected=True)]))
        server = samples(render_metrics(offload.series()))
    reports = [entry.outcome for entry in kept.records if isinstance(entry.outcome, Report)]
    row = {"model": "handmade@1", "row": "cut-1"}
    assert value(page, "edgesplit_agent_requests_total", **row, outcome="answered") == 10
    assert value(page, "edgesplit_agent_request_seconds_count", **row) == 10
    assert value(page, "edgesplit_agent_request_seconds_sum", **row) == pytest.approx(sum(r.latency_s for r in reports))
    for phase in PHASES:
        took = [phase_s[phase] for phase_s in map(phases, reports) if phase in phase_s]
        labels = {"model": "handmade@1", "phase": phase}
        assert value(page, "edgesplit_agent_phase_seconds_count", **labels) == len(took)
        assert value(page, "edgesplit_agent_phase_seconds_sum", **labels) == pytest.approx(sum(took))
    up = sum(report.up_bytes for report in reports)
    assert value(page, "edgesplit_agent_up_bytes_total", model="handmade@1") == up
    assert value(page, "edgesplit_agent_serving", **row) == 1
    assert value(server, "edgesplit_offload_requests_total", **row, outcome="answered") == 10
    assert value(server, "edgesplit_offload_received_bytes_total", model="handmade@1") == up
    for phase in ("decode", "queue", "run", "encode"):
        assert value(server, "edgesplit_offload_phase_seconds_count", model="handmade@1", phase=phase) == 10
    told = sum(report.remote_decode_s for report in reports)
    counted = value(server, "edgesplit_offload_phase_seconds_sum", model="handmade@1", phase="decode")
    assert told == pytest.approx(counted, abs=10 * 1e-6)
    assert all(report.queue_s > 0 and report.answer_decode_s > 0 for report in reports)


def test_fallback_reports_wait_and_tail_time() -> None:
    """And no second of the cloud's is counted."""
    with world(LOCAL, SPLIT) as (engine, cloud, _):
        cloud.script = unavailable
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=20, options=NO_HEDGE).report
    assert report.fallback and report.cause == "server"
    assert report.remote_wait_s > 0 and report.local_finish_s > 0 and report.device_s > report.local_finish_s
    found = phases(report)
    assert not {"link", "remote", "answer_decode"} & set(found)
    assert sum(found.values()) == pytest.approx(report.latency_s)


@pytest.mark.parametrize(
    "claim", ["run;dur=60000", "queue;dur=1, run;dur=5000", "x" * 10_000, "run;dur=-5", "\xff", "decode;dur=nan"]
)
def test_impossible_server_times_are_ignored(claim: str) -> None:
    """The phases of a server that claims more seconds than the exchange took are left out; its answer is still
    valid."""

    def boasting(request: Request, good: Response) -> Response:
        return Response(good.status, {**good.headers, "server-timing": claim}, good.body)

    with world(LOCAL, SPLIT) as (engine, cloud, _):
        cloud.script = boasting
        report = engine.infer("tiny", {"x": INPUT}, deadline_s=20, options=NO_HEDGE).report
    assert not report.fallback
    assert (report.remote_queue_s, report.remote_decode_s, report.remote_encode_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (Busy("full"), "busy"), (Dropped("another"), "dropped"), (DeadlineExceeded("late"), "deadline"),
        (LinkError("down"), "link"), (UsageError("shape"), "rejected"), (InferenceFailed("nan"), "failed"),
        (RuntimeError("ours"), "failed"),
    ],
)  # fmt: skip
def test_errors_are_counted_under_a_fixed_set_of_reasons(error: Exception, word: str) -> None:
    """Whatever the error's text."""
    assert outcome_label(error) == word
    metrics = RequestMetrics()
    metrics.finished(record(error, version="m@1"))
    found = samples(render_metrics(metrics.registry.series()))
    assert value(found, "edgesplit_agent_requests_total", model="m@1", row="", outcome=word) == 1
    assert server_outcome(error) == {"link": "gone", "dropped": "failed"}.get(word, word)


def test_hostile_names_create_no_metric_series(tmp_path: Path) -> None:
    """A thousand unknown models are one series of the offload server's, and none of the agent's."""
    with both_sides(tmp_path) as (engine, offload):
        for number in range(300):
            status, _ = asked(offload.port, f"/v2/models/{'ab' * 32}.pi.cut-{number}/infer", "POST")
            assert status in (400, 404)
            with pytest.raises(EdgeError):
                engine.infer(f"model-{number}", INPUTS)
        body, length = oip.encode_request(oip.InferRequest(inputs={"mid": MID}))
        assert asked(offload.port, f"/v2/models/{HANDMADE_CUT}/infer", "POST")[0] == 400
        series = [sample for sample in offload.series() if sample.family == "edgesplit_offload_requests_total"]
    assert {sample.labels for sample in series} == {("", "", "rejected"), ("handmade@1", "cut-1", "rejected")}
    assert sum(sample.value for sample in series) == 301 and body and length and DIGEST


def test_only_present_sensors_are_exposed() -> None:
    """A missing battery gives no sample: zero would mean an empty one."""
    read = Readings(battery_percent=40.0, celsius=61.5, under_voltage=False)
    found = samples(render_metrics([*power_gauges("balanced", read)]))
    ours = {name: number for (name, _), number in found.items() if name.startswith("edgesplit_")}
    assert ours == {
        "edgesplit_agent_power_mode": 1.0, "edgesplit_agent_battery_ratio": 0.4,
        "edgesplit_agent_temperature_celsius": 61.5, "edgesplit_agent_under_voltage": 0.0,
    }  # fmt: skip


def test_devices_cannot_read_the_servers_metrics(tmp_path: Path) -> None:
    """The metrics page is on no port that devices may reach."""
    with both_sides(tmp_path) as (_, offload):
        assert asked(offload.port, "/metrics")[0] == 404


def test_web_page_cannot_read_the_agents_metrics() -> None:
    """The origin check of the local endpoint holds for /metrics too."""
    with world(LOCAL) as (engine, _, _):
        endpoint = Endpoint(engine, dict, lambda: Response(200, {}, [b"page"]))
        seen = {
            name: endpoint(Request("GET", "/metrics", headers=headers)).status
            for name, headers in {
                "local": {"host": "localhost:8600"},
                "rebound": {"host": "evil.example"},
                "foreign": {"host": "127.0.0.1:8600", "origin": "https://evil.example"},
            }.items()
        }
    assert seen == {"local": 200, "rebound": 403, "foreign": 403}


def test_telemetry_reports_phase_histograms_per_window() -> None:
    """As sparse histograms, which a controller decodes; the next window starts at zero."""
    windows, release = TelemetryWindows(), active(LOCAL)
    for _ in range(3):
        windows.finished(record(Report(release="r", row="local", latency_s=0.004, device_s=0.003)))
    sent = build_telemetry(1, 1, False, NOW, windows.close_windows({"tiny": release}, NOW))
    read = messages.decode(messages.encode(sent), Telemetry)
    assert read == sent
    device, other = read.models[0].phases
    assert (device.phase, device.counts) == ("device", ((5, 3),)) and device.total_s == pytest.approx(0.009)
    assert other.phase == "other" and other.total_s == pytest.approx(0.003)
    assert windows.close_windows({"tiny": release}, NOW)[0].phases == ()


def test_telemetry_of_many_models_fits_one_message() -> None:
    """The phases of the least used models are left out first; every model's totals stay."""
    full = tuple(PhaseSeconds(name, 1.0, tuple((place, 9) for place in range(17))) for name in PHASES)
    windows = tuple(
        TelemetryWindow(model=f"model-{number}", release="a" * 64, row="local", requests=number, phases=full)
        for number in range(30)
    )
    whole = Telemetry(
        session=1, sequence=1, emulated=False, up_bytes_per_s=1.0, rtt_s=0.1, remote_usable=True, models=windows
    )
    assert len(messages.encode(whole)) > LIMITS.telemetry_bytes
    sent = shorten_to_fit(whole)
    assert len(messages.encode(sent)) <= LIMITS.telemetry_bytes
    assert [model.requests for model in sent.models] == list(range(30))
    kept = [model.requests for model in sent.models if model.phases]
    assert kept and kept == list(range(30 - len(kept), 30))
    small = msgspec.structs.replace(whole, models=windows[:2])
    assert shorten_to_fit(small) == small


def test_controller_accepts_missing_phases_and_refuses_too_many() -> None:
    """Older devices send none; a hostile one may send too many."""
    told = {"model": "m", "release": "r", "row": "local"}
    bare = {
        "type": "telemetry", "session": 1, "sequence": 1, "emulated": False, "up_bytes_per_s": 1.0, "rtt_s": 0.1,
        "remote_usable": True,
    }  # fmt: skip

    def read(**more: object) -> Telemetry:
        return messages.decode(msgspec.msgpack.encode({**bare, "models": [{**told, **more}]}), Telemetry)

    assert read().models[0].phases == ()
    assert read(phases=[["device", 1.0, [[3, 1]]]]).models[0].phases[0].counts == ((3, 1),)
    for hostile in (
        [["device", 1.0, [[3, 1]]]] * 25,
        [["device", 1.0, [[3, 1]] * 33]],
        [["device", 1.0, [[64, 1]]]],
        [["device", 1.0, [[3, -1]]]],
        [["device", float("nan"), []]],
        [["Device\x1b[2J", 1.0, []]],
        [["d" * 25, 1.0, []]],
    ):
        with pytest.raises(EdgeError):
            read(phases=hostile)


def test_metrics_are_off_by_default() -> None:
    """The default is no address; argparse checks a default given as text against the option's own grammar."""
    options = build_parser().parse_args(["run", "--data", "folder"])
    assert options.metrics is None and options.gateway_metrics is None
    for option in ("--metrics", "--gateway-metrics"):
        with pytest.raises(SystemExit):
            build_parser().parse_args(["run", "--data", "folder", option, "9400"])
