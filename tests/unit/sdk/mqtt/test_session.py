"""Pauses between the connections of a session."""

from __future__ import annotations

from edgesplit.mqtt.session import RECONNECT, ReconnectBackoff

WHOLE = 1.0
"""Jitter that leaves a pause as it is."""


def test_pauses_grow_while_the_broker_accepts_nothing_and_start_again_after_a_connection() -> None:
    """Twice the pause for each failed attempt in a row; the shortest after a connection that was accepted."""
    backoff = ReconnectBackoff()
    grown = [backoff.next_s(WHOLE, was_connected=False) for _ in range(3)]
    assert grown == [RECONNECT.pause_s(failures) for failures in (1, 2, 3)]
    assert backoff.next_s(WHOLE, was_connected=True) == RECONNECT.first_s
    assert backoff.next_s(WHOLE, was_connected=False) == RECONNECT.pause_s(1)


def test_two_sessions_of_one_name_do_not_disconnect_each_other_in_turn() -> None:
    """A session that was taken over waits longest, and still does when the next attempt fails."""
    backoff = ReconnectBackoff()
    assert backoff.next_s(WHOLE, was_connected=True, taken_over=True) == RECONNECT.longest_s
    assert backoff.next_s(WHOLE, was_connected=False) == RECONNECT.longest_s
    assert backoff.next_s(WHOLE, was_connected=True) == RECONNECT.first_s
