"""The fleet overview: counts, pages, problems and their causes; no dead device is shown as alive."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import event

from edgesplit.errors import UsageError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import Ack, Backlog, Birth, Death, PowerState, Telemetry, TelemetryWindow
from edgesplit.mqtt.telemetry import DeviceTime, MachineState
from edgesplit.release.manifest import DesiredRelease, Signed, Statement
from edgesplit_cli.commands.fleet import models_table, overview
from edgesplit_cli.output import console
from edgesplit_cli.views.device import condition_line, health_line, model_lines, sequence_line
from edgesplit_controller.fleet.conditions import NEAR_EXPIRY_S, UNRESPONSIVE_S
from edgesplit_controller.fleet.devices import ACK_INTERVAL_S
from edgesplit_controller.fleet.listing import ListingQuery
from edgesplit_controller.history.buckets import SPANS, Span
from edgesplit_controller.history.rollup import SETTLED_S
from edgesplit_controller.storage.tables.core import AgentStartsRow, CertificateRow, ClaimRow, FloodRow
from support.device_fleet import NOW, OTHER, RELEASE, STALE_S, FleetHarness, new_url, runs, telemetry, window


@pytest.fixture
def world(tmp_path: Path) -> FleetHarness:
    return FleetHarness(new_url(tmp_path))


def test_the_overview_counts_devices_versions_cuts_and_failures(database_url: str) -> None:
    """On both databases: states, versions, cuts of online devices, failures by cause, problems."""
    world = FleetHarness(database_url)
    world.add("live-1", "live-2", "silent", "dead", "never")
    world.add("gone", revoked=NOW)
    world.want("live-1", "live-2", "silent", "dead")
    world.put(ClaimRow(
        token_sha256="t", device="to-come", device_class="pi4", group="door", labels={}, link="", expires=NOW + 60,
        used=None, public_key_sha256=None,
    ))  # fmt: skip
    world.birth("live-1", "live-2", "silent", "dead")
    for name in ("live-1", "live-2", "silent", "dead"):
        world.report(name, runs())
        world.tell(name, 0, window(), power=PowerState(under_voltage=True))
    world.devices.ingest([("dead", Death(1))])
    world.now += STALE_S + 1
    for number, name in enumerate(("live-1", "live-2")):
        world.report(name, runs("rolled back", f"its own part failed {number} times", OTHER), number=2)
        world.tell(
            name, 1, window("local", fallbacks=2, failed=1), machine=MachineState(disk_free_bytes=1, disk_bytes=10**9)
        )
    world.now += SETTLED_S + 1
    for name in ("live-1", "live-2"):
        world.tell(name, 2, window("local", requests=0))
    assert world.rolling.step() == 6
    seen = world.fleet.overview()
    assert seen["devices"] == {
        "online": 2, "stale": 1, "offline": 2, "revoked": 1, "claimed": 1, "total": 5, "emulated": 4,
        "simulated": 0,
    }  # fmt: skip
    assert seen["agents"] == [{"agent": "0.2", "devices": 4}]
    (model,) = seen["models"]
    assert model["cuts"] == [{"cut": "local", "devices": 2}]
    assert [(release["release"], release["state"], release["devices"]) for release in model["releases"]] == [
        (OTHER, "rolled back", 2)
    ]
    assert (model["requests"], model["failed"], model["fallbacks"]) == (60, 2, 4)
    (failure,) = seen["failures"]
    assert (failure["devices"], failure["cause"], failure["release"]) == (2, "its own part failed N times", RELEASE)
    assert [(condition["kind"], condition["devices"]) for condition in seen["conditions"]] == [("failing release", 2)]
    assert all(condition["remedy"] for condition in seen["conditions"])
    assert world.fleet.overview(["other"])["devices"]["total"] == 0


def test_controller_side_findings_are_counted(world: FleetHarness) -> None:
    """Clones, floods, certificates that are not renewed, devices that do not act upon their statements."""
    world.add("cam-1", "cam-2", "cam-3", "cam-4", counter=9, statement=b"signed")
    world.put(
        CertificateRow(
            serial="cam-1", device="cam-1", public_key_sha256="", issued=0.0, expires=NOW + NEAR_EXPIRY_S - 60,
            revoked=None,
        ),
        AgentStartsRow(device="cam-2", marks=[], copied=NOW - 5),
        FloodRow(device="cam-3", at=NOW - 9, times=2, dropped=5, held_until=NOW + 3_600, listed=True),
    )  # fmt: skip
    world.birth("cam-4")
    world.tell("cam-4", 0, agent_version="0.2", statement_counter=8)
    world.now += UNRESPONSIVE_S + 1
    world.tell("cam-4", 1, agent_version="0.2", statement_counter=8)
    found = {condition["kind"]: condition for condition in world.fleet.conditions()}
    assert {kind: one["example"] for kind, one in found.items()} == {
        "certificate expires": "cam-1", "copied": "cam-2", "flooding": "cam-3", "unresponsive": "cam-4",
    }  # fmt: skip
    for name, kind in (
        ("cam-1", "certificate expires"),
        ("cam-2", "copied"),
        ("cam-3", "flooding"),
        ("cam-4", "unresponsive"),
    ):
        assert [condition["kind"] for condition in world.shown(name)["conditions"]] == [kind]
    world.tell("cam-4", 2, agent_version="0.2", statement_counter=9)
    assert world.shown("cam-4")["conditions"] == []


def test_the_overview_needs_a_constant_number_of_queries(world: FleetHarness) -> None:
    """Forty devices take as many statements as four, because the database counts."""
    asked: list[str] = []

    def count() -> int:
        asked.clear()
        world.fleet.overview()
        return len(asked)

    with world.database.read() as session:
        engine = session.get_bind().engine
    event.listen(engine, "before_cursor_execute", lambda *call: asked.append(call[2]))
    world.add(*(f"cam-{number}" for number in range(4)))
    few = count()
    world.add(*(f"more-{number}" for number in range(36)))
    world.birth(*(f"more-{number}" for number in range(36)))
    assert count() == few and not any("devices.telemetry" in name for name in asked)


def test_last_values_of_a_dead_device_are_not_shown_as_current(world: FleetHarness) -> None:
    """A dead device's telemetry is null and a model's state unknown, with their age beside them."""
    world.add("cam")
    world.birth("cam")
    world.report("cam", runs())
    world.tell("cam", 0, window())
    alive = world.shown("cam")
    assert alive["telemetry"]["sequence"] == 0 and alive["models"][0]["state"] == "running"
    assert all(value["current"] for value in alive["facts"].values())
    for after_s, said, state in ((0.0, Death(1), "offline"), (60.0, Birth(2, 0, "1", "pi4", False, ""), "online")):
        world.now += after_s
        world.devices.ingest([("cam", said)])  # type: ignore[list-item]
        shown = world.shown("cam")
        assert shown["state"] == state and shown["telemetry"] is None and shown["last_telemetry"]["sequence"] == 0
        assert [(model["state"], model["last_state"], model["current"]) for model in shown["models"]] == [
            ("unknown", "running", False)
        ]
        assert not shown["facts"]["telemetry"]["current"] and not shown["facts"]["reported"]["current"]
    assert shown["facts"]["telemetry"]["age_s"] == 60.0
    (line,) = model_lines({**shown, "differences": []})
    assert "unknown" in line.plain and "running" in line.plain and "reported" in line.plain


def test_the_reason_for_a_desired_reported_difference_is_shown(world: FleetHarness) -> None:
    """From the retained statement and the device's report."""
    signed = Signed(
        messages.encode(Statement(device="cam", releases=(DesiredRelease("m", RELEASE),), counter=8, expires=9)), ()
    )
    world.add("cam", counter=8, statement=messages.encode(signed))
    world.birth("cam")
    world.tell("cam")
    assert world.shown("cam")["differences"] == []
    world.report("cam", runs(release=OTHER))
    (found,) = world.shown("cam")["differences"]
    assert (found["kind"], found["running"]) == ("not applied", OTHER)
    (line,) = model_lines(world.shown("cam"))
    assert "not applied (it has applied statement 7, and 8 is published)" in line.plain


def test_missing_duplicate_and_reordered_messages_are_counted(world: FleetHarness) -> None:
    """What is missing, came twice, came out of order, or belonged to an older session."""
    world.add("cam")
    world.birth("cam", session=3)
    for session, sequence in ((3, 0), (3, 4), (3, 2), (3, 2), (2, 9)):
        world.tell("cam", sequence, session=session)
    heard = world.shown("cam")["message_sequence"]
    assert (heard["missing"], heard["again"], heard["earlier"], heard["older"]) == (2, 1, 1, 1)
    assert sequence_line(heard) == "telemetry 4 of session 3; 2 lost, 1 twice, 1 out of order, 1 of older sessions"
    assert world.shown("cam")["telemetry"]["sequence"] == 4


def late(number: int, *measured: Telemetry, up_s: float = 10_000.0) -> Backlog:
    return Backlog(batch=number, sent_at=DeviceTime(unix_s=NOW, boot_id="b", since_boot_s=up_s), messages=measured)


def test_late_telemetry_is_stored_once_at_its_measurement_time(database_url: str) -> None:
    """However often it is sent; the current state does not change by it, and the device receives an acknowledgement."""
    world = FleetHarness(database_url)
    world.add("cam")
    world.birth("cam", session=5)
    world.tell("cam", 0, window("now"), session=5)
    measured = [
        telemetry(
            4,
            number,
            window("then"),
            measured_at=DeviceTime(unix_s=1.0, boot_id="b", since_boot_s=10_000.0 - 600.0 + number),
        )
        for number in range(3)
    ]
    for number in (1, 2):
        taken = world.devices.ingest([("cam", late(number, *measured))])
        assert ("cam", Ack(batch=number)) in taken.acks
    history = world.devices.history("cam")
    assert [tuple(message[key] for key in ("session", "sequence", "from_backlog", "dated")) for message in history] == [
        (4, 0, True, "age"), (4, 1, True, "age"), (4, 2, True, "age"), (5, 0, False, "now"),
    ]  # fmt: skip
    assert [message["at"] for message in history] == [NOW - 600, NOW - 599, NOW - 598, NOW]
    shown = world.shown("cam")
    assert shown["telemetry"]["session"] == 5 and (
        shown["message_sequence"]["from_backlog"],
        shown["message_sequence"]["again"],
    ) == (3, 3)


def test_telemetry_is_acknowledged_about_once_a_minute(world: FleetHarness) -> None:
    """After an acknowledgement the device deletes what was stored."""
    world.add("cam")
    world.birth("cam")
    assert world.tell("cam", 0).acks == [("cam", Ack(session=1, sequence=0))]
    assert world.tell("cam", 1).acks == []
    world.now += ACK_INTERVAL_S
    assert world.tell("cam", 2).acks == [("cam", Ack(session=1, sequence=2))]


def test_oversized_late_telemetry_is_refused_alone(world: FleetHarness) -> None:
    """A hostile device cannot store more by sending it late."""
    world.add("cam")
    world.birth("cam")
    huge = telemetry(1, 7, *(TelemetryWindow(model=f"m{n}", release="r" * 100, row="x" * 200) for n in range(100)))
    world.devices.ingest([("cam", late(1, huge, telemetry(1, 8)))])
    assert [message["sequence"] for message in world.devices.history("cam")] == [8]
    assert world.shown("cam")["message_sequence"]["refused"] == 1


def test_buckets_sum_requests_and_weight_means(database_url: str) -> None:
    """Sums of requests, means weighed by them, late ones in their own minute; each message counts once."""
    world = FleetHarness(database_url)
    world.add("cam")
    world.birth("cam")
    world.now = NOW // 3_600 * 3_600 + 100.0
    start = world.now
    world.want("cam")
    world.tell("cam", 0, window(requests=10, latency_p50_s=0.1, latency_p95_s=0.5, joules=2.0, joules_basis="measured"))
    world.tell("cam", 1, window("local", requests=30, latency_p50_s=0.2, latency_p95_s=0.3, fallbacks=3),
               power=PowerState(celsius=70.0, under_voltage=True))  # fmt: skip
    world.now += 60.0
    world.tell("cam", 2, TelemetryWindow(model="made-up", release="x", row="r", requests=1))
    old = telemetry(1, 3, window(requests=5), measured_at=DeviceTime(unix_s=1.0, boot_id="b", since_boot_s=100.0))
    world.devices.ingest(
        [("cam", Backlog(batch=1, sent_at=DeviceTime(unix_s=1.0, boot_id="b", since_boot_s=3_760.0), messages=(old,)))]
    )
    assert world.rolling.step() == 2  # what was stored a moment ago may have a neighbour that is not committed yet
    world.now += SETTLED_S + 1
    assert world.rolling.step() == 2 and world.rolling.step() == 0
    minutes = world.rolling.device_history("cam", "minute", start - 7_200, world.now)
    first, second = minutes["m"]
    assert first["requests"] == 5 and start - 3_660 <= first["at"] + 60 <= start - 3_480
    assert (second["requests"], second["fallbacks"], second["cuts"]) == (40, 3, {"cut-1": 10, "local": 30})
    assert second["latency_p50_s"] == pytest.approx(0.175) and second["latency_p95_worst_s"] == 0.5
    assert second["joules"] == 2.0
    assert minutes["(other)"][0]["requests"] == 1 and "made-up" not in minutes
    device = minutes[""][1]
    assert (device["samples"], device["under_voltage"], device["celsius_max"]) == (2, 1, 70.0)
    trend = world.rolling.fleet_history("minute", start - 7_200, world.now)
    assert [(bucket["requests"], bucket["devices"]) for bucket in trend] == [(5, 1), (40, 1), (1, 1)]
    assert trend[1]["fallbacks"] == 3 and trend[1]["latency_p95_s"] == pytest.approx(0.35)
    assert world.rolling.fleet_history("minute", start - 7_200, world.now, {"another"}) == []
    hours = world.rolling.device_history("cam", "hour", start - 7_200, world.now)
    assert [bucket["requests"] for bucket in hours["m"]] == [5, 40]
    days_and_months: tuple[Span, ...] = ("day", "month")
    for span in days_and_months:
        (whole,) = world.rolling.device_history("cam", span, start - 7_200, world.now)["m"]
        assert (whole["requests"], whole["fallbacks"], whole["cuts"]) == (45, 3, {"cut-1": 15, "local": 30})
    world.now += 8 * 86_400
    world.rolling.trim()
    assert world.rolling.device_history("cam", "minute", start - 7_200, world.now) == {}
    assert len(world.rolling.device_history("cam", "hour", start - 7_200, world.now)["m"]) == 2
    assert len(world.devices.history("cam")) == 4
    world.now += 30 * 86_400
    world.rolling.trim()
    assert world.devices.history("cam") == []
    kept: tuple[tuple[int, Span], ...] = ((100, "hour"), (1_100, "day"), (3_700, "month"))
    for days, span in kept:
        assert world.rolling.device_history("cam", span, start - 40 * 86_400, world.now) != {}, span
        world.now += days * 86_400
        world.rolling.trim()
        assert world.rolling.device_history("cam", span, start - 40 * 86_400, world.now) == {}, span


def test_model_history_is_summed_by_group_and_origin(database_url: str) -> None:
    """All devices that run a model together; an operator of one group sees that group's requests; emulated and
    simulated devices are counted apart."""
    world = FleetHarness(database_url)
    world.now = NOW // 86_400 * 86_400 + 100.0
    world.add("door-1", "door-2")
    world.add("lab-1", group="lab")
    world.want("door-1", "door-2", "lab-1")
    world.birth("door-1", "door-2")
    world.devices.ingest([("lab-1", Birth(1, 1.0, "0.2", "pi4", True, "", simulated=True))])
    for name, requests in (("door-1", 10), ("door-2", 20), ("lab-1", 5)):
        world.tell(name, 0, window(requests=requests))
    world.now += SETTLED_S + 1
    assert world.rolling.step() == 3
    span = (world.now - 7_200, world.now)
    for bucket in SPANS:
        (every,) = world.rolling.model_history("m", bucket, *span)
        (lab,) = world.rolling.model_history("m", bucket, *span, groups=["lab"])
        assert (every["requests"], lab["requests"]) == (35, 5)
        assert every["origins"] == {"emulated": 30, "simulated": 5} and lab["origins"] == {"simulated": 5}
    assert (
        world.rolling.model_history("m", "day", *span, groups=[])
        == world.rolling.model_history("other", "day", *span)
        == []
    )


def test_device_pages_have_no_gaps(world: FleetHarness) -> None:
    """Devices and open claims together by name, each once, however small a page is."""
    names = [f"cam-{number:02}" for number in range(12)]
    world.add(*names[::2])
    world.put(*(ClaimRow(
        token_sha256=name, device=name, device_class="pi4", group="yard", labels={"site": "bergen"}, link="",
        expires=NOW + 60, used=None, public_key_sha256=None,
    ) for name in names[1::2]))  # fmt: skip
    for limit in (1, 5, 12, 100):
        found: list[str] = []
        after = ""
        while True:
            page = world.listing.page(ListingQuery(limit=limit, after=after))
            some = sorted([*(device.name for device in page.devices), *(claim.device for claim in page.claims)])
            assert len(some) <= limit
            found += some
            after = page.after
            if not after:
                break
        assert found == names


def test_devices_are_filtered_by_their_attributes(database_url: str) -> None:
    """Group, label, state, part of the name, problem, release; never beyond the operator's groups."""
    world = FleetHarness(database_url)
    world.add("cam-1", "cam-2")
    world.add("yard-1", group="yard", labels={"site": "bergen"})
    world.birth("cam-1")
    world.report("cam-1", runs())
    world.tell("cam-1", power=PowerState(under_voltage=True))
    assert world.page(group="yard") == world.page(labels={"site": "bergen"}) == world.page(like="yard") == ["yard-1"]
    assert world.page(state="online") == world.page(condition="under-voltage") == world.page(model="m") == ["cam-1"]
    assert world.page(state="offline", group="door") == ["cam-2"]
    assert world.page(groups=["yard"]) == ["yard-1"] and world.page(groups=[]) == []
    assert world.page(like="%") == world.page(labels={"site": "x' OR 1=1"}) == []
    with pytest.raises(UsageError, match="no state 'dead'"):
        world.page(state="dead")


def test_a_condition_keeps_its_start_time_and_ends(world: FleetHarness) -> None:
    """Its text may change; it is over with the first message without it."""
    world.add("cam")
    world.birth("cam")
    for number, speed in enumerate((0.6, 0.5)):
        world.tell("cam", number, power=PowerState(clock_ratio=speed))
        world.now += 2.0
    (found,) = world.shown("cam")["conditions"]
    assert (found["since"], found["text"], found["current"]) == (NOW, "its CPU clock is capped at 50%", True)
    world.now += 60.0
    (found,) = world.shown("cam")["conditions"]
    assert found["current"] is False
    assert "at its last message" in condition_line(found).plain
    world.tell("cam", 2, power=PowerState(clock_ratio=1.0))
    assert world.shown("cam")["conditions"] == []


def test_a_device_with_a_new_key_starts_without_history(world: FleetHarness) -> None:
    """What the replaced hardware reported is dropped."""
    from edgesplit_controller.fleet import ingest

    world.add("cam")
    world.birth("cam")
    world.report("cam", runs())
    world.tell("cam", power=PowerState(under_voltage=True))
    with world.database.write() as session:
        ingest.delete_reported_state(session, "cam")
    assert world.shown("cam")["message_sequence"] is None and world.shown("cam")["conditions"] == []
    assert world.fleet.overview()["models"] == []


def test_an_overview_is_safe_to_print_on_a_terminal(world: FleetHarness, tmp_path: Path) -> None:
    """Also for an empty fleet, and where device names and texts contain escape sequences."""
    world.add("cam")
    world.birth("cam")
    world.report("cam", runs("failed", "no \x1b[31mroom"))
    world.tell("cam", 0, window())
    (empty := tmp_path / "empty").mkdir()
    for seen in (world.fleet.overview(), FleetHarness(new_url(empty)).fleet.overview()):
        out = console()
        with out.capture() as printed:
            out.print(overview(seen))
        assert "devices" in printed.get() and "\x1b[31m" not in printed.get()


def test_a_message_sent_late_and_live_is_stored_once(world: FleetHarness) -> None:
    """In either order, and without effect on other devices in the batch."""
    world.add("cam", "other")
    world.birth("cam", "other", session=5)
    said = telemetry(6, 3, measured_at=DeviceTime(unix_s=1.0, boot_id="b", since_boot_s=9_000.0))
    world.devices.ingest([("cam", late(1, said))])
    world.devices.ingest([("cam", said), ("other", telemetry(5, 0)), ("cam", late(2, said, said))])
    assert [(message["session"], message["sequence"]) for message in world.devices.history("cam")] == [(6, 3)]
    assert len(world.devices.history("other")) == 1


def test_release_health_is_printed_on_one_line() -> None:
    """Only known figures; those of an offline device are not current."""
    whole = {
        "model": "digits", "release": RELEASE, "active_s": 300.0, "requests": 50, "failed": 1, "fallbacks": 2,
        "latency_p95_s": 0.0123, "memory_bytes": 2**20, "drift": 0.25, "top1_agrees": False, "golden_ok": True,
        "current": False,
    }  # fmt: skip
    line = health_line(whole)
    assert line.plain.strip() == (
        "digits aaaaaaaaaaaa for 5 min: 50 requests, 1 failed, 2 fallbacks, p95 12.3 ms, 1.0 MiB of memory, "
        "drift 25.00%, another top-1, golden inputs answered"
    )
    assert line.style == "yellow"
    bare = {"model": "m", "release": "r", "active_s": 1.0, "requests": 0, "failed": 0, "fallbacks": 0}
    assert health_line(bare).plain.strip() == "m r for 1 s: 0 requests, 0 failed, 0 fallbacks"


def test_a_row_without_devices_and_requests_stood_first_in_the_overview() -> None:
    """What reports of models that are no longer assigned are counted under is listed only where it was asked for."""
    empty = {"releases": [], "cuts": [], "requests": 0, "failed": 0, "fallbacks": 0}
    fleet = {"lately_s": 900.0, "models": [{"model": "(other)", **empty}, {"model": "gone", **empty, "requests": 7}]}
    out = console()
    with out.capture() as printed:
        out.print(models_table(fleet))
    assert "(other)" not in printed.get() and "gone" in printed.get()
