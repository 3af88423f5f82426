"""Delays for who guesses, on a clock moved by hand."""

from __future__ import annotations

from edgesplit_controller.access.login_throttle import CALM_S, FREE, LONGEST_S, Failures, Trickle, delay_s, place_of
from edgesplit_controller.access.request_limits import ADDRESSES, RateLimit


def test_the_delay_doubles_up_to_a_minute_and_is_forgotten() -> None:
    """A few for nothing, then 1, 2, 4 s and so on; after a quarter of an hour of calm all begins anew."""
    now = [0.0]
    failures = Failures(lambda: now[0])
    delays = [failures.failed("10.0.0.1") for _ in range(FREE + 9)]
    assert delays == [0.0] * FREE + [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, LONGEST_S, LONGEST_S, LONGEST_S]
    assert failures.failed("10.0.0.2") == 0.0
    failures.succeeded("10.0.0.1")
    assert failures.failed("10.0.0.1") == 0.0
    for _ in range(FREE + 1):
        failures.failed("10.0.0.3")
    now[0] += CALM_S + 1
    assert failures.failed("10.0.0.3") == 0.0
    assert delay_s(10**9) == LONGEST_S


def test_places_beyond_number_are_forgotten() -> None:
    """Memory is bounded, whoever tries from wherever."""
    failures = Failures(lambda: 0.0)
    for number in range(ADDRESSES + 50):
        failures.failed(str(number))
    assert len(failures._counted) == ADDRESSES


def test_one_host_is_one_place() -> None:
    """Of IPv6 a host has 2^64 addresses."""
    assert place_of("2001:db8::1") == place_of("2001:db8::ffff:1") != place_of("2001:db8:0:1::1")
    assert place_of("10.0.0.1") == place_of("::ffff:10.0.0.1") != place_of("10.0.0.2")
    assert place_of("?") == "?"


def test_what_is_held_back_is_counted_and_told_with_the_next() -> None:
    """For one place, and for many that each stay below."""
    now = [0.0]

    def limit(burst: int) -> RateLimit:
        return RateLimit(per_s=1.0, burst=burst, now=lambda: now[0])

    trickle = Trickle(limit(2), limit(4))
    assert [trickle.let_through("a") for _ in range(5)] == [0, 0, None, None, None]
    assert [trickle.let_through(place) for place in "bcde"] == [3, 0, None, None]
    now[0] += 1.0
    assert trickle.let_through("f") == 2
