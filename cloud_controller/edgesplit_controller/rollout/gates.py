"""What a release must prove on a device before it may go further: gates, what is known, and the verdict. All pure.

    p95<150ms   errors<1%   fallbacks<10%   memory<400MB   celsius<80   joules<0.5   drift<1%

Golden inputs are a gate that is always there. Rates and times are judged once enough requests were answered; a rate
that is over its bound already, however many good answers follow, fails at once. When the time for judging is up, what
is known by then counts, and a gate of which nothing is known passes on that device and says so (`Verdict.unjudged`): a
stage in which no device at all could judge a gate is the rollout's to stop.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec

from edgesplit.errors import UsageError

Subject = Literal["p95", "errors", "fallbacks", "memory", "celsius", "joules", "drift"]
MOST_GATES = 16
GOLDEN = "golden"
UNITS: Mapping[Subject, Mapping[str, float]] = {
    "p95": {"ms": 1e-3, "s": 1.0, "us": 1e-6},
    "errors": {"%": 1e-2},
    "fallbacks": {"%": 1e-2},
    "memory": {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30},
    "celsius": {"": 1.0, "c": 1.0},
    "joules": {"": 1.0, "j": 1.0, "mj": 1e-3},
    "drift": {"%": 1e-2},
}
EXAMPLES: Mapping[Subject, str] = {
    "p95": "p95<150ms", "errors": "errors<1%", "fallbacks": "fallbacks<10%", "memory": "memory<400MB",
    "celsius": "celsius<80", "joules": "joules<0.5", "drift": "drift<1%",
}  # fmt: skip
BY_REQUESTS: frozenset[Subject] = frozenset({"p95", "errors", "fallbacks", "joules"})
"""Gates that need requests to be judged by."""


class Gate(msgspec.Struct, frozen=True):
    """One bound: what is measured must stay below it."""

    subject: Subject
    below: float
    """In seconds, bytes, degrees Celsius, joules, or as a part of one."""
    text: str
    """As it was asked for."""


class Gates(msgspec.Struct, frozen=True):
    """All that is asked of a release on one device."""

    gates: tuple[Gate, ...] = ()
    requests: int = 50
    """Answers that make enough evidence."""
    seconds: float = 600.0
    """After so long on a device, what is known by then counts."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one release on one device since it began to run there. None: not known."""

    model: str
    """Its name, without a version."""
    release: str
    requests: int | None = None
    """Answered; those that failed come on top."""
    failed: int | None = None
    fallbacks: int | None = None
    latency_p95_s: float | None = None
    memory_bytes: int | None = None
    """Of the processes that run it."""
    celsius: float | None = None
    """The hottest since."""
    joules: float | None = None
    """Per answer."""
    drift: float | None = None
    """The largest relative difference of outputs to those of the release that ran before, over the golden inputs."""
    golden_ok: bool | None = None
    """The golden inputs gave the answers they must give."""
    since_s: float | None = None
    """Seconds that it has run there."""


class Verdict(msgspec.Struct, frozen=True):
    """What the gates say of one release on one device."""

    state: Literal["pass", "fail", "wait"]
    why: str = ""
    """Which gate failed, or what is still waited for; for people."""
    gate: str = ""
    """The gate that failed, as it was asked for: failures are grouped by it."""
    unjudged: tuple[str, ...] = ()
    """Gates that passed because nothing was known when the time was up."""


def parse_gate(text: str) -> Gate:
    """The gate that was spelt; UsageError says what was not understood."""
    found = re.fullmatch(r"\s*([a-z0-9]+)\s*(<=?)\s*(\d{1,12}(?:\.\d{1,9})?|\.\d{1,9})\s*([a-z%]*)\s*", text.lower())
    subject = found[1] if found else re.split(r"[^a-z0-9]", text.strip().lower())[0]
    known = [name for name in get_args(Subject) if name == subject]
    if not known:
        raise UsageError(f"gate {text[:60]!r}: not one of {', '.join(get_args(Subject))}, as in p95<150ms")
    name: Subject = known[0]
    if not found or found[2] != "<" or found[4] not in UNITS[name]:
        raise UsageError(f"gate {text[:60]!r}: write it as in {EXAMPLES[name]}")
    below = float(found[3]) * UNITS[name][found[4]]
    if not below:
        raise UsageError(f"gate {text[:60]!r}: nothing is below zero, so no release could pass it")
    return Gate(name, below, "".join(text.split()))


def parse_gates(texts: Sequence[str], *, requests: int = 50, seconds: float = 600.0) -> Gates:
    """Several of them, each subject once."""
    if len(texts) > MOST_GATES:
        raise UsageError(f"{len(texts)} gates, at most {MOST_GATES}")
    gates = tuple(parse_gate(text) for text in texts)
    subjects = [gate.subject for gate in gates]
    if twice := sorted({subject for subject in subjects if subjects.count(subject) > 1}):
        raise UsageError(f"two gates for {', '.join(twice)}: give one")
    return Gates(gates, requests, seconds)


def judge(gates: Gates, evidence: Evidence) -> Verdict:
    """Whether the release may stay: a sure failure at once, a pass once there is enough evidence, else it waits."""
    if evidence.golden_ok is False:
        return Verdict("fail", "its golden inputs give other answers than they must", GOLDEN)
    over = next((gate for gate in gates.gates if _is_over(gate, gates, evidence)), None)
    if over is not None:
        return Verdict("fail", f"{over.text}: it is {told(over, _surely(over, gates, evidence))}", over.text)
    unknown = tuple(gate.text for gate in gates.gates if _value(gate.subject, evidence) is None)
    enough = _asked(evidence) >= gates.requests or not _needs_requests(gates)
    if (evidence.since_s or 0.0) >= gates.seconds or (enough and not unknown):
        return Verdict("pass", unjudged=unknown)
    left_s = gates.seconds - (evidence.since_s or 0.0)
    missing = f"{_asked(evidence)} of {gates.requests} requests" if not enough else f"for {', '.join(unknown)}"
    return Verdict("wait", f"{missing}, {left_s:.0f} s left")


def told(gate: Gate, value: float | None) -> str:
    """A measured value for people, in the unit that the gate was asked in."""
    if value is None:
        return "unknown"
    asked = re.search(r"[a-z%]*$", gate.text, re.IGNORECASE)
    unit = asked[0] if asked else ""
    figure = value / UNITS[gate.subject].get(unit.lower(), 1.0)
    if unit == "%":
        return f"{figure:.3g} %"
    shown = f"{figure:.4g}" if figure < 10_000 else f"{figure:.0f}"
    return f"{shown} {'°C' if gate.subject == 'celsius' else unit or 'J'}"


def _asked(evidence: Evidence) -> int:
    return (evidence.requests or 0) + (evidence.failed or 0)


def _needs_requests(gates: Gates) -> bool:
    return any(gate.subject in BY_REQUESTS for gate in gates.gates)


def _is_over(gate: Gate, gates: Gates, evidence: Evidence) -> bool:
    value = _surely(gate, gates, evidence)
    return value is not None and value >= gate.below


def _surely(gate: Gate, gates: Gates, evidence: Evidence) -> float | None:
    """The value that counts now: a rate over the requests that will at least have been answered when it is judged, so
    that the first failure of a device says no more than it means; times and joules once there is enough to go by."""
    value = _value(gate.subject, evidence)
    if gate.subject not in BY_REQUESTS or value is None:
        return value
    requests = _asked(evidence)
    time_is_up = (evidence.since_s or 0.0) >= gates.seconds
    if gate.subject in ("errors", "fallbacks"):
        return value if time_is_up else value * requests / max(requests, gates.requests)
    return value if time_is_up or requests >= gates.requests else None


def _value(subject: Subject, evidence: Evidence) -> float | None:
    """What the gate measures; None where it is not known."""
    if subject in ("errors", "fallbacks"):
        count = evidence.failed if subject == "errors" else evidence.fallbacks
        asked = _asked(evidence)
        return count / asked if asked and count is not None else None
    if subject in ("p95", "joules") and not evidence.requests:
        return None
    known: Mapping[str, float | None] = {
        "p95": evidence.latency_p95_s, "memory": evidence.memory_bytes, "celsius": evidence.celsius,
        "joules": evidence.joules, "drift": evidence.drift,
    }  # fmt: skip
    return known[subject]
