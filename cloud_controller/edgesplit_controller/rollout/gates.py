"""Health gates of a release: bounds, the evidence from a device, and the verdict (pure functions).

    p95<150ms   errors<1%   fallbacks<10%   memory<400MB   celsius<80   joules<0.5   drift<1%
    accuracy>97%   agreement>99%   changed<2%

Golden pairs are a gate that always applies. Accuracy and agreement are shares of golden inputs whose answer is known:
by a label, or as the base of a variant (of other models, the whole model) gives it. Rates and times are judged once
enough requests were answered; a rate that is certain to exceed its bound, however many good answers follow, fails at
once. Changed answers are judged by audits (`audits`), those of all devices of the rollout together. When the time for
judging is over, the evidence so far decides, and a gate without evidence passes on that device and is reported
(`Verdict.unjudged`). A stage in which no device could judge a gate is stopped by the rollout.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, get_args

import msgspec

from edgesplit.errors import UsageError
from edgesplit.quantities import ABOVE_ZERO, DURATION, ENERGY, PERCENTAGE, SIZE, Quantity
from edgesplit_controller.rollout.audits import AuditCounts, audits_needed, is_exceeded

Subject = Literal[
    "p95", "errors", "fallbacks", "memory", "celsius", "joules", "drift", "accuracy", "agreement", "changed"
]
MOST_GATES = 16
MOST_SHARE = 0.9999
"""Largest bound of a gate of answers: what must exceed all of them cannot be kept."""
GOLDEN = "golden"
QUANTITIES: Mapping[Subject, Quantity] = {
    "p95": DURATION, "errors": PERCENTAGE, "fallbacks": PERCENTAGE, "memory": replace(SIZE, synonyms={}),
    "celsius": Quantity("temperature", {"C": 1.0}, "80 or 80C", {"": 1.0}),
    "joules": replace(ENERGY, synonyms={"": 1.0}), "drift": PERCENTAGE, "accuracy": PERCENTAGE, "agreement": PERCENTAGE,
    "changed": PERCENTAGE,
}  # fmt: skip
"""The quantity that each subject is bounded by. A size needs its unit: memory<400 is more likely 400 MB than bytes."""
EXAMPLES: Mapping[Subject, str] = {
    "p95": "p95<150ms", "errors": "errors<1%", "fallbacks": "fallbacks<10%", "memory": "memory<400MB",
    "celsius": "celsius<80", "joules": "joules<0.5", "drift": "drift<1%",
    "accuracy": "accuracy>97%", "agreement": "agreement>99%", "changed": "changed<2%",
}  # fmt: skip
OF_ANSWERS: frozenset[Subject] = frozenset({"accuracy", "agreement"})
"""Gates that a share of golden answers must exceed: what is compared is the share that is missing from all."""
NEED_REQUESTS: frozenset[Subject] = frozenset({"p95", "errors", "fallbacks", "joules"})
"""Gates that need a number of requests as evidence."""


class Gate(msgspec.Struct, frozen=True):
    """One bound: the measured value must stay below it."""

    subject: Subject
    below: float
    """In seconds, bytes, degrees Celsius or joules, or a ratio; for `OF_ANSWERS` the share that may be missing."""
    text: str
    """The gate as the operator wrote it."""


class Gates(msgspec.Struct, frozen=True):
    """All gates that a release must pass on one device."""

    gates: tuple[Gate, ...] = ()
    requests: int = 50
    """Number of requests that is enough evidence."""
    seconds: float = 600.0
    """After so many seconds on a device, the evidence so far decides."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one release on one device since it began to run there. None: unknown."""

    model: str
    """The model's name, without a version."""
    release: str
    requests: int | None = None
    """Requests answered, not counting failed ones."""
    failed: int | None = None
    fallbacks: int | None = None
    latency_p95_s: float | None = None
    memory_bytes: int | None = None
    """Memory of the processes that run the release."""
    celsius: float | None = None
    """Highest temperature since."""
    joules: float | None = None
    """Energy per answer."""
    drift: float | None = None
    """Largest relative difference of outputs from those of the previous release, over the golden inputs."""
    inaccuracy: float | None = None
    """Share of wrong answers to golden inputs whose class is known."""
    disagreement: float | None = None
    """Share of answers to golden inputs that differ from those of the model that it stands in for."""
    golden_ok: bool | None = None
    """Whether the golden inputs gave the expected outputs."""
    audits: tuple[AuditCounts, ...] = ()
    """Audited answers of the cascade, and of still frames, on all devices of the rollout."""
    active_s: float | None = None
    """Seconds for which the release has run."""


class Verdict(msgspec.Struct, frozen=True):
    """Result of the gates for one release on one device."""

    state: Literal["pass", "fail", "wait"]
    reason: str = ""
    """Which gate failed, or what evidence is missing; for people."""
    gate: str = ""
    """The failed gate as the operator wrote it; failures are grouped by it."""
    unjudged: tuple[str, ...] = ()
    """Gates that passed because there was no evidence when the time was over."""


def parse_gate(text: str) -> Gate:
    """Parse one gate; UsageError names the part that is not understood."""
    match = re.fullmatch(r"\s*([a-z0-9]+)\s*([<>]?)(.*)", text.lower(), re.DOTALL)
    known = [gate_subject for gate_subject in get_args(Subject) if match and gate_subject == match[1]]
    if not match or not known:
        raise UsageError(f"gate {text[:60]!r}: not one of {', '.join(get_args(Subject))}, as in p95<150ms")
    gate_subject: Subject = known[0]
    try:
        is_share = gate_subject in OF_ANSWERS
        most = MOST_SHARE if is_share or gate_subject == "changed" else sys.float_info.max
        is_written = match[2] == (">" if is_share else "<")
        value = QUANTITIES[gate_subject].parse(match[3] if is_written else "", least=ABOVE_ZERO, most=most)
    except UsageError as error:
        raise UsageError(f"gate {text[:60]!r}: write it as in {EXAMPLES[gate_subject]}; {error}") from error
    return Gate(gate_subject, 1.0 - value if is_share else value, "".join(text.split()))


def parse_gates(texts: Sequence[str], *, requests: int = 50, seconds: float = 600.0) -> Gates:
    """Parse several gates; UsageError if two have one subject, or there are too many."""
    if len(texts) > MOST_GATES:
        raise UsageError(f"{len(texts)} gates, at most {MOST_GATES}")
    gates = tuple(parse_gate(text) for text in texts)
    subjects = [gate.subject for gate in gates]
    if twice := sorted({subject for subject in subjects if subjects.count(subject) > 1}):
        raise UsageError(f"two gates for {', '.join(twice)}: give one")
    return Gates(gates, requests, seconds)


def gates_of_answers(gates: Gates) -> frozenset[Subject]:
    """The gates that need golden inputs that say what the answer should be."""
    return OF_ANSWERS.intersection(gate.subject for gate in gates.gates)


def gate_of_audits(gates: Gates) -> Gate | None:
    """The gate that audits of changed answers decide; None where there is none."""
    return next((gate for gate in gates.gates if gate.subject == "changed"), None)


def judge(gates: Gates, evidence: Evidence) -> Verdict:
    """Judge a release on a device: a certain failure fails at once; it passes with enough evidence; otherwise it
    waits."""
    if evidence.golden_ok is False:
        return Verdict("fail", "its results for the golden inputs are not the expected ones", GOLDEN)
    exceeded = next((gate for gate in gates.gates if _is_over(gate, gates, evidence)), None)
    if exceeded is not None:
        return Verdict("fail", f"{exceeded.text}: it is {_value_text(exceeded, gates, evidence)}", exceeded.text)
    unjudged = tuple(gate.text for gate in gates.gates if _measured_value(gate.subject, evidence) is None)
    enough = _total_requests(evidence) >= gates.requests or not _needs_requests(gates)
    few_audits = _few_audits(gates, evidence)
    if (evidence.active_s or 0.0) >= gates.seconds or (enough and not unjudged and not few_audits):
        return Verdict("pass", unjudged=unjudged)
    left_s = gates.seconds - (evidence.active_s or 0.0)
    missing = f"for {', '.join(unjudged)}" if unjudged else few_audits
    if not enough:
        missing = f"{_total_requests(evidence)} of {gates.requests} requests"
    return Verdict("wait", f"{missing}, {left_s:.0f} s left")


def _few_audits(gates: Gates, evidence: Evidence) -> str:
    """How many audits there are of those that are needed, in words; empty if they suffice."""
    gate = gate_of_audits(gates)
    audited = min((counts.audited for counts in evidence.audits), default=0)
    if gate is None or audited >= audits_needed(gate.below):
        return ""
    return f"{audited} of {audits_needed(gate.below)} audits for {gate.text}"


def _value_text(gate: Gate, gates: Gates, evidence: Evidence) -> str:
    """The value that exceeds a gate, for people."""
    if gate.subject != "changed":
        return format_value(gate, _certain_value(gate, gates, evidence))
    counts = next(counts for counts in evidence.audits if is_exceeded(counts, gate.below))
    share = format_value(gate, counts.changed / counts.audited)
    return f"{share}: {counts.changed} of {counts.audited} audited answers differ"


def format_value(gate: Gate, value: float | None) -> str:
    """A measured value for people, in the unit in which the gate was written."""
    if value is None:
        return "unknown"
    match = re.search(r"[a-z%]*$", gate.text, re.IGNORECASE)
    unit = match[0] if match else ""
    if gate.subject in OF_ANSWERS:
        value = 1.0 - value
    figure = value / QUANTITIES[gate.subject].factors.get(unit.lower(), 1.0)
    if unit == "%":
        return f"{figure:.3g} %"
    shown = f"{figure:.4g}" if figure < 10_000 else f"{figure:.0f}"
    return f"{shown} {'°C' if gate.subject == 'celsius' else unit or 'J'}"


def _total_requests(evidence: Evidence) -> int:
    return (evidence.requests or 0) + (evidence.failed or 0)


def _needs_requests(gates: Gates) -> bool:
    return any(gate.subject in NEED_REQUESTS for gate in gates.gates)


def _is_over(gate: Gate, gates: Gates, evidence: Evidence) -> bool:
    if gate.subject == "changed":
        return any(is_exceeded(counts, gate.below) for counts in evidence.audits)
    value = _certain_value(gate, gates, evidence)
    return value is not None and value >= gate.below


def _certain_value(gate: Gate, gates: Gates, evidence: Evidence) -> float | None:
    """The value to compare with the bound now; None while there is too little evidence.

    Rates are computed over the number of requests that will at least have been answered at the verdict, so that a
    device's first failure does not count as a rate of 100 %. Times and joules count once enough requests were answered.
    """
    value = _measured_value(gate.subject, evidence)
    if gate.subject not in NEED_REQUESTS or value is None:
        return value
    requests = _total_requests(evidence)
    time_is_up = (evidence.active_s or 0.0) >= gates.seconds
    if gate.subject in ("errors", "fallbacks"):
        # value * requests is the count so far; over the larger denominator the rate is a lower bound of the final one.
        return value if time_is_up else value * requests / max(requests, gates.requests)
    return value if time_is_up or requests >= gates.requests else None


def _measured_value(subject: Subject, evidence: Evidence) -> float | None:
    """The measured value of a gate; None if it is unknown."""
    if subject in ("errors", "fallbacks"):
        count = evidence.failed if subject == "errors" else evidence.fallbacks
        asked = _total_requests(evidence)
        return count / asked if asked and count is not None else None
    if subject in ("p95", "joules") and not evidence.requests:
        return None
    if subject == "changed":
        return max((counts.changed / counts.audited for counts in evidence.audits), default=None)
    known: Mapping[str, float | None] = {
        "p95": evidence.latency_p95_s, "memory": evidence.memory_bytes, "celsius": evidence.celsius,
        "joules": evidence.joules, "drift": evidence.drift, "accuracy": evidence.inaccuracy,
        "agreement": evidence.disagreement,
    }  # fmt: skip
    return known[subject]
