"""What devices count of answers that may have changed: summed once by release, shown with its interval, bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from edgesplit.errors import MalformedMessage
from edgesplit.limits import LIMITS
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import (
    CASCADE_CHANGED,
    Backlog,
    CascadeCounts,
    ReportedCondition,
    StillCounts,
    Telemetry,
    TelemetryWindow,
)
from edgesplit.mqtt.telemetry import MOST_SCORE, DeviceTime
from edgesplit.observability.registry import MetricRegistry
from edgesplit_cli.views.device import audit_lines
from edgesplit_controller.fleet.audits import (
    MOST_COUNT,
    audits_view,
    measured_share,
    sums_of,
    with_running_shares,
    with_window,
)
from edgesplit_controller.history.buckets import bucket_view, content_of_window, merged
from edgesplit_controller.observability.metrics import record_ingest
from edgesplit_controller.storage.tables.core import Event
from edgesplit_partitioner.bounds.binomial import lower_share, upper_share
from support.device_fleet import NOW, OTHER, RELEASE, FleetHarness, new_url, runs, telemetry

CASCADE = CascadeCounts(
    sure=70, escalated=25, unsure=5, audited=10, changed=1, unaudited=2, threshold=0.8, allowed=0.02,
    answered={"small": 75, "large": 25},
)  # fmt: skip
STILL = StillCounts(repeated=40, audited_same=4, changed=0, allowed=0.01)


def window(release: str = RELEASE, cascade: CascadeCounts | None = CASCADE, still: StillCounts | None = None) -> Any:
    return TelemetryWindow(model="m", release=release, row="small:local", requests=100, cascade=cascade, still=still)


@pytest.fixture
def world(tmp_path: Path) -> FleetHarness:
    world = FleetHarness(new_url(tmp_path))
    world.add("cam")
    world.birth("cam")
    world.report("cam", runs())
    return world


def shown(world: FleetHarness) -> Any:
    (found,) = world.shown("cam")["audits"]
    return found


def test_each_window_counts_once_whenever_it_arrives(world: FleetHarness) -> None:
    """Live, again, out of order, and late from the backlog."""
    world.tell("cam", 1, window())
    world.tell("cam", 1, window())
    world.tell("cam", 0, window())
    late = telemetry(1, 7, window(), measured_at=DeviceTime(unix_s=NOW))
    for batch in (1, 2):
        world.devices.ingest([("cam", Backlog(batch=batch, sent_at=DeviceTime(unix_s=NOW), messages=(late,)))])
    cascade = shown(world)["cascade"]
    assert (cascade["sure"], cascade["escalated"], cascade["unsure"], cascade["unaudited"]) == (210, 75, 15, 6)
    assert cascade["answered"] == {"small": 225, "large": 75} and cascade["threshold"] == 0.8
    assert (cascade["audited"], cascade["changed"], cascade["share"]) == (30, 3, 0.1)
    assert cascade["at_least"] == lower_share(3, 30, 0.05) and cascade["at_most"] == upper_share(3, 30, 0.05)


def test_metrics_count_what_was_stored_once(world: FleetHarness) -> None:
    """By model, who answered and what the audits found; a message that comes again adds nothing."""
    ledger = MetricRegistry()
    for _ in range(2):
        record_ingest(ledger, world.tell("cam", 0, window(still=STILL), window(OTHER)), 0.01)
    counted = {
        (series.family, *series.labels): series.value for series in ledger.series() if series.labels[:1] == ("m",)
    }
    names = {
        "cascade_answers_total": {"sure": 70, "escalated": 25, "unsure": 5},
        "cascade_audits_total": {"same": 9, "changed": 1, "unaudited": 2},
        "repeat_audits_total": {"same": 4, "changed": 0, "unaudited": 0},
    }
    for name, by_outcome in names.items():
        for outcome, count in by_outcome.items():
            assert counted[f"edgesplit_controller_{name}", "m", outcome] == count
    assert counted["edgesplit_controller_cascade_alarms_total", "m"] == 0
    assert counted["edgesplit_controller_repeated_total", "m"] == 40
    assert counted["edgesplit_controller_repeat_alarms_total", "m"] == 0


def test_a_history_has_what_was_measured_so_far(world: FleetHarness) -> None:
    """Each bucket with the audits of it and of those before it; those without a cascade have none."""
    empty = content_of_window({"requests": 3})
    with_both = content_of_window(msgspec.to_builtins(window(still=STILL)))
    buckets = [
        bucket_view(60.0 * number, "minute", dict(each)) for number, each in enumerate((empty, with_both, with_both))
    ]
    first, second, third = with_running_shares(buckets)
    assert "cascade_measured" not in first and "still_measured" not in first
    assert second["cascade_measured"] == measured_share(10, 1) and second["still_measured"] == measured_share(4, 0)
    assert third["cascade_measured"] == measured_share(20, 2) and third["still_measured"]["audited"] == 8
    assert third["cascade"] == second["cascade"] and third["at"] == 120.0


def test_another_release_begins_its_own_sums(world: FleetHarness) -> None:
    """What the previous one counted is gone with it; windows of releases that do not run here do not count."""
    world.tell("cam", 0, window(), window(OTHER))
    assert shown(world)["cascade"]["audited"] == 10
    world.report("cam", runs("running", "", OTHER), number=2)
    assert [entry["release"] for entry in world.shown("cam")["audits"]] in ([], [RELEASE])
    world.tell("cam", 1, window(OTHER, still=STILL))
    (found,) = (entry for entry in world.shown("cam")["audits"])
    assert found["still"]["audited"] == 4 and found["still"]["repeated"] == 40


def test_a_device_without_cascades_has_no_sums(world: FleetHarness) -> None:
    """Nor one whose agent is older."""
    world.tell("cam", 0, window(cascade=None))
    assert world.shown("cam")["audits"] == []


def test_a_cascade_that_escalates_everything_has_no_threshold(world: FleetHarness) -> None:
    """After too many alarms; the newest window says so."""
    world.tell("cam", 0, window())
    world.tell("cam", 1, window(cascade=CascadeCounts(escalated=10, alarms=3, threshold=MOST_SCORE, allowed=0.02)))
    cascade = shown(world)["cascade"]
    assert cascade["threshold"] is None and cascade["alarms"] == 3
    assert "escalates every request" in "\n".join(audit_lines(shown(world)))


def test_hostile_counts_are_bounded() -> None:
    """Sums stay exact integers, names stay few, and what no message may state is refused whole."""
    most = CascadeCounts(sure=MOST_COUNT, audited=MOST_COUNT, changed=MOST_COUNT, answered={"a": MOST_COUNT})
    stored = None
    for number in range(40):
        names = {f"v{number}-{place}": 1 for place in range(LIMITS.variants - 1)}
        hostile = messages.decode(
            messages.encode(telemetry(1, number, window(cascade=most), window(cascade=CascadeCounts(answered=names)))),
            Telemetry,
        )
        for one in hostile.models:
            stored = with_window(stored, one, (RELEASE, ""))
    sums = sums_of(stored, RELEASE)
    assert sums is not None and sums.cascade is not None
    assert sums.cascade.sure == MOST_COUNT and len(sums.cascade.answered) <= LIMITS.variants
    assert audits_view(sums)["cascade"]["share"] == 1.0
    impossible: tuple[dict[str, Any], ...] = (
        {"sure": -1}, {"audited": 2**53 + 1}, {"allowed": float("nan")}, {"threshold": float("inf")},
        {"answered": {"v" * 81: 1}}, {"answered": {f"v{n}": 1 for n in range(LIMITS.variants + 1)}},
    )  # fmt: skip
    for fields in impossible:
        with pytest.raises(MalformedMessage):
            messages.decode(messages.encode(telemetry(1, 0, window(cascade=CascadeCounts(**fields)))), Telemetry)


def test_history_adds_counts_and_keeps_the_strictest_threshold() -> None:
    """Of minutes into hours, of devices into a fleet; a bucket of other models has none of it."""
    contents = [
        content_of_window(msgspec.to_builtins(one))
        for one in (window(), window(cascade=CascadeCounts(sure=5, threshold=0.9, allowed=0.02), still=STILL))
    ]
    both = bucket_view(0.0, "hour", merged(contents[0], contents[1]))
    assert both["cascade"]["sure"] == 75 and both["cascade"]["audited"] == 10 and both["cascade_threshold_max"] == 0.9
    assert both["answered"] == {"small": 75, "large": 25} and both["still"]["repeated"] == 40
    assert both["cascade_allowed_max"] == 0.02 and both["still_allowed_max"] == 0.01
    assert "cascade" not in content_of_window(msgspec.to_builtins(window(cascade=None)))


def test_a_cascade_that_changed_is_a_condition_with_a_remedy_and_an_event(world: FleetHarness) -> None:
    """As long as the device reports it."""
    text = "m: 9 of 112 audited answers differ, 2 % allowed: threshold 0.8 to 0.85"
    world.tell("cam", 0, window(), conditions=(ReportedCondition(CASCADE_CHANGED, text),))
    (condition,) = world.shown("cam")["conditions"]
    assert (condition["kind"], condition["text"]) == ("cascade changed", text) and "newer samples" in condition[
        "remedy"
    ]
    with world.database.read() as session:
        assert [row.detail["text"] for row in session.query(Event).filter_by(what="device.cascade_changed")] == [text]
    world.tell("cam", 1, window())
    assert world.shown("cam")["conditions"] == []


def test_the_page_of_a_device_says_what_was_promised_and_measured(world: FleetHarness) -> None:
    """Who answered, what is escalated, and audits beside the allowance."""
    world.tell("cam", 0, window(still=STILL))
    lines = [line.strip() for line in audit_lines(shown(world))]
    assert lines == [
        "m answered by small 75, large 25; 5 answers unsure",
        "m escalates scores below 0.8: 25.0% so far",
        "m cascade: allowed 2.0%, 1 of 10 audited differed (0.5% to 39.4%, 90 % sure), 2 unaudited",
        "m still frames: 40 repeated; allowed 1.0%, 0 of 4 audited differed (0.0% to 52.7%, 90 % sure), 0 unaudited",
    ]
