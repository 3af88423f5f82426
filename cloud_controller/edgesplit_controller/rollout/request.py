"""Parses the rollout options that an operator writes into terms (pure functions). UsageError names the part that is not
understood.

    --canary 10% --then 50% --then 100%     --rate 100/min     --rate exponential:base=5,factor=2,every=10m
    --at 2026-11-27T02:00+01:00             --between 01:00-05:00     --between "22:30-06:00 Europe/Oslo"
    --gate p95<150ms                        --gate-after "50 requests / 10m"     --device-timeout 30m
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise

import msgspec

from edgesplit.errors import UsageError
from edgesplit.quantities import ABOVE_ZERO, DAY_S, parse_daily_span, parse_duration, parse_frequency, parse_percentage
from edgesplit_controller.fleet.selector import parse_selector
from edgesplit_controller.rollout.gates import Gates, parse_gates
from edgesplit_controller.rollout.terms import MOST_DEVICES, MOST_STAGES, Hours, Portion, Rate, Terms, parse_zone

LONGEST_S = 366 * DAY_S
ABORT_WHEN_FAILED = Portion(part=0.05)
"""Default failure threshold of a rollout in stages or with gates."""


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout as an operator requests it; every field is optional."""

    stages: tuple[str, ...] = ()
    rate: str = ""
    abort_when_failed: str = ""
    """`never`: continue however many devices fail."""
    next_when_succeeded: str = ""
    device_timeout: str = ""
    timeouts_count: str = "heard"
    approve: bool = False
    """Wait for approval before each stage."""
    approve_stages: tuple[int, ...] = ()
    """Stages that wait for approval, counted from 1."""
    at: str = ""
    between: str = ""
    gates: tuple[str, ...] = ()
    gate_after: str = ""
    prefer: str = ""
    follow: bool = False
    when_failed: str = "stay"
    unless_busy: bool = False
    """Refuse if another rollout of the model includes one of the devices."""


ALL_AT_ONCE = RolloutRequest()
"""A rollout to all devices at once."""


def parse_terms(request: RolloutRequest, now: float) -> Terms:
    """The complete, validated terms of a request."""
    stages = parse_stages(request.stages)
    gates = _parse_gates(request)
    staged = len(stages) > 1 or bool(request.gates)
    sends_back = staged or bool(request.abort_when_failed) or request.when_failed == "rollback"
    if request.prefer:
        parse_selector(request.prefer)
    timeout_s = _parse_duration(request.device_timeout, "device-timeout") if request.device_timeout else DAY_S
    return Terms(
        stages=stages,
        rate=parse_rollout_rate(request.rate) if request.rate else None,
        abort_when_failed=_parse_failure_threshold(request.abort_when_failed, staged),
        next_when_succeeded=_parse_portion(request.next_when_succeeded, "success threshold")
        if request.next_when_succeeded
        else None,
        device_timeout_s=timeout_s,
        timeouts_count=_parse_choice(request.timeouts_count, ("never", "heard", "all"), "time-outs count"),  # type: ignore[arg-type]
        approve=_parse_approvals(request, len(stages)),
        starts_at=parse_at(request.at, now) if request.at else 0.0,
        hours=parse_hours(request.between) if request.between else None,
        gates=gates,
        prefer=request.prefer,
        follow=request.follow,
        send_back=sends_back,
        when_failed=_parse_choice(request.when_failed, ("stay", "rollback"), "when failed"),  # type: ignore[arg-type]
    )


def parse_stages(texts: Sequence[str]) -> tuple[Portion, ...]:
    """Stages, cumulative and increasing; 100 % is added as the last if it was not given."""
    stages = [_parse_portion(text, "stage") for text in texts]
    whole = Portion(part=1.0)
    if not stages or stages[-1] != whole:
        stages.append(whole)
    if len(stages) > MOST_STAGES:
        raise UsageError(f"{len(stages)} stages, at most {MOST_STAGES}")
    for before, after in pairwise(stages):
        sizes = (before.part, after.part) if before.part and after.part else (before.count, after.count)
        if sizes[0] is not None and sizes[1] is not None and sizes[0] >= sizes[1]:
            raise UsageError(f"stage {after} does not come after {before}: stages grow, as in 10%, 50%, 100%")
    return tuple(stages)


def parse_rollout_rate(text: str) -> Rate:
    """Parse `100/min`, or `exponential:base=5,factor=2,every=10m`."""
    kind, _, rest = text.strip().partition(":")
    if kind != "exponential":
        try:
            return Rate(per_s=parse_frequency(text))
        except UsageError as error:
            raise UsageError(f"{error}, or exponential:base=5,factor=2,every=10m") from error
    pairs = (word.partition("=") for word in re.split(r"[,\s]+", rest) if word)
    fields: dict[str, str] = {name: value for name, _, value in pairs}
    base, factor = fields.get("base", ""), fields.get("factor", "2")
    is_valid = set(fields) <= {"base", "factor", "every"}
    is_valid = is_valid and re.fullmatch(r"\d{1,5}", base) is not None and int(base or 0) > 0
    is_valid = is_valid and re.fullmatch(r"\d{1,3}(\.\d{1,3})?", factor) is not None and 1 <= float(factor) <= 100
    if not is_valid:
        raise UsageError(f"not a rate: {text[:60]!r} (as in 100/min or exponential:base=5,factor=2,every=10m)")
    return Rate(base=int(base), factor=float(factor), every_s=_parse_duration(fields.get("every", "10m"), "every"))


def _parse_duration(text: str, what: str) -> float:
    try:
        return parse_duration(text, least=1.0, most=LONGEST_S)
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from error


def parse_at(text: str, now: float) -> float:
    """Parse a time with its time zone into Unix seconds, at most a year ahead. A time in the past means at once."""
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        parsed = None
    if parsed is None or parsed.tzinfo is None:
        raise UsageError(f"--at {text[:40]!r}: write date, time and zone, as in 2026-11-27T02:00+01:00 (Z for UTC)")
    at = parsed.timestamp()
    if at > now + LONGEST_S:
        raise UsageError(f"--at {text[:40]!r}: that is more than a year ahead")
    return at


def parse_hours(text: str) -> Hours:
    """Parse `01:00-05:00`, in UTC, with an offset (`+01:00`), or in a zone of the time zone database
    (`Europe/Oslo`)."""
    match = re.fullmatch(r"([0-9:\s]+-[0-9:\s]+)([A-Za-z_/+-][A-Za-z0-9_/+:-]{0,59})?\s*", text)
    try:
        begin, end = parse_daily_span(match[1] if match else text)
    except UsageError as error:
        raise UsageError(f"{error}; in UTC, or followed by a time zone as in 01:00-05:00+01:00") from error
    zone = (match and match[2]) or "UTC"
    try:
        parse_zone(zone)
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(f"hours {text[:60]!r}: no time zone {zone!r} here; write an offset, as in +01:00") from error
    return Hours(begin, end, zone)


def parse_gate_after(text: str) -> tuple[int, float]:
    """Parse how much evidence is enough, `50 requests / 10m` or one of the two, into (requests, seconds)."""
    requests, seconds = 50, 600.0
    for part in re.split(r"[/,]", text):
        if match := re.fullmatch(r"\s*(\d{1,7})\s*(?:requests?)?\s*", part):
            requests = int(match[1])
        else:
            seconds = _parse_duration(part, "gate-after")
    if not requests:
        raise UsageError(f"gate-after {text[:40]!r}: a gate needs at least one request")
    return requests, seconds


def _parse_gates(request: RolloutRequest) -> Gates:
    requests, seconds = parse_gate_after(request.gate_after) if request.gate_after else (50, 600.0)
    return parse_gates(request.gates, requests=requests, seconds=seconds)


def _parse_failure_threshold(text: str, staged: bool) -> Portion | None:
    if not text:
        return ABORT_WHEN_FAILED if staged else None
    return None if text == "never" else _parse_portion(text, "abort threshold")


def _parse_portion(text: str, what: str) -> Portion:
    if re.fullmatch(r"\s*[0-9]{1,6}\s*", text) and 0 < int(text) <= MOST_DEVICES:
        return Portion(count=int(text))
    try:
        return Portion(part=parse_percentage(text, least=ABOVE_ZERO))
    except UsageError as error:
        raise UsageError(f"{what}: {error}, or as a number of devices (at most {MOST_DEVICES})") from error


def _parse_approvals(request: RolloutRequest, stages: int) -> tuple[int, ...]:
    if request.approve:
        return tuple(range(stages))
    for stage in request.approve_stages:
        if not 1 <= stage <= stages:
            raise UsageError(f"there is no stage {stage} to approve: there are {stages}, counted from 1")
    return tuple(sorted({stage - 1 for stage in request.approve_stages}))


def _parse_choice(text: str, known: tuple[str, ...], what: str) -> str:
    if text not in known:
        raise UsageError(f"{what} {text[:40]!r}: one of {', '.join(known)}")
    return text
