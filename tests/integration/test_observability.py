"""Metrics, traces, logs and the timeline of a request, of real processes."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgesplit
from edgesplit.observability import trace_context
from edgesplit.observability.trace_context import TraceContext
from edgesplit_cli.demo.run import free_port
from support.edgesplit_processes import DIGITS, Agent, Cloud, eventually, frame_input, frames
from support.observed_request import Collector, Samples, asked, samples, value

SPAN = "00f067aa0ba902b7"
REQUESTS = 6


class ObservedCloud:
    """A controller, its offload server and one emulated device, with metrics and traces on."""

    def __init__(self, cloud: Cloud, device: Agent, collector: Collector, ports: dict[str, int]) -> None:
        self.cloud, self.device, self.collector, self._ports = cloud, device, collector, ports

    def page(self, of: str) -> Samples:
        """The samples that Prometheus scrapes there."""
        status, body = asked(self._ports[of], "/metrics")
        assert status == 200
        return samples(body)


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedCloud]:
    """Started once, and asked `REQUESTS` frames, each cut in the middle."""
    collector = Collector()
    ports = {name: free_port() for name in ("controller", "offload", "agent")}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.server.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        at = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
        watched = ["--metrics", at["controller"], "--offload-metrics", at["offload"]]
        cloud = Cloud(tmp_path_factory.mktemp("observed"), *watched, "--log-format", "json")
        try:
            cloud.start()
            cloud.push_digits()
            more = ["--metrics", at["agent"], "--log-format", "json", "--hedge", "never"]
            device = cloud.agent("pi4", "raspberrypi4", *more)
            layers = [layer["name"] for layer in cloud.json("model", "show", "digits")["layers"]]
            cloud.edgectl("deploy", "digits", "--partition", layers[len(layers) // 3], "--to", "pi4", "--wait", "60")
            jpeg = frames(1)[0][0]
            eventually("the cloud helps", lambda: _helped(device, jpeg))
            for _ in range(REQUESTS):
                device.infer("digits", frame_input(jpeg))
            yield ObservedCloud(cloud, device, collector, ports)
        finally:
            cloud.stop()
            collector.server.stop()


def _helped(device: Agent, jpeg: bytes) -> bool:
    report = device.infer("digits", frame_input(jpeg)).report
    return not report.fallback and report.row != "local"


def _sum(page: Samples, name: str, **wanted: str) -> float:
    return sum(
        number for (sample, labels), number in page.items() if sample == name and wanted.items() <= dict(labels).items()
    )


def test_metrics_of_agent_and_offload_server_agree(observed: ObservedCloud) -> None:
    """The cloud answered what helped the device, and what came too late for it; emulated says so everywhere."""
    agent, server = observed.page("agent"), observed.page("offload")
    asked_for = _sum(agent, "edgesplit_agent_requests_total", model="digits@1")
    helped = _sum(agent, "edgesplit_agent_phase_seconds_count", model="digits@1", phase="link")
    answered = _sum(server, "edgesplit_offload_requests_total", model="digits@1", outcome="answered")
    assert asked_for > REQUESTS and 1 <= helped <= answered <= asked_for
    for name, labels in agent:
        assert not name.startswith("edgesplit_") or dict(labels)["emulated"] == "true"
    assert _sum(agent, "edgesplit_agent_phase_seconds_count", phase="decode") > REQUESTS
    assert value(server, "edgesplit_offload_info", version=edgesplit.__version__) == 1
    assert _sum(server, "edgesplit_offload_processes") >= 1


def test_counters_of_a_killed_serving_process_are_kept(observed: ObservedCloud) -> None:
    """What it had told stays in the server's sums, and its successor adds to them."""

    def answered(page: Samples) -> float:
        return _sum(page, "edgesplit_offload_requests_total", outcome="answered")

    before = observed.page("offload")
    processes = _sum(before, "edgesplit_offload_processes")
    supervisor = int((observed.cloud.data / "offload" / "pid").read_text().split()[0])
    serving = _children(supervisor)
    if len(serving) < 2:
        pytest.skip("the offload server has one process on so small a machine")
    for pid in serving:
        os.kill(pid, signal.SIGKILL)
    jpeg = frames(1)[0][0]
    eventually("the cloud helps again", lambda: _helped(observed.device, jpeg))
    eventually("as many as before", lambda: _sum(observed.page("offload"), "edgesplit_offload_processes") == processes)
    assert answered(observed.page("offload")) > answered(before)
    assert not set(serving) & set(_children(supervisor))


def _children(pid: int) -> list[int]:
    stats = [text for stat in Path("/proc").glob("[0-9]*/stat") if (text := _text(stat))]
    parents = {int(stat.split()[0]): int(stat.rpartition(")")[2].split()[1]) for stat in stats}
    return [child for child, parent in parents.items() if parent == pid]


def _text(stat: Path) -> str:
    with contextlib.suppress(OSError):  # a process that has just ended
        return stat.read_text()
    return ""


def test_controller_metrics_count_api_requests_and_the_fleet(observed: ObservedCloud) -> None:
    """By the routes' templates: no name of a device or model is a label."""
    page = observed.page("controller")
    assert _sum(page, "edgesplit_controller_requests_total", route="/v1/models", method="POST", status="2xx") == 1
    assert _sum(page, "edgesplit_controller_requests_total", route="/v1/devices/{name}") >= 1
    assert not any("pi4" in text for _, labels in page for _, text in labels)
    assert value(page, "edgesplit_controller_devices", state="online") == 1


def test_one_trace_shows_device_and_cloud(observed: ObservedCloud) -> None:
    """An application's traceparent, on the wire to the agent: both processes' spans arrive under its id."""
    jpeg = frames(1)[0][0]

    def helped() -> TraceContext | None:
        given = TraceContext(secrets.token_hex(16), SPAN, sampled=True)
        with trace_context.request_context(given):
            report = observed.device.infer("digits", frame_input(jpeg)).report
        assert report.trace_id == given.trace_id
        return None if report.fallback or report.row == "local" else given

    given = eventually("an answer with the cloud's help", helped)

    def arrived() -> dict[tuple[str, str], Any] | None:
        ours = [
            (service, span) for service, span in observed.collector.received if span.trace_id.hex() == given.trace_id
        ]
        found = {(service, span.name): span for service, span in ours}
        return found if {("edgesplit-agent", "infer digits"), ("edgesplit-offload", "offload")} <= set(found) else None

    spans = eventually("spans of both sides", arrived)
    assert spans["edgesplit-agent", "infer digits"].parent_span_id.hex() == SPAN
    assert spans["edgesplit-offload", "offload"].parent_span_id == spans["edgesplit-agent", "offload"].span_id
    assert {"queue", "run"} <= {name for service, name in spans if service == "edgesplit-offload"}


def test_log_lines_of_a_request_name_it_and_its_trace(observed: ObservedCloud) -> None:
    """JSON, a line each, from agent, controller and offload server."""
    lines = [json.loads(line) for line in observed.device.process.log.read_text().splitlines() if line.startswith("{")]
    assert lines and all({"at", "level", "logger", "message"} <= set(line) for line in lines)
    controllers = [line for line in observed.cloud.process.log.read_text().splitlines() if line.startswith("{")]
    assert controllers and all(json.loads(line)["at"] for line in controllers)


def test_infer_timeline_draws_phases_and_device_show_prints_window_means(observed: ObservedCloud) -> None:
    """`edgectl infer --timeline` has a line for each phase; `device show` has the latest window's means."""
    frame = next(iter(sorted((DIGITS / "frames").glob("*.jpg"))))
    named = [f"  {phase} " for phase in ("decode", "device", "encode", "link", "remote")]

    def drawn() -> bool:
        picture = observed.cloud.edgectl("infer", "digits", str(frame), "--url", observed.device.url, "--timeline")
        return all(name in picture for name in named)

    eventually("a picture of an answer with the cloud's help", drawn)
    told = json.loads(observed.cloud.edgectl("infer", "digits", str(frame), "--url", observed.device.url, "--json"))
    assert sum(told["phases"].values()) == pytest.approx(told["report"]["latency_s"])

    def shown() -> bool:
        observed.device.infer("digits", frame_input(frame.read_bytes()))
        return "where the time of the latest" in observed.cloud.edgectl("device", "show", "pi4")

    eventually("a window with phases", shown)
    status = subprocess.run(
        [sys.executable, "-m", "edgesplit_agent.main", "status", "--data", str(observed.device.data)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    phases = json.loads(status.stdout)["models"][0]["phases"]
    assert phases["device"]["requests"] > REQUESTS and phases["device"]["mean_s"] > 0
