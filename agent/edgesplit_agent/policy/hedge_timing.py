"""How long a request waits for the cloud before the device starts finishing it alone. Pure arithmetic.

Two reasons to start: the deadline, which nothing overrules; and haste, where waiting on would probably cost more than
it saves. Haste spends energy, so whoever calls says whether there is a budget for it (`early_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgesplit_agent.policy.completion_time import Odds

LEAST_S = 0.25
"""The cloud is never given up sooner than this unless the deadline or haste asks for it."""
MARGIN_S = 0.03
"""Kept back from the deadline for handing the answer over."""
TAIL_FACTOR = 1.2
"""The tail is allowed to take this much longer than expected and still meet the deadline."""
NO_WORSE = 1.05
"""A request that is sent away takes at most so many times what it would have taken here..."""
SURE = 0.98
"""...with this probability; where the cloud does not promise it, the tail starts early."""

LIKELY = 0.5
"""Where it is less likely than this that the answer comes before the tail must start, it starts at once."""


def patience_s(
    left_s: float,
    tail_s: float | None,
    predicted_s: float,
    margin_s: float = MARGIN_S,
    early_s: float | None = None,
) -> float:
    """Seconds to wait for the cloud from now on; 0 means: start the tail at once, beside the cloud.

    `left_s` is what is left until the deadline, `tail_s` what finishing locally takes (None: the device cannot),
    `predicted_s` what the plan expects of link and cloud in today's conditions. `early_s`: no longer than this, where
    haste is wanted and may be paid for. Else the cloud is waited for about as long as finishing alone would take, so
    that one which never comes costs at most as much again.
    """
    if tail_s is None:
        return max(0.0, left_s - margin_s)
    by_deadline_s = left_s - tail_s * TAIL_FACTOR - margin_s
    wait_s = max(LEAST_S, min(3.0 * predicted_s, max(1.5 * predicted_s, tail_s)))
    return max(0.0, min(by_deadline_s, wait_s if early_s is None else min(wait_s, early_s)))


def haste_s(odds: Odds, local_s: float, sent_s: float, tail_s: float, sure: float = SURE) -> float | None:
    """Seconds after sending at which the tail should start, so that the request takes no longer than `NO_WORSE` times
    what it would have taken here (`local_s`); None where the cloud is sure enough to answer before that.

    `odds` are those of the whole request, `sent_s` what has passed when it was sent.
    """
    bound_s = NO_WORSE * local_s
    if odds.within(bound_s) >= sure:
        return None
    latest_s = max(0.0, bound_s - sent_s - tail_s)
    return latest_s if odds.within(sent_s + latest_s) > LIKELY else 0.0


def tail_s(
    slices: Iterable[str], measured: Mapping[str, float], predicted: Mapping[str, float], slowdown: float
) -> float:
    """Seconds the named slices take on this device: as measured here, else as predicted times the slow-down."""
    return sum(measured[name] if name in measured else predicted.get(name, 0.0) * slowdown for name in slices)
