"""What a rollout waits for, as one line for people (pure functions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgesplit.quantities import format_duration
from edgesplit_controller.fleet.connection_state import format_time
from edgesplit_controller.rollout.states import Rollout, Tally, count_states

MAX_NAMED = 5
"""Offline devices that are named."""


def reason_to_wait(
    rollout: Rollout, tallies: Mapping[int, Tally], now: float, offline: Sequence[str] = (), offline_count: int = 0
) -> str:
    """What the rollout waits for; empty if it has ended. `offline` names some of the `offline_count` devices that it
    waits for and that are offline."""
    if rollout.has_ended:
        return ""
    if rollout.state == "scheduled":
        return f"{format_time(rollout.terms.starts_at)}, in {format_duration(max(1.0, rollout.terms.starts_at - now))}"
    if rollout.state == "waiting":
        return f"approval of stage {rollout.stage + 2}: `edgectl rollout approve {rollout.id}`"
    if rollout.state == "paused":
        return f"an operator: `edgectl rollout resume {rollout.id}`"
    count = count_states(tallies.values())
    if rollout.state in ("aborting", "rolling back"):
        parts = [f"devices to roll back: {sum(tally.open for tally in tallies.values())}"]
    else:
        parts = _reasons_while_running(rollout, tallies, count, now)
    if offline_count:
        more = f" and {offline_count - MAX_NAMED} more" if offline_count > MAX_NAMED else ""
        named = ", ".join(offline[:MAX_NAMED])
        parts.append(f"offline, until {'they return' if offline_count > 1 else 'it returns'}: {named}{more}")
    return "; ".join(parts)


def _reasons_while_running(
    rollout: Rollout, tallies: Mapping[int, Tally], count: Mapping[str, int], now: float
) -> list[str]:
    parts = []
    queued = sum(tally.states.get("queued", 0) for stage, tally in tallies.items() if stage <= rollout.stage)
    hours = rollout.terms.hours
    if queued and hours is not None and not hours.contains(now):
        parts.append(
            f"the hours {hours}, in {format_duration(max(1.0, hours.next_opening(now) - now))}, for {queued} devices"
        )
    elif queued:
        parts.append(f"{queued} devices to be assigned" + (f" at {rollout.terms.rate}" if rollout.terms.rate else ""))
    progress = [f"{count[state]} {word}" for state, word in STATE_LABELS if count.get(state)]
    if progress:
        parts.append(f"devices: {', '.join(progress)}")
    return parts or (["devices that match its targets later"] if rollout.following else [])


STATE_LABELS = (("assigned", "assigned"), ("fetching", "fetching"), ("trial", "on trial"))
