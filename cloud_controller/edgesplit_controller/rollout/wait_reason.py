"""What a rollout waits for, in one line for people. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone

from edgesplit_controller.rollout.states import Rollout, Tally
from edgesplit_controller.rollout.terms import spell_s


def waits_for(rollout: Rollout, tallies: Mapping[int, Tally], now: float) -> str:
    """Empty for one that has ended."""
    if rollout.has_ended:
        return ""
    if rollout.state == "scheduled":
        return f"{moment(rollout.terms.starts_at)}, in {spell_s(max(1.0, rollout.terms.starts_at - now))}"
    if rollout.state == "waiting":
        return f"approval of stage {rollout.stage + 2}: `edgectl rollout approve {rollout.id}`"
    if rollout.state == "paused":
        return f"an operator: `edgectl rollout resume {rollout.id}`"
    count = _count(tallies)
    if rollout.state in ("aborting", "rolling back"):
        return f"devices to go back: {sum(tally.open for tally in tallies.values())}"
    return "; ".join(_running(rollout, tallies, count, now))


def _running(rollout: Rollout, tallies: Mapping[int, Tally], count: Mapping[str, int], now: float) -> list[str]:
    parts = []
    queued = sum(tally.states.get("queued", 0) for stage, tally in tallies.items() if stage <= rollout.stage)
    hours = rollout.terms.hours
    if queued and hours is not None and not hours.are_now(now):
        parts.append(f"the hours {hours}, in {spell_s(max(1.0, hours.next_opening(now) - now))}, for {queued} devices")
    elif queued:
        parts.append(f"{queued} devices to be told" + (f" at {rollout.terms.rate}" if rollout.terms.rate else ""))
    told = [f"{count[state]} {word}" for state, word in WORDS if count.get(state)]
    if told:
        parts.append(f"devices: {', '.join(told)}")
    return parts or (["devices that come to be meant"] if rollout.following else [])


WORDS = (("told", "told"), ("fetching", "fetching"), ("trial", "on trial"))


def _count(tallies: Mapping[int, Tally]) -> Counter[str]:
    total: Counter[str] = Counter()
    for tally in tallies.values():
        total.update({str(state): count for state, count in tally.states.items()})
    return total


def moment(at: float) -> str:
    """Unix seconds as a moment in UTC, to the second."""
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
