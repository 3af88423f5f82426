"""Back-off between the connections of a session."""

from __future__ import annotations

from edgesplit.mqtt.session import RECONNECT, ReconnectBackoff

WHOLE = 1.0
"""Jitter that leaves a pause as it is."""


def test_reconnection_backs_off_and_resets_after_a_connection() -> None:
    """Twice the pause for each failed attempt in a row; the shortest after a connection that was accepted."""
    backoff = ReconnectBackoff()
    grown = [backoff.next_s(WHOLE, was_connected=False) for _ in range(3)]
    assert grown == [RECONNECT.pause_s(failures) for failures in (1, 2, 3)]
    assert backoff.next_s(WHOLE, was_connected=True) == RECONNECT.first_s
    assert backoff.next_s(WHOLE, was_connected=False) == RECONNECT.pause_s(1)


def test_session_that_was_taken_over_waits_longest() -> None:
    """Two sessions of one name would disconnect each other in turn; it still waits longest when the next attempt
    fails."""
    backoff = ReconnectBackoff()
    assert backoff.next_s(WHOLE, was_connected=True, taken_over=True) == RECONNECT.longest_s
    assert backoff.next_s(WHOLE, was_connected=False) == RECONNECT.longest_s
    assert backoff.next_s(WHOLE, was_connected=True) == RECONNECT.first_s
