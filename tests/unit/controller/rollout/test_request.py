"""Rollout options: parsed in the operators' units, bounded, and refused with the expected syntax."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import UsageError
from edgesplit_controller.rollout.request import (
    RolloutRequest,
    parse_at,
    parse_gate_after,
    parse_hours,
    parse_rollout_rate,
    parse_stages,
    parse_terms,
)
from edgesplit_controller.rollout.terms import (
    Portion,
    Rate,
    RateState,
    Terms,
    allowance,
    consume,
    rollout_order,
    split_into_stages,
    stage_sizes,
)

NOW = datetime.fromisoformat("2026-11-21T12:00:00+00:00").timestamp()


@pytest.mark.parametrize(
    ("texts", "of_20"),
    [
        ((), [20]),
        (("10%", "50%", "100%"), [2, 8, 10]),
        (("10%", "50%"), [2, 8, 10]),
        (("5",), [5, 15]),
        (("1", "10%", "20"), [1, 1, 18, 0]),
        (("0.1%",), [1, 19]),
        (("30",), [20, 0]),
    ],
)
def test_stages_grow_to_all_devices(texts: tuple[str, ...], of_20: list[int]) -> None:
    """Cumulative, at least one device each, and the last has all; a stage that adds no device is empty."""
    assert stage_sizes(parse_stages(texts), 20) == of_20


@given(st.lists(st.integers(1, 99), max_size=6, unique=True).map(sorted), st.integers(0, 200))
def test_every_device_is_in_one_stage(parts: list[int], devices: int) -> None:
    """However they are cut, none is left out and none comes twice."""
    names = [str(number) for number in range(devices)]
    stages = split_into_stages(parse_stages([f"{part}%" for part in parts]), names)
    assert [name for stage in stages for name in stage] == names


def test_the_device_order_is_a_hash_of_rollout_and_device() -> None:
    """Reproducible elsewhere: SHA-256 of `7/cam-1`."""
    import hashlib

    names = [f"cam-{number}" for number in range(20)]
    digests = {name: hashlib.sha256(f"7/{name}".encode()).hexdigest() for name in names}
    assert rollout_order(7, names) == sorted(names, key=digests.__getitem__)
    assert rollout_order(7, reversed(names), {"cam-9", "cam-8"}.__contains__)[:2] == sorted(
        ["cam-8", "cam-9"], key=digests.__getitem__
    )


def device_timeout(text: str) -> float:
    """The terms' time-out of one device."""
    return parse_terms(RolloutRequest(device_timeout=text), NOW).device_timeout_s


BAD: list[tuple[Callable[[Any], object], Any, str]] = [
    (parse_stages, ["50%", "10%"], "does not come after"),
    (parse_stages, ["0%"], "as a number of devices"),
    (parse_stages, ["101%"], "as a number of devices"),
    (parse_stages, ["1.5"], "as a number of devices"),
    (parse_stages, ["0"], "as a number of devices"),
    (parse_stages, [f"{n}%" for n in range(1, 30)], "at most 20"),
    (parse_rollout_rate, "fast", "100/min"),
    (parse_rollout_rate, "0/min", "100/min"),
    (parse_rollout_rate, "5/week", "100/min"),
    (parse_rollout_rate, "exponential", "base=5"),
    (parse_rollout_rate, "exponential:base=0", "base=5"),
    (parse_rollout_rate, "exponential:base=5,speed=3", "base=5"),
    (parse_rollout_rate, "exponential:base=5,factor=0.5", "base=5"),
    (parse_rollout_rate, "exponential:base=5,every=soon", "every: not a duration: 'soon'"),
    (device_timeout, "10", "1h30m"),
    (device_timeout, "10 minutes", "1h30m"),
    (device_timeout, "0s", "at least 1s"),
    (device_timeout, "9999d", "at most 366d"),
    (lambda text: parse_at(text, NOW), "2026-11-27T02:00", "time and zone"),
    (lambda text: parse_at(text, NOW), "tomorrow", "time and zone"),
    (lambda text: parse_at(text, NOW), "2028-11-27T02:00Z", "more than a year"),
    (parse_hours, "1-5", "01:00-05:00"),
    (parse_hours, "01:00-01:00", "01:00-05:00"),
    (parse_hours, "01:60-05:00", "01:00-05:00"),
    (parse_hours, "25:00-05:00", "01:00-05:00"),
    (parse_hours, "01:00-05:00 Mars/Base", "no time zone"),
    (parse_hours, "01:00-05:00 ../../etc/passwd", "01:00-05:00"),
    (parse_hours, "01:00-05:00 /etc/passwd", "no time zone"),
    (parse_gate_after, "0 requests", "at least one request"),
    (parse_gate_after, "soon", "gate-after: not a duration"),
]


@pytest.mark.parametrize(("parse", "text", "says"), BAD)
def test_invalid_rollout_options_are_refused_with_the_syntax(
    parse: Callable[[Any], object], text: object, says: str
) -> None:
    """A typo never becomes another rollout than intended."""
    with pytest.raises(UsageError, match=says):
        parse(text)


def test_rollout_terms_round_trip_through_the_database() -> None:
    """Every option is a value of the terms."""
    asked = RolloutRequest(
        stages=("10%", "50%"), rate="120/min", abort_when_failed="3", next_when_succeeded="95%", device_timeout="1h30m",
        timeouts_count="all", approve_stages=(2,), at="2026-11-27T02:00+01:00", between="22:30-06:00+01:00",
        gates=("p95<150ms", "errors<1%"), gate_after="20 requests / 5m", prefer="kind=lab", follow=True,
        when_failed="rollback",
    )  # fmt: skip
    terms = parse_terms(asked, NOW)
    assert terms.rate == Rate(per_s=2.0) and terms.abort_when_failed == Portion(count=3)
    assert (terms.device_timeout_s, terms.approve, terms.starts_at) == (5_400.0, (1,), 1_795_741_200.0)
    assert (terms.gates.requests, terms.gates.seconds) == (20, 300.0)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(terms)), Terms) == terms


def test_staged_and_gated_rollouts_have_a_default_failure_threshold() -> None:
    """Stages or gates without a threshold stop at five per cent; `never` switches it off; a plain deployment has
    none."""
    assert parse_terms(RolloutRequest(), NOW).abort_when_failed is None
    for careful in (RolloutRequest(stages=("10%",)), RolloutRequest(gates=("errors<1%",))):
        assert parse_terms(careful, NOW).abort_when_failed == Portion(part=0.05)
    assert parse_terms(RolloutRequest(stages=("10%",), abort_when_failed="never"), NOW).abort_when_failed is None


@pytest.mark.parametrize(
    ("hours", "at", "are", "opens"),
    [
        ("01:00-05:00", "2026-11-21T00:59:59+00:00", False, "2026-11-21T01:00:00+00:00"),
        ("01:00-05:00", "2026-11-21T01:00:00+00:00", True, "2026-11-22T01:00:00+00:00"),
        ("01:00-05:00", "2026-11-21T05:00:00+00:00", False, "2026-11-22T01:00:00+00:00"),
        ("22:30-06:00", "2026-11-21T23:00:00+00:00", True, "2026-11-22T22:30:00+00:00"),
        ("22:30-06:00", "2026-11-21T05:59:00+00:00", True, "2026-11-21T22:30:00+00:00"),
        ("01:00-05:00+02:00", "2026-11-20T23:30:00+00:00", True, "2026-11-21T23:00:00+00:00"),
        ("00:00-24:00 UTC", "2026-11-21T12:00:00+00:00", None, ""),
    ],
)
def test_hours_follow_their_time_zone(hours: str, at: str, are: bool | None, opens: str) -> None:
    """Also across midnight; a whole day is refused."""
    if are is None:
        with pytest.raises(UsageError):
            parse_hours(hours)
        return
    now = datetime.fromisoformat(at).timestamp()
    parsed = parse_hours(hours)
    assert parsed.contains(now) is are
    assert parsed.next_opening(now) == datetime.fromisoformat(opens).timestamp()


@given(
    st.sampled_from([Rate(per_s=0.5), Rate(per_s=7.0), Rate(base=3, factor=2.0, every_s=60.0)]),
    st.lists(st.floats(0.01, 30.0), min_size=1, max_size=60),
)
def test_a_rate_limit_is_never_exceeded(rate: Rate, steps: list[float]) -> None:
    """However irregularly the loop runs: a constant rate over any time but for a burst of two seconds, an exponential
    one in each of its periods."""
    pace, now, told = RateState(), 1_000.0, 0
    by_period: dict[int, int] = {}
    for seconds in steps:
        count, pace = allowance(rate, pace, now)
        pace = consume(rate, pace, count)
        told += count
        by_period[pace.period] = by_period.get(pace.period, 0) + count
        now += seconds
    if rate.base:
        assert all(count <= 3 * 2**period for period, count in by_period.items())
    else:
        assert told <= 1 + rate.per_s * (sum(steps) + 2.0)


@given(st.text(max_size=40))
def test_any_option_text_parses_or_is_a_usage_error(text: str) -> None:
    """No other exception."""
    for parse in (
        parse_rollout_rate, parse_hours, parse_gate_after, lambda one: parse_stages([one]),
        lambda one: parse_at(one, NOW), device_timeout,
    ):  # fmt: skip
        try:
            parse(text)
        except UsageError:
            continue
