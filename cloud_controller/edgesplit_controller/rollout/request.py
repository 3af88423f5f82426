"""What an operator writes about a rollout, and the terms that are meant. Pure; UsageError says what was not understood.

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
from edgesplit_controller.fleet.selector import parse_selector
from edgesplit_controller.rollout.gates import Gates, parse_gates
from edgesplit_controller.rollout.terms import MOST_DEVICES, MOST_STAGES, Hours, Portion, Rate, Terms, zone_of

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
LONGEST_S = 366 * 86_400.0
ABORT_WHEN_FAILED = Portion(part=0.05)
"""Of a rollout in stages or with gates, where nothing else was said."""


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rollout as it is written; all of it may be left out."""

    stages: tuple[str, ...] = ()
    rate: str = ""
    abort_when_failed: str = ""
    """`never` for however many fail."""
    next_when_succeeded: str = ""
    device_timeout: str = ""
    timeouts_count: str = "heard"
    approve: bool = False
    """Before each stage."""
    approve_stages: tuple[int, ...] = ()
    """Before these, counted from 1."""
    at: str = ""
    between: str = ""
    gates: tuple[str, ...] = ()
    gate_after: str = ""
    prefer: str = ""
    follow: bool = False
    when_failed: str = "stay"
    unless_busy: bool = False
    """Refuse where another rollout of the model is on its way to one of the devices."""


PLAIN = Asked()
"""All devices at once."""


def terms_of(asked: Asked, now: float) -> Terms:
    """The terms that were asked for, whole and in bounds."""
    stages = parse_stages(asked.stages)
    gates = _gates(asked)
    staged = len(stages) > 1 or bool(asked.gates)
    careful = staged or bool(asked.abort_when_failed) or asked.when_failed == "rollback"
    if asked.prefer:
        parse_selector(asked.prefer)
    timeout_s = parse_duration(asked.device_timeout, "the device time-out") if asked.device_timeout else 86_400.0
    return Terms(
        stages=stages,
        rate=parse_rollout_rate(asked.rate) if asked.rate else None,
        abort_when_failed=_abort(asked.abort_when_failed, staged),
        next_when_succeeded=_portion(asked.next_when_succeeded, "success threshold")
        if asked.next_when_succeeded
        else None,
        device_timeout_s=timeout_s,
        timeouts_count=_one_of(asked.timeouts_count, ("never", "heard", "all"), "time-outs count"),  # type: ignore[arg-type]
        approve=_approvals(asked, len(stages)),
        starts_at=parse_at(asked.at, now) if asked.at else 0.0,
        hours=parse_hours(asked.between) if asked.between else None,
        gates=gates,
        prefer=asked.prefer,
        follow=asked.follow,
        send_back=careful,
        when_failed=_one_of(asked.when_failed, ("stay", "rollback"), "when failed"),  # type: ignore[arg-type]
    )


def parse_stages(texts: Sequence[str]) -> tuple[Portion, ...]:
    """Cumulative, growing, and the last is 100 %, whether it was written or not."""
    stages = [_portion(text, "stage") for text in texts]
    whole = Portion(part=1.0)
    if not stages or stages[-1] != whole:
        stages.append(whole)
    if len(stages) > MOST_STAGES:
        raise UsageError(f"{len(stages)} stages, at most {MOST_STAGES}")
    for before, after in pairwise(stages):
        both = (before.part, after.part) if before.part and after.part else (before.count, after.count)
        if both[0] is not None and both[1] is not None and both[0] >= both[1]:
            raise UsageError(f"stage {after} does not come after {before}: stages grow, as in 10%, 50%, 100%")
    return tuple(stages)


def parse_rollout_rate(text: str) -> Rate:
    """`100/min`, or `exponential:base=5,factor=2,every=10m`."""
    constant = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*/\s*(s|m|min|h|d)\s*", text)
    if constant and float(constant[1]):
        return Rate(per_s=float(constant[1]) / UNITS[constant[2]])
    kind, _, rest = text.strip().partition(":")
    given = (word.partition("=") for word in re.split(r"[,\s]+", rest) if word)
    words: dict[str, str] = {name: value for name, _, value in given}
    base, factor = words.get("base", ""), words.get("factor", "2")
    good = kind == "exponential" and set(words) <= {"base", "factor", "every"}
    good = good and re.fullmatch(r"\d{1,5}", base) is not None and int(base or 0) > 0
    good = good and re.fullmatch(r"\d{1,3}(\.\d{1,3})?", factor) is not None and 1 <= float(factor) <= 100
    if not good:
        raise UsageError(f"rate {text[:60]!r}: write it as in 100/min or exponential:base=5,factor=2,every=10m")
    return Rate(base=int(base), factor=float(factor), every_s=parse_duration(words.get("every", "10m"), "every"))


def parse_duration(text: str, what: str) -> float:
    """`45s`, `30m`, `1h30m`, `2d`, in seconds."""
    parts = re.findall(r"(\d{1,6}(?:\.\d{1,3})?)\s*(min|[smhd])", text)
    seconds = sum(float(count) * UNITS[unit] for count, unit in parts)
    spelt = "".join(text.split()) == "".join(count + unit for count, unit in parts)
    if not (spelt and 1 <= seconds <= LONGEST_S):
        raise UsageError(f"{what} {text[:40]!r}: write it as in 30m, 12h or 1h30m, from one second to a year")
    return seconds


def parse_at(text: str, now: float) -> float:
    """A moment with its time zone, at most a year ahead; one that is past is now."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise UsageError(f"--at {text[:40]!r}: write date, time and zone, as in 2026-11-27T02:00+01:00 (Z for UTC)")
    at = moment.timestamp()
    if at > now + LONGEST_S:
        raise UsageError(f"--at {text[:40]!r}: that is more than a year ahead")
    return at


def parse_hours(text: str) -> Hours:
    """`01:00-05:00`, in UTC, with an offset (`+01:00`) or in a zone of the time zone database (`Europe/Oslo`)."""
    found = re.fullmatch(r"\s*(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*([A-Za-z0-9_/+:-]{0,60})\s*", text)
    numbers = [int(part) for part in found.groups()[:4]] if found else [99, 0, 0, 0]
    begin, end = numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]
    if not found or max(numbers[1], numbers[3]) > 59 or max(begin, end) > 1_440 or begin % 1_440 == end % 1_440:
        raise UsageError(f"hours {text[:60]!r}: write them as in 01:00-05:00, with a time zone as in +01:00 if not UTC")
    zone = found[5] or "UTC"
    try:
        zone_of(zone)
    except (KeyError, ValueError, OSError) as error:
        raise UsageError(f"hours {text[:60]!r}: no time zone {zone!r} here; write an offset, as in +01:00") from error
    return Hours(begin % 1_440, end % 1_440, zone)


def parse_gate_after(text: str) -> tuple[int, float]:
    """How much evidence is enough: `50 requests / 10m`, or one of the two."""
    requests, seconds = 50, 600.0
    for part in re.split(r"[/,]", text):
        if found := re.fullmatch(r"\s*(\d{1,7})\s*(?:requests?)?\s*", part):
            requests = int(found[1])
        else:
            seconds = parse_duration(part.strip(), "gate-after")
    if not requests:
        raise UsageError(f"gate-after {text[:40]!r}: nothing is proved by no request")
    return requests, seconds


def _gates(asked: Asked) -> Gates:
    requests, seconds = parse_gate_after(asked.gate_after) if asked.gate_after else (50, 600.0)
    return parse_gates(asked.gates, requests=requests, seconds=seconds)


def _abort(text: str, staged: bool) -> Portion | None:
    if not text:
        return ABORT_WHEN_FAILED if staged else None
    return None if text == "never" else _portion(text, "abort threshold")


def _portion(text: str, what: str) -> Portion:
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*(%?)\s*", text)
    if found and found[2] and 0 < float(found[1]) <= 100:
        return Portion(part=float(found[1]) / 100)
    if found and not found[2] and found[1].isdigit() and 0 < int(found[1]) <= MOST_DEVICES:
        return Portion(count=int(found[1]))
    raise UsageError(f"{what} {text[:40]!r}: write it as in 10% or as a number of devices (at most {MOST_DEVICES})")


def _approvals(asked: Asked, stages: int) -> tuple[int, ...]:
    if asked.approve:
        return tuple(range(stages))
    for stage in asked.approve_stages:
        if not 1 <= stage <= stages:
            raise UsageError(f"there is no stage {stage} to approve: there are {stages}, counted from 1")
    return tuple(sorted({stage - 1 for stage in asked.approve_stages}))


def _one_of(text: str, known: tuple[str, ...], what: str) -> str:
    if text not in known:
        raise UsageError(f"{what} {text[:40]!r}: one of {', '.join(known)}")
    return text
