"""Audits of a cascade: what is drawn, what the test sees, and simulated worlds with a known truth."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from edgesplit.answers.share_bound import share_is_kept
from edgesplit.cascade import MOST_SCORE, Cascade, ChangedShare
from edgesplit_agent.policy.audit_budget import AUDIT_LIMITS, AuditLimits
from edgesplit_agent.policy.cascade_audit import CascadeAudit, CascadeTotals
from edgesplit_agent.policy.escalation import MOST_ALARMS
from edgesplit_agent.state.cascade_store import AuditState

ALLOWED, DELTA = 0.05, 0.1
CASCADE = Cascade(
    first="small", second="large", answer="class", score="probability", threshold=0.5, audit_share=0.5,
    changed=ChangedShare(at_most=ALLOWED, certainty=1 - DELTA, samples=300, differing=5), escalated=0.5,
)  # fmt: skip
UNBOUNDED = AuditLimits(per_minute=1e12, bytes_per_minute=1e12)


def fresh(limits: AuditLimits = UNBOUNDED, state: AuditState | None = None) -> CascadeAudit:
    return CascadeAudit(CASCADE, state, CascadeTotals(), limits)


def may() -> bool:
    return True


def may_not() -> bool:
    return False


def test_one_frame_is_audited_at_a_time() -> None:
    """A frame that is drawn meanwhile does not enter the test, whatever becomes of it: outcomes keep their order."""
    audit = fresh()
    assert audit.draw(0.5, 0.0, may) == "no"
    assert [audit.draw(0.1, 0.0, may), audit.draw(0.1, 0.0, may)] == ["drawn", "prevented"]
    audit.on_outcome(differs=False)
    assert audit.draw(0.1, 0.0, may) == "drawn"


@pytest.mark.parametrize("how", ["link", "budget"])
def test_what_cannot_be_audited_is_counted_where_it_was_sure(how: str) -> None:
    """No link or power, or too many audits: the frame is prevented, and counted as unaudited if it was sure."""
    audit = fresh(AUDIT_LIMITS if how == "link" else AuditLimits(per_minute=1))
    if how == "budget":
        assert audit.draw(0.1, 0.0, may) == "drawn"
        audit.on_outcome(differs=False, moved_bytes=1)
    draw = audit.draw(0.1, 0.0, may_not if how == "link" else may)
    assert draw == "prevented"
    audit.on_sure(0.9, draw)
    assert (audit.totals.unaudited, audit.test.observed) == (1, 0 if how == "link" else 1)


def test_escalated_frames_cost_no_budget() -> None:
    """Nothing more was asked for them."""
    audit = fresh(AuditLimits(per_minute=1))
    for _ in range(50):
        assert audit.draw(0.1, 0.0, may) == "drawn"
        audit.on_escalated()
        audit.on_outcome(differs=False)
    assert audit.test.observed == audit.totals.audited == 50


def test_a_state_of_another_promise_is_not_taken_over() -> None:
    """Nor one that would be laxer than what is signed; what an alarm tightened stays."""
    audit = fresh()
    for _ in range(200):
        audit.draw(0.1, 0.0, may)
        audit.on_sure(0.9, "drawn")
        if audit.on_outcome(differs=True, moved_bytes=0):
            break
    assert fresh(state=audit.state).threshold == audit.threshold > CASCADE.threshold
    assert fresh(state=audit.state).test == audit.test
    assert fresh(state=AuditState(0.1, audit.test)).threshold == CASCADE.threshold
    other = AuditState(0.9, type(audit.test)(0.2, DELTA))
    assert fresh(state=other).threshold == CASCADE.threshold and fresh(state=other).test.allowed == ALLOWED


def test_after_alarms_everything_is_escalated_and_nothing_is_drawn() -> None:
    """Answers are sure and wrong at every threshold: it only grows, and ends above all scores (seed 5)."""
    rng = random.Random(5)
    audit, thresholds = fresh(), [CASCADE.threshold]
    for _ in range(5000):
        score, draw = audit.threshold + rng.random(), audit.draw(rng.random(), 0.0, may)
        if audit.is_off:
            break
        audit.on_sure(score, draw)
        if draw == "drawn" and audit.on_outcome(True, 0):
            thresholds.append(audit.threshold)
    assert thresholds == sorted(set(thresholds)) and thresholds[-1] == MOST_SCORE
    assert audit.totals.alarms == len(thresholds) - 1 == MOST_ALARMS
    assert audit.draw(0.0, 0.0, may) == "no" and not audit.is_sure(1.0)
    assert "every answer is escalated" in audit.alarm and "5.00% allowed" in audit.alarm


World = Callable[[random.Random, int], tuple[float, bool, bool]]
"""A frame's score, whether the second variant differs, and whether it could be asked then."""


def play(world: World, seed: int, frames: int) -> tuple[CascadeAudit, int | None]:
    """A stream of frames through the audits; the frame of the first alarm."""
    rng = random.Random(seed)
    audit = fresh()
    for number in range(frames):
        score, differs, can_ask = world(rng, number)
        draw = audit.draw(rng.random(), float(number), lambda: can_ask)  # noqa: B023  (called at once)
        is_sure = audit.is_sure(score)
        if is_sure:
            audit.on_sure(score, draw)
        if draw == "drawn" and audit.on_outcome(is_sure and differs, 0):
            return audit, number
    return audit, None


def at_the_limit(rng: random.Random, number: int) -> tuple[float, bool, bool]:
    """Half of the frames are sure, and a tenth of these differ: exactly what is allowed. A third of the time, in bursts
    of 50 frames, there is no link."""
    score = rng.uniform(0.0, 1.0)
    return score, rng.random() < (0.1 if score >= 0.5 else 0.4), number % 150 >= 50


def drifting(rng: random.Random, number: int) -> tuple[float, bool, bool]:
    """From frame 500 on four tenths of the sure answers differ."""
    score = rng.uniform(0.0, 1.0)
    return score, rng.random() < (0.4 if number >= 500 else 0.02), True


def test_at_the_limit_alarms_are_as_rare_as_promised() -> None:
    """60 streams of 600 frames whose changed share is exactly the limit (seeds 0 to 59), with and without a link: not
    more than a tenth of them alarm, 99 % sure."""
    streams = 60
    alarmed = sum(play(at_the_limit, seed, 600)[1] is not None for seed in range(streams))
    print(f"seeds 0 to {streams - 1}: {alarmed} of {streams} streams alarmed, {DELTA:.0%} allowed")
    assert not share_is_kept(streams - alarmed, streams, 1 - DELTA, 0.01)


def test_a_shift_is_noticed_and_what_was_measured_is_near_the_truth() -> None:
    """Five streams (seeds 0 to 4) whose changed share grows from 1 % to 20 %: all of them alarm, none before."""
    for seed in range(5):
        audit, at = play(drifting, seed, 3000)
        print(f"seed {seed}: alarm at frame {at}, {audit.totals.changed} of {audit.totals.audited} changed")
        assert at is not None and at >= 500
        assert audit.threshold > CASCADE.threshold


def test_the_measured_share_is_that_of_all_frames() -> None:
    """Not of the sure ones alone: it is what was promised (seed 11)."""
    rng, audit = random.Random(11), fresh()
    audit.test = type(audit.test)(0.9, DELTA)  # never alarms
    for number in range(3000):
        score, differs, can_ask = at_the_limit(rng, number)
        draw = audit.draw(rng.random(), float(number), lambda: can_ask)  # noqa: B023  (called at once)
        is_sure = audit.is_sure(score)
        if is_sure:
            audit.on_sure(score, draw)
        if draw == "drawn":
            audit.on_outcome(is_sure and differs, 0)
    share = audit.totals.changed / audit.totals.audited
    print(f"seed 11: measured {share:.4f} of {audit.totals.audited}, truth {ALLOWED}")
    assert abs(share - ALLOWED) < 4 * (ALLOWED * (1 - ALLOWED) / audit.totals.audited) ** 0.5
