"""Login delays after failed attempts, with a manual clock."""

from __future__ import annotations

from edgesplit_controller.access.login_throttle import (
    DELAY,
    FREE_FAILURES,
    RESET_AFTER_S,
    EntryLimiter,
    FailureCounter,
    client_key,
    delay_s,
)
from edgesplit_controller.access.request_limits import MAX_CLIENTS, RateLimit


def test_login_delay_doubles_up_to_a_minute_and_resets() -> None:
    """The first failures cost no delay, later ones 1, 2, 4 s and so on; after a quarter of an hour without a failure
    the count starts again."""
    now = [0.0]
    failures = FailureCounter(lambda: now[0])
    delays = [failures.on_failure("10.0.0.1") for _ in range(FREE_FAILURES + 9)]
    assert delays == [0.0] * FREE_FAILURES + [
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
        DELAY.longest_s,
        DELAY.longest_s,
        DELAY.longest_s,
    ]
    assert failures.on_failure("10.0.0.2") == 0.0
    failures.on_success("10.0.0.1")
    assert failures.on_failure("10.0.0.1") == 0.0
    for _ in range(FREE_FAILURES + 1):
        failures.on_failure("10.0.0.3")
    now[0] += RESET_AFTER_S + 1
    assert failures.on_failure("10.0.0.3") == 0.0
    assert delay_s(10**9) == DELAY.longest_s


def test_number_of_remembered_clients_is_bounded() -> None:
    """The oldest clients are evicted, so that failed logins from many addresses cannot fill the memory."""
    failures = FailureCounter(lambda: 0.0)
    for client in ["first", "second"] * FREE_FAILURES:
        failures.on_failure(client)
    for number in range(MAX_CLIENTS - 1):  # "second" stays, "first" is evicted
        failures.on_failure(str(number))
    assert failures.on_failure("second") > 0
    assert failures.on_failure("first") == 0


def test_addresses_of_one_ipv6_network_are_one_client() -> None:
    """One host has 2^64 IPv6 addresses."""
    assert client_key("2001:db8::1") == client_key("2001:db8::ffff:1") != client_key("2001:db8:0:1::1")
    assert client_key("10.0.0.1") == client_key("::ffff:10.0.0.1") != client_key("10.0.0.2")
    assert client_key("?") == "?"


def test_suppressed_log_lines_are_counted_in_the_next_one() -> None:
    """Per client, and for many clients that each stay below the limit."""
    now = [0.0]

    def limit(burst: int) -> RateLimit:
        return RateLimit(per_s=1.0, burst=burst, now=lambda: now[0])

    trickle = EntryLimiter(limit(2), limit(4))
    assert [trickle.try_pass("a") for _ in range(5)] == [0, 0, None, None, None]
    assert [trickle.try_pass(place) for place in "bcde"] == [3, 0, None, None]
    now[0] += 1.0
    assert trickle.try_pass("f") == 2
