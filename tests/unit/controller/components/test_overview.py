"""Health of an installation's components: the observations of each process, and the advice for operators."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgesplit.process import confinement
from edgesplit_cli.commands.fleet import unhealthy_parts
from edgesplit_controller.components.offload_status import LISTS, SERVING
from edgesplit_controller.components.overview import OUTDATED_S, REMEDIES, HealthOverview
from edgesplit_controller.components.probes import Probe, ProbeResult, broker_probe, offload_probe
from edgesplit_controller.components.recorder import REFRESH_S, StatusRecorder
from edgesplit_controller.storage.tables.core import GatewayRouteRow, GatewayRow
from edgesplit_controller.storage.tables.leases import LeaseRow
from support.device_fleet import STALE_S, FleetHarness, telemetry


@pytest.fixture
def world(database_url: str) -> FleetHarness:
    """On both databases."""
    return FleetHarness(database_url)


def parts_of(world: FleetHarness, folder: Path, behind: int = 0) -> HealthOverview:
    return HealthOverview(
        world.database, folder, stale_after_s=STALE_S, unaggregated=lambda: behind, now=lambda: world.now
    )


def noting(world: FleetHarness, process: int, *looks: Probe) -> StatusRecorder:
    return StatusRecorder(world.database, process, looks, now=lambda: world.now)


class BrokerSession:
    """A session at a broker that a test connects."""

    connected = True
    problem = ""
    restarts = 0


def named(shown: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [row for row in shown if row["name"] == name]
    return found


def test_a_failed_component_is_listed_first_with_time_and_advice(world: FleetHarness, tmp_path: Path) -> None:
    """It is reported good again as soon as it recovers; the time is that of the change, not of the last check."""
    line = BrokerSession()
    mine = noting(world, 1, broker_probe(line, "mqtts://hub:8883"))
    mine.step()
    assert named(parts_of(world, tmp_path).to_dicts(), "broker")["state"] == "good"
    line.connected, line.problem = False, "the certificate has expired"
    broke = world.now = world.now + 7.0
    for _ in range(3):
        mine.step()
        world.now += REFRESH_S
    shown = parts_of(world, tmp_path).to_dicts()
    first = named(shown, "broker")
    assert first == next(row for row in shown if row["state"] == "bad" and row["name"] == "broker")
    assert (
        first["since"] == broke
        and "the certificate has expired" in first["text"]
        and first["remedy"] == REMEDIES["broker"]
    )
    line.connected = True
    mine.step()
    assert named(parts_of(world, tmp_path).to_dicts(), "broker")["remedy"] == ""


def test_one_process_without_broker_marks_the_component_bad(world: FleetHarness, tmp_path: Path) -> None:
    """With two of three processes connected, the component is bad and names the process that reports it."""
    for process in (1, 2, 3):
        state = "bad" if process == 2 else "good"
        noting(world, process, lambda state=state: ProbeResult("broker", state, f"it is {state}")).step()  # type: ignore[misc]
    found = named(parts_of(world, tmp_path).to_dicts(), "broker")
    assert (found["state"], found["text"]) == ("bad", "process 2 of 3: it is bad")


def test_observations_of_a_stopped_process_expire(world: FleetHarness, tmp_path: Path) -> None:
    """Without observations the state is unknown, not good; while another process observes, the stopped one's state is
    ignored."""
    noting(world, 2, lambda: ProbeResult("broker", "bad", "gone")).step()
    world.now += OUTDATED_S + 1
    found = named(parts_of(world, tmp_path).to_dicts(), "broker")
    assert found["state"] == "unknown" and "last result: gone" in found["text"] and found["remedy"]
    noting(world, 1, lambda: ProbeResult("broker", "good", "here")).step()
    assert named(parts_of(world, tmp_path).to_dicts(), "broker")["state"] == "good"


def test_a_failing_check_does_not_stop_the_others(world: FleetHarness, tmp_path: Path) -> None:
    """The other checks are stored, and the loop continues."""

    def broken() -> ProbeResult:
        raise RuntimeError("a bug")

    noting(world, 1, broken, lambda: ProbeResult("offload server", "good", "ready")).step()
    assert named(parts_of(world, tmp_path).to_dicts(), "offload server")["state"] == "good"


def test_gateways_and_cloud_links_are_limited_to_the_operators_groups(world: FleetHarness, tmp_path: Path) -> None:
    """A dead gateway is bad and reports the number of devices behind it; half of the devices without a cloud link is
    bad."""
    world.add("gate", "cam-1", "cam-2")
    world.add("other-gate", group="lab")
    world.put(*(GatewayRow(device=name, address=f"{name}:8500") for name in ("gate", "other-gate")))
    world.put(*(GatewayRouteRow(device=name, gateway="gate") for name in ("cam-1", "cam-2")))
    world.birth("other-gate", "cam-1", "cam-2")
    parts = parts_of(world, tmp_path)
    gateways = {part["subject"]: part for part in parts.to_dicts() if part["name"] == "gateway"}
    assert gateways["gate"]["state"] == "bad" and "2 devices behind it" in gateways["gate"]["text"]
    assert gateways["other-gate"]["state"] == "good"
    assert [part["subject"] for part in parts.to_dicts(["lab"]) if part["name"] == "gateway"] == ["other-gate"]
    assert all(part["name"] != "way to the cloud" for part in parts.to_dicts())
    world.devices.ingest([("cam-1", telemetry(1, 0)), ("cam-2", telemetry(1, 0))])
    assert named(parts.to_dicts(), "way to the cloud")["text"] == "2 of 2 online devices reach it"


def test_database_disk_histories_and_processes_are_always_listed(world: FleetHarness, tmp_path: Path) -> None:
    """They need no stored observation, and every component that can be bad has advice."""
    leased = LeaseRow(name="controller", holder="me", token=1, expires=4e9)
    world.put(leased, LeaseRow(name="process 1", holder="me", token=1, expires=4e9))
    shown = parts_of(world, tmp_path, behind=1_000_000).to_dicts()
    assert {"database", "disk", "histories", "model processes", "processes"} == {row["name"] for row in shown}
    assert named(shown, "histories")["state"] == "bad" and "answers in" in named(shown, "database")["text"]
    assert named(shown, "processes")["text"] == "1 process runs"
    observed = {"broker", "offload server", "object store", "gateway", "way to the cloud", LISTS, SERVING}
    assert {row["name"] for row in shown} | observed == set(REMEDIES)


def test_doctor_did_not_say_that_models_are_not_confined(
    world: FleetHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the kernel lacks something, the component says what and why, and what to do about it."""
    monkeypatch.setattr(
        confinement, "unavailable", lambda: [confinement.Unavailable("files", "no Landlock", "use 5.13")]
    )
    component = named(parts_of(world, tmp_path).to_dicts(), "model processes")
    assert component["state"] == "unknown" and "not confined: files (no Landlock): use 5.13" in component["text"]
    monkeypatch.setattr(confinement, "unavailable", list)
    assert named(parts_of(world, tmp_path).to_dicts(), "model processes")["state"] == "good"


@pytest.fixture
def plain_server() -> Iterator[str]:
    """Something that listens and speaks no TLS."""
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_unreachable_offload_server_reports_the_reason(plain_server: str) -> None:
    """No listener, and a listener that is another program: both are bad, and neither raises."""
    child = BrokerSession()
    child.restarts = 2
    gone = offload_probe("https://127.0.0.1:1", ssl.create_default_context(), child)()
    assert gone.state == "bad" and "does not answer" in gone.text and "started again 2 times" in gone.text
    assert offload_probe(plain_server, ssl.create_default_context())().state == "bad"


def test_fleet_command_prints_only_unhealthy_components() -> None:
    """`edgectl fleet` leaves healthy components out."""
    part = {"name": "broker", "subject": "", "state": "good", "text": "connected", "remedy": ""}
    assert unhealthy_parts([part]) == []
    (shown,) = unhealthy_parts([part, {**part, "state": "bad", "text": "refused", "remedy": "look at it"}])
    assert shown.row_count == 1
