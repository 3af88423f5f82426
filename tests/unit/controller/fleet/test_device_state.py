"""What may be believed of a device: order, age, and why it is not as it should be. Tables and properties."""

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
def test_what_is_heard_never_goes_back_in_time(said: list[tuple[int, int]]) -> None:
    """Whatever the order in which telemetry comes: sessions and sequences only grow, a number counts once, and what is
    missing is what was skipped and did not come."""
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
def test_a_report_that_comes_late_changes_nothing(said: list[tuple[int, int]]) -> None:
    """The newest session's newest report is what is known, whatever is repeated after it."""
    known, newest = SequenceState(), (0, 0)
    for session, number in said:
        known, verdict = device_state.after_report(known, session, number)
        assert (verdict == "new") == ((session, number) > newest)
        newest = max(newest, (session, number))
        assert (known.session, known.report) == newest


def test_agents_that_number_no_reports_are_taken_as_they_come() -> None:
    """Number 0, as agents before this protocol send it."""
    known, verdict = device_state.after_report(SequenceState(session=4), 4, 0)
    assert verdict == "new" and device_state.after_report(known, 4, 0)[1] == "new"


def test_late_telemetry_fills_gaps_of_the_session_it_is_of() -> None:
    """And of no other."""
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
def test_when_something_was_measured(then: DeviceTime | None, sent: DeviceTime | None, at: float, dated: str) -> None:
    """By the clock that is never set where it can tell, by the other where that is plausible, else marked unsure."""
    assert device_state.measured_at(then, sent, NOW) == (at, dated)


moments = st.builds(
    DeviceTime, unix_s=st.floats(0, 1e15), boot_id=st.sampled_from(["", "a", "b"]), since_boot_s=st.floats(0, 1e15)
)  # fmt: skip


@given(moments, moments)
def test_a_device_dates_nothing_into_the_future_or_the_deep_past(then: DeviceTime, sent: DeviceTime) -> None:
    """Whatever its clocks say."""
    at, _ = device_state.measured_at(then, sent, NOW)
    assert NOW - device_state.MAX_AGE_S <= at <= NOW


def told(**changes: Any) -> DesiredVsReported:
    given_ = {"state": "online", "session": 9, "counter": 5, "statement_releases": frozenset({("m", "new")})}
    return DesiredVsReported(**{**given_, "reported_session": 9, "acted_upon": 5, **changes})  # type: ignore[arg-type]


def said(state: str, *, release: str = "old", wanted: str = "new", detail: str = "") -> Mapping[str, Any]:
    return {"model": "m", "release": release, "desired_release": wanted, "state": state, "detail": detail}


@pytest.mark.parametrize(
    ("device", "model", "reason"),
    [
        (told(), said("running", release="new"), "as desired"),
        (told(), said("trial", release="new"), "on trial"),
        (told(), said("fetching"), "fetching"),
        (told(), said("fetching", detail="waiting for the download window"), "waiting"),
        (told(), said("staged"), "staged"),
        (told(), said("failed", detail="no room"), "failed"),
        (told(), said("rolled back", detail="golden input"), "rolled back"),
        (told(), said("safe mode"), "safe mode"),
        (told(), said("running", release="old", wanted="old"), "not applied"),
        (told(), None, "not applied"),
        (told(acted_upon=4), said("running", release="new"), "not applied"),
        (told(acted_upon=4, statement_problem="expired"), said("running"), "refused"),
        (told(state="stale"), said("running", release="new"), "stale"),
        (told(state="offline"), said("running", release="new"), "offline"),
        (told(state="offline"), None, "offline"),
        (told(reported_session=8), said("running", release="new"), "older session"),
        (told(statement_releases=frozenset()), said("running"), "not published"),
    ],
)
def test_each_difference_has_its_reason(
    device: DesiredVsReported, model: Mapping[str, Any] | None, reason: str
) -> None:
    """A device that is gone is never said to be as wanted, whatever it said last."""
    found = device_state.find_differences({"m": "new"}, [model] if model else [], device)
    assert [one.kind for one in found] == [reason]


def test_what_nobody_wants_any_more_is_unwanted() -> None:
    """Until the device has stopped it."""
    (found,) = device_state.find_differences({}, [said("running", wanted="")], told())
    assert (found.kind, found.running, found.desired) == ("not desired", "old", "")


def test_a_dead_devices_facts_are_not_current() -> None:
    """Neither are those of a session before this one."""
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
def test_what_telemetry_says_is_wrong(message: Telemetry, clock: float | None, kinds: set[str]) -> None:
    """And each kind has a word on what to do."""
    found = conditions.from_telemetry(message, clock)
    assert set(found) == kinds and kinds <= set(conditions.REMEDIES)


def test_what_a_report_says_is_wrong() -> None:
    """Safe mode says it all; a failure names model, release and reason; disobeying a statement is another thing."""
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
def test_the_same_failure_has_the_same_cause_everywhere(one: str, other: str) -> None:
    """Without digests, numbers and names."""
    assert (
        conditions.normalise_cause(one)
        == conditions.normalise_cause(other)
        != conditions.normalise_cause("something else")
    )


@given(st.text(max_size=2_000))
def test_a_cause_is_bounded_and_printable(text: str) -> None:
    """Whatever a device writes there."""
    found = conditions.normalise_cause(text)
    assert 0 < len(found) <= conditions.MAX_TEXT_CHARS and found.isprintable()
