"""The reported state of a device: order, age, and its difference from the desired state. Tables and properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.mqtt.messages import ModelState, PowerState, Reported, Telemetry
from edgesplit.mqtt.telemetry import BacklogState, DeviceTime, MachineState
from edgesplit_controller.fleet import conditions, device_state
from edgesplit_controller.fleet.device_state import DesiredVsReported, SequenceState

NOW = 1_800_000_000.0
DAY = 86_400.0
small = st.integers(0, 8)


@given(st.lists(st.tuples(st.integers(1, 3), small), max_size=40))
def test_telemetry_position_never_decreases(said: list[tuple[int, int]]) -> None:
    """In whatever order telemetry arrives: sessions and sequence numbers only grow, a number counts once, and missing
    is what was skipped and never came."""
    known, stored = SequenceState(), set()
    for session, sequence in said:
        before = known
        known, verdict = device_state.after_telemetry(known, session, sequence, (session, sequence) in stored)
        assert (known.session, known.sequence) >= (before.session, before.sequence) or known.session > before.session
        assert verdict == "older session" or (verdict == "duplicate") == ((session, sequence) in stored)
        if verdict != "older session":
            stored.add((session, sequence))
        else:
            assert session < known.session and known.sequence == before.sequence
    came = {sequence for session, sequence in stored if session == known.session}
    assert known.missing == known.sequence + 1 - len(came)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), max_size=30))
def test_an_outdated_report_is_ignored(said: list[tuple[int, int]]) -> None:
    """The newest session's newest report is the reported state, whatever is repeated after it."""
    known, newest = SequenceState(), (0, 0)
    for session, number in said:
        known, verdict = device_state.after_report(known, session, number)
        assert (verdict == "new") == ((session, number) > newest)
        newest = max(newest, (session, number))
        assert (known.session, known.report) == newest


def test_unnumbered_reports_are_applied_in_arrival_order() -> None:
    """Agents before this protocol send number 0."""
    known, verdict = device_state.after_report(SequenceState(session=4), 4, 0)
    assert verdict == "new" and device_state.after_report(known, 4, 0)[1] == "new"


def test_late_telemetry_fills_gaps_of_its_own_session_only() -> None:
    """Gaps of other sessions stay."""
    known, _ = device_state.after_telemetry(SequenceState(session=7), 7, 4, is_stored=False)
    assert known.missing == 4
    assert device_state.after_backlog(known, 7, 2).missing == 3
    assert device_state.after_backlog(known, 6, 2) == known
    assert device_state.after_backlog(known, 7, 9) == SequenceState(session=7, sequence=9, missing=8)


@pytest.mark.parametrize(
    ("then", "sent", "at", "dated"),
    [
        (None, None, NOW, "now"),
        (
            DeviceTime(unix_s=5.0, boot_id="b", since_boot_s=100.0),
            DeviceTime(unix_s=9.0, boot_id="b", since_boot_s=700.0),
            NOW - 600,
            "age",
        ),
        # its clock was set meanwhile, by fifty years: the one that is never set says when
        (
            DeviceTime(unix_s=5.0, boot_id="b", since_boot_s=100.0),
            DeviceTime(unix_s=NOW, boot_id="b", since_boot_s=100.5),
            NOW - 0.5,
            "age",
        ),
        # another boot: by its clock, and by how far that is off now
        (
            DeviceTime(unix_s=NOW - 500, boot_id="a", since_boot_s=9e4),
            DeviceTime(unix_s=NOW + 100, boot_id="b", since_boot_s=60.0),
            NOW - 600,
            "clock",
        ),
        # it says that it was measured after this boot, in another one: its clock was wrong
        (
            DeviceTime(unix_s=NOW, boot_id="a", since_boot_s=9e4),
            DeviceTime(unix_s=NOW, boot_id="b", since_boot_s=60.0),
            NOW - 60,
            "unsure",
        ),
        (
            DeviceTime(unix_s=NOW - 90 * DAY, boot_id="a", since_boot_s=1.0),
            DeviceTime(unix_s=NOW, boot_id="b", since_boot_s=60.0),
            NOW - 60,
            "unsure",
        ),
        (
            DeviceTime(unix_s=3.0, boot_id="a", since_boot_s=9e4),
            DeviceTime(unix_s=NOW, boot_id="b", since_boot_s=60.0),
            NOW - 60,
            "unsure",
        ),
        (
            DeviceTime(unix_s=3.0, boot_id="", since_boot_s=9e4),
            DeviceTime(unix_s=9.0, boot_id="", since_boot_s=60.0),
            NOW - 60,
            "unsure",
        ),
        (
            DeviceTime(boot_id="b", since_boot_s=1e12),
            DeviceTime(boot_id="b", since_boot_s=2e14),
            NOW - device_state.MAX_AGE_S,
            "age",
        ),
        (
            DeviceTime(boot_id="b", since_boot_s=1.0),
            DeviceTime(boot_id="c", since_boot_s=1e15),
            NOW - device_state.MAX_AGE_S,
            "unsure",
        ),
    ],
)
def test_measurement_time_prefers_the_monotonic_clock(
    then: DeviceTime | None, sent: DeviceTime | None, at: float, dated: str
) -> None:
    """The monotonic clock where it can tell, else the wall clock where that is plausible, else the time is marked
    unsure."""
    assert device_state.measured_at(then, sent, NOW) == (at, dated)


moments = st.builds(
    DeviceTime, unix_s=st.floats(0, 1e15), boot_id=st.sampled_from(["", "a", "b"]), since_boot_s=st.floats(0, 1e15)
)  # fmt: skip


@given(moments, moments)
def test_measurement_time_is_bounded(then: DeviceTime, sent: DeviceTime) -> None:
    """Neither in the future nor far in the past, whatever the device's clocks report."""
    at, _ = device_state.measured_at(then, sent, NOW)
    assert NOW - device_state.MAX_AGE_S <= at <= NOW


def compare_with(**changes: Any) -> DesiredVsReported:
    given_ = {"state": "online", "session": 9, "counter": 5, "statement_releases": frozenset({("m", "new")})}
    return DesiredVsReported(**{**given_, "reported_session": 9, "acted_upon": 5, **changes})  # type: ignore[arg-type]


def model_state(state: str, *, release: str = "old", wanted: str = "new", detail: str = "") -> Mapping[str, Any]:
    return {"model": "m", "release": release, "desired_release": wanted, "state": state, "detail": detail}


@pytest.mark.parametrize(
    ("device", "model", "reason"),
    [
        (compare_with(), model_state("running", release="new"), "as desired"),
        (compare_with(), model_state("trial", release="new"), "on trial"),
        (compare_with(), model_state("fetching"), "fetching"),
        (compare_with(), model_state("fetching", detail="waiting for the download window"), "waiting"),
        (compare_with(), model_state("staged"), "staged"),
        (compare_with(), model_state("failed", detail="no room"), "failed"),
        (compare_with(), model_state("rolled back", detail="golden input"), "rolled back"),
        (compare_with(), model_state("safe mode"), "safe mode"),
        (compare_with(), model_state("running", release="old", wanted="old"), "not applied"),
        (compare_with(), None, "not applied"),
        (compare_with(acted_upon=4), model_state("running", release="new"), "not applied"),
        (compare_with(acted_upon=4, statement_problem="expired"), model_state("running"), "refused"),
        (compare_with(state="stale"), model_state("running", release="new"), "stale"),
        (compare_with(state="offline"), model_state("running", release="new"), "offline"),
        (compare_with(state="offline"), None, "offline"),
        (compare_with(reported_session=8), model_state("running", release="new"), "older session"),
        (compare_with(statement_releases=frozenset()), model_state("running"), "not published"),
    ],
)
def test_each_desired_reported_difference_has_a_reason(
    device: DesiredVsReported, model: Mapping[str, Any] | None, reason: str
) -> None:
    """An offline device never counts as converged, whatever it reported last."""
    found = device_state.find_differences({"m": "new"}, [model] if model else [], device)
    assert [item.kind for item in found] == [reason]


def test_a_model_no_longer_desired_is_unwanted() -> None:
    """It stays listed until the device has stopped it."""
    (found,) = device_state.find_differences({}, [model_state("running", wanted="")], compare_with())
    assert (found.kind, found.running, found.desired) == ("not desired", "old", "")


def test_facts_of_a_dead_device_are_not_current() -> None:
    """Facts of an earlier session are not current either."""
    for state, session, current in (("online", 9, True), ("online", 8, False), ("offline", 9, False)):
        found = device_state.fact({"session": session}, 5.0, state=state, session=9)  # type: ignore[arg-type]
        assert found is not None and (found.current, found.at) == (current, 5.0)
    assert device_state.fact(None, None, state="online", session=9) is None


def telemetry(**more: Any) -> Telemetry:
    return Telemetry(
        session=1, sequence=1, emulated=False, up_bytes_per_s=1.0, rtt_s=0.0, remote_usable=True, models=(), **more
    )


@pytest.mark.parametrize(
    ("message", "clock", "kinds"),
    [
        (telemetry(), None, set()),
        (
            telemetry(power=PowerState(), machine=MachineState(disk_free_bytes=10**10, disk_bytes=3 * 10**10)),
            5.0,
            set(),
        ),
        (telemetry(power=PowerState(under_voltage=True)), 0.0, {"under-voltage"}),
        (telemetry(power=PowerState(under_voltage_since_boot=True)), 0.0, {"under-voltage"}),
        (telemetry(power=PowerState(clock_ratio=0.6, celsius=84.0)), 0.0, {"throttled"}),
        (telemetry(machine=MachineState(disk_free_bytes=10**8, disk_bytes=3 * 10**10)), 0.0, {"low disk"}),
        (telemetry(machine=MachineState(memory_free_bytes=10**6, memory_bytes=10**9)), 0.0, {"low memory"}),
        (telemetry(), -3_600.0, {"clock wrong"}),
        (
            telemetry(statement_counter=3, statement_expires=50, measured_at=DeviceTime(unix_s=51.0)),
            0.0,
            {"stale metadata"},
        ),
        (telemetry(backlog=BacklogState(dropped_idle=3)), 0.0, {"telemetry dropped"}),
    ],
)
def test_problems_in_telemetry_are_detected(message: Telemetry, clock: float | None, kinds: set[str]) -> None:
    """Each kind has advice."""
    found = conditions.from_telemetry(message, clock)
    assert set(found) == kinds and kinds <= set(conditions.REMEDIES)


def test_problems_in_a_report_are_detected() -> None:
    """Safe mode hides all others; a failure names model, release and reason; a refused statement is a kind of its
    own."""
    failed = ModelState("m", "old", "new" * 10, "rolled back", "its own part failed")
    assert set(conditions.from_report(Reported(1, 1, (failed,), statement_problem="expired"))) == {
        "failing release",
        "refused",
    }
    assert set(conditions.from_report(Reported(1, 1, (failed,), safe_mode="three starts"))) == {"safe mode"}
    assert conditions.from_report(Reported(1, 1, (ModelState("m", "r", "r", "running"),))) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("no room for release 0123456789ab: 5.5 GB", "no room for release fedcba987654: 12 GB"),
        ("golden input: output 'prob' is not what", "golden input: output 'y' is not what"),
        ("Its own part failed 5 times", "its own  part failed 7 times"),
    ],
)
def test_equal_failures_have_equal_causes_across_devices(one: str, other: str) -> None:
    """The cause leaves out digests, numbers and names."""
    assert (
        conditions.normalise_cause(one)
        == conditions.normalise_cause(other)
        != conditions.normalise_cause("something else")
    )


@given(st.text(max_size=2_000))
def test_a_cause_is_truncated_and_printable(text: str) -> None:
    """Whatever text a device sends."""
    found = conditions.normalise_cause(text)
    assert 0 < len(found) <= conditions.MAX_TEXT_CHARS and found.isprintable()
