"""How long a request waits for the offload target before the device starts its local tail. Pure arithmetic.

There are two reasons to start the tail. The deadline: nothing overrules it. An early hedge: waiting on would probably
cost more time than it saves. An early hedge spends energy, so the caller decides whether a budget for it exists and
passes `early_s` only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from edgesplit_agent.policy.completion_time import CompletionTime

MIN_OFFLOAD_WAIT_S = 0.25
"""Minimum wait for the offload target in seconds, unless the deadline or an early hedge demands less."""
DELIVERY_MARGIN_S = 0.03
"""Seconds before the deadline that are reserved for delivering the answer."""
TAIL_FACTOR = 1.2
"""Safety factor: the local tail may take this many times its expected duration and still meet the deadline."""
MAX_SLOWDOWN_VS_LOCAL = 1.05
"""An offloaded request should take at most this many times what it would have taken on the device alone."""
REQUIRED_PROBABILITY = 0.98
"""Default probability with which the offload target must answer within `MAX_SLOWDOWN_VS_LOCAL`; below it the tail
starts early."""

LIKELY_PROBABILITY = 0.5
"""If the answer arrives before the latest start of the tail with no more than this probability, the tail starts at
once."""


def latest_tail_start_s(left_s: float, tail_s: float, margin_s: float = DELIVERY_MARGIN_S) -> float:
    """Seconds from now until the latest start at which the tail, slower than expected by TAIL_FACTOR, still meets the
    deadline, `left_s` seconds from now; negative where that has passed."""
    return left_s - tail_s * TAIL_FACTOR - margin_s


def offload_timeout_s(
    left_s: float,
    tail_s: float | None,
    predicted_s: float,
    margin_s: float = DELIVERY_MARGIN_S,
    early_s: float | None = None,
) -> float:
    """Seconds to wait for the offload target from now on; 0 means: start the local tail at once, beside the offload.

    - `left_s`: seconds until the deadline.
    - `tail_s`: seconds to finish locally; None if the device cannot.
    - `predicted_s`: seconds the plan predicts for link and server in current conditions.
    - `early_s`: upper bound on the wait, where an early hedge is wanted and may be paid for.

    Without `early_s` the wait is about as long as finishing locally takes, so that an offload that never answers at
    most doubles the time of the request (the ski-rental argument, docs/decisions/0025-deciding.md).
    """
    if tail_s is None:  # no alternative: wait until just before the deadline
        return max(0.0, left_s - margin_s)
    by_deadline_s = latest_tail_start_s(left_s, tail_s, margin_s)
    # Ski rental: waiting as long as the tail takes at most doubles the cost of a wrong choice. The wait is clamped to
    # 1.5 to 3 times the prediction: earlier would hedge offloads that are on time, later would gain nothing.
    wait_s = max(MIN_OFFLOAD_WAIT_S, min(3.0 * predicted_s, max(1.5 * predicted_s, tail_s)))
    return max(0.0, min(by_deadline_s, wait_s if early_s is None else min(wait_s, early_s)))


def early_hedge_s(
    completion: CompletionTime,
    local_s: float,
    sent_s: float,
    tail_s: float,
    required_probability: float = REQUIRED_PROBABILITY,
) -> float | None:
    """Seconds after sending at which the tail should start so that the request takes at most `MAX_SLOWDOWN_VS_LOCAL`
    times `local_s`, what it would have taken on the device; None if the offload target is sure enough to answer before
    that.

    - `completion`: distribution of the time to the offloaded answer, counted from the beginning of the request.
    - `sent_s`: seconds from the beginning of the request until it was sent.
    - `tail_s`: seconds to finish locally what was sent away.
    - `required_probability`: probability with which the offload target must meet the bound.
    """
    bound_s = MAX_SLOWDOWN_VS_LOCAL * local_s
    # Sure enough to answer within the bound: no tail is needed for this reason.
    if completion.probability_by(bound_s) >= required_probability:
        return None
    # The tail must start by `latest_s` to end within the bound. If the answer will probably be there before, wait that
    # long; if not, waiting only delays the tail, so it starts at once.
    latest_s = max(0.0, bound_s - sent_s - tail_s)
    return latest_s if completion.probability_by(sent_s + latest_s) > LIKELY_PROBABILITY else 0.0


def slices_duration_s(
    slices: Iterable[str], measured: Mapping[str, float], predicted: Mapping[str, float], slowdown: float
) -> float:
    """Seconds that the named slices take on this device: the measured time where there is one, else prediction times
    slowdown."""
    return sum(measured[name] if name in measured else predicted.get(name, 0.0) * slowdown for name in slices)
