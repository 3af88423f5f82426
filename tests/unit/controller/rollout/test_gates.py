"""Rollout gates: their syntax, their evidence, and their verdicts."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import UsageError
from edgesplit_controller.rollout.gates import Evidence, Gates, gates_of_answers, judge, parse_gate, parse_gates

KNOWN = Evidence(
    model="m", release="r", requests=100, failed=0, fallbacks=2, latency_p95_s=0.1, memory_bytes=200_000_000,
    celsius=60.0, joules=0.2, drift=0.001, golden_ok=True, active_s=30.0, inaccuracy=0.01, disagreement=0.0,
)  # fmt: skip
ALL = parse_gates(
    ["p95<150ms", "errors<1%", "fallbacks<10%", "memory<400MB", "celsius<80", "joules<0.5", "drift<1%",
     "accuracy>97%", "agreement>99%"]
)  # fmt: skip


def but(**changes: object) -> Evidence:
    """What is known, with changes."""
    return msgspec.structs.replace(KNOWN, **changes)


@pytest.mark.parametrize(
    ("text", "below"),
    [
        ("p95<150ms", 0.15), ("p95 < 1.5 s", 1.5), ("errors<1%", 0.01), ("fallbacks<10%", 0.1), ("memory<400MB", 4e8),
        ("memory<64KiB", 65_536), ("celsius<80", 80.0), ("joules<0.5", 0.5), ("joules<20mJ", 0.02), ("drift<1%", 0.01),
        ("accuracy>97%", 0.03), ("agreement > 99.5 %", 0.005),
    ],
)  # fmt: skip
def test_a_gate_is_parsed_with_its_unit(text: str, below: float) -> None:
    """Each subject in its usual units."""
    assert parse_gate(text).below == pytest.approx(below)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("speed<3", "not one of p95"), ("p95<150", "write it as in p95<150ms"), ("p95>150ms", "p95<150ms"),
        ("errors<1", "errors<1%"),
        ("memory<400", "memory<400MB"), ("", "not one of"), ("p95<=150ms", "write it as"), ("p95<0ms", "above 0"),
        ("p95<nan", "write it as"), ("accuracy<97%", "accuracy>97%"), ("accuracy>0.97", "accuracy>97%"),
        ("agreement>100%", "agreement>99%"), ("errors>1%", "errors<1%"), ("<3", "not one of"), ("p95", "write it as"),
    ],
)  # fmt: skip
def test_an_invalid_gate_is_refused_with_the_syntax(text: str, says: str) -> None:
    """The error shows the expected spelling."""
    with pytest.raises(UsageError, match=says):
        parse_gate(text)


def test_gates_are_bounded_and_unique_per_subject() -> None:
    """Two bounds for one subject are refused; so are dozens."""
    with pytest.raises(UsageError, match="two gates for p95"):
        parse_gates(["p95<150ms", "p95<1s"])
    with pytest.raises(UsageError, match="at most"):
        parse_gates(["p95<150ms"] * 17)


def test_a_healthy_release_passes() -> None:
    """Enough requests, everything known and below its bound."""
    verdict = judge(ALL, KNOWN)
    assert verdict.state == "pass" and verdict.unjudged == ()


@pytest.mark.parametrize(
    ("change", "gate"),
    [
        ({"latency_p95_s": 0.15}, "p95<150ms"), ({"requests": 99, "failed": 1}, "errors<1%"),
        ({"fallbacks": 10}, "fallbacks<10%"),
        ({"memory_bytes": 400_000_000}, "memory<400MB"), ({"celsius": 80.0}, "celsius<80"),
        ({"joules": 0.5}, "joules<0.5"), ({"drift": 0.01}, "drift<1%"),
        ({"inaccuracy": 1 - 0.97}, "accuracy>97%"), ({"disagreement": 0.2}, "agreement>99%"),
        ({"golden_ok": False}, "golden"),
    ],
)  # fmt: skip
def test_each_gate_fails_at_its_bound(change: dict[str, object], gate: str) -> None:
    """A value equal to the bound fails; the verdict names the gate and the value."""
    verdict = judge(ALL, but(**change))
    assert verdict.state == "fail" and verdict.gate == gate and verdict.reason


@pytest.mark.parametrize(
    ("gate", "change", "why"),
    [
        ("p95<0.15s", {"latency_p95_s": 0.2}, "it is 0.2 s"), ("p95<150ms", {"latency_p95_s": 0.2}, "it is 200 ms"),
        ("memory<256MiB", {"memory_bytes": 300 * 2**20}, "it is 300 MiB"),
        ("celsius<80", {"celsius": 85.5}, "it is 85.5 °C"),
        ("joules<500mJ", {"joules": 0.75}, "it is 750 mJ"), ("joules<0.5", {"joules": 0.75}, "it is 0.75 J"),
        ("drift < 1 %", {"drift": 0.02}, "it is 2 %"),
    ],
)  # fmt: skip
def test_a_value_is_formatted_in_the_unit_of_its_gate(gate: str, change: dict[str, object], why: str) -> None:
    """It can be compared with the bound as the operator wrote it."""
    told = judge(parse_gates([gate]), but(**change)).reason
    assert told == f"{''.join(gate.split())}: {why}"


def test_golden_inputs_are_always_a_gate() -> None:
    """Also without configured gates; without golden inputs and gates a release passes immediately."""
    assert judge(Gates(), Evidence(model="m", release="r", golden_ok=False)).state == "fail"
    assert judge(Gates(), Evidence(model="m", release="r")).state == "pass"


def test_few_requests_are_not_enough_to_fail_a_rate() -> None:
    """One failure among the first ten is no rate of ten per cent: the gate fails once further successes could not lower
    the rate below its bound."""
    gates = parse_gates(["errors<4%"], requests=50)
    few = but(requests=9, failed=1)
    assert judge(gates, few).state == "wait"
    assert judge(gates, but(requests=8, failed=2)).state == "fail"  # 2 of 50 at best


def test_a_release_without_any_success_fails() -> None:
    """Failures are evidence where there is no answer at all."""
    nothing = but(requests=0, failed=60, latency_p95_s=None, joules=None)
    assert judge(parse_gates(["errors<5%"]), nothing).state == "fail"


def test_latency_is_not_judged_by_few_requests() -> None:
    """The p95 of three requests is no evidence; that of fifty is."""
    gates = parse_gates(["p95<150ms"])
    assert judge(gates, but(requests=3, latency_p95_s=9.0)).state == "wait"
    assert judge(gates, but(requests=50, latency_p95_s=9.0)).state == "fail"


def test_at_the_deadline_the_available_evidence_decides() -> None:
    """A device with little traffic is not awaited longer; a gate without any evidence is reported as not judged."""
    gates = parse_gates(["p95<150ms", "drift<1%"])
    assert judge(gates, but(requests=3, latency_p95_s=9.0, active_s=600.0)).state == "fail"
    silent = judge(gates, but(requests=0, latency_p95_s=None, drift=None, active_s=600.0))
    assert silent.state == "pass" and silent.unjudged == ("p95<150ms", "drift<1%")


def test_heat_and_memory_need_no_requests() -> None:
    """They fail on the first sample, and pass as soon as they are known."""
    gates = parse_gates(["celsius<80", "memory<400MB"])
    assert judge(gates, but(requests=0, celsius=81.0)).state == "fail"
    assert judge(gates, but(requests=0)).state == "pass"
    assert judge(gates, but(requests=0, celsius=None)).state == "wait"


maybe = st.none() | st.floats(0, 1e6)
counts = st.none() | st.integers(0, 10_000)


@given(
    requests=counts, failed=counts, p95=maybe, memory=counts, celsius=maybe, drift=maybe,
    golden=st.none() | st.booleans(), since=st.none() | st.floats(0, 2_000),
)  # fmt: skip
def test_any_evidence_gets_a_verdict_and_the_deadline_ends_waiting(
    requests: int | None, failed: int | None, p95: float | None, memory: int | None, celsius: float | None,
    drift: float | None, golden: bool | None, since: float | None,
) -> None:  # fmt: skip
    """Judging never raises; after the deadline no gate is pending."""
    evidence = Evidence(
        model="m", release="r", requests=requests, failed=failed, latency_p95_s=p95, memory_bytes=memory,
        celsius=celsius, drift=drift, golden_ok=golden, active_s=since,
    )  # fmt: skip
    assert judge(ALL, evidence).state in ("pass", "fail", "wait")
    assert judge(ALL, msgspec.structs.replace(evidence, active_s=600.0)).state != "wait"


def test_a_gate_of_answers_tells_the_share_that_it_needs() -> None:
    """As it was written: what must be exceeded, not what is missing; it waits for golden inputs, and for no request."""
    gates = parse_gates(["accuracy>97%"], requests=50)
    assert judge(gates, but(inaccuracy=0.25, requests=0)).reason == "accuracy>97%: it is 75 %"
    assert judge(gates, but(requests=0)).state == "pass"
    assert judge(gates, but(inaccuracy=None, requests=100)).state == "wait"
    assert gates_of_answers(gates) == {"accuracy"} and not gates_of_answers(parse_gates(["p95<1s"]))
