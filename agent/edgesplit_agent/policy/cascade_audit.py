"""The audits of one release's cascade at work: its threshold in force, the sequential test, and what they counted.

What is tested: of all frames, the share that the first variant answers surely and the second one differently is at most
what the operator allowed. Frames are drawn before anything about them is known, with a probability that depends on the
past alone. A drawn frame that turns out not to be sure counts as not changed, and costs nothing. A frame that could not
have been compared (no link, no power, no budget, another audit under way) is not drawn for the test whatever becomes of
it: else escalated frames alone would enter it in such times, and hide what changes. An audit that fails afterwards is
counted as unaudited, which makes alarms rarer and never more frequent.

Not thread-safe; no clock, no randomness and no I/O of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from edgesplit.answers.sequential import SequentialTest
from edgesplit.cascade import MOST_SCORE, Cascade
from edgesplit.mqtt.messages import CascadeCounts
from edgesplit_agent.policy.audit_budget import AuditBudget, AuditLimits
from edgesplit_agent.policy.escalation import is_sure, tightened
from edgesplit_agent.state.cascade_store import AuditState

RECENT_SCORES = 512
"""Sure scores that are kept to choose a tighter threshold by."""

Draw = Literal["no", "drawn", "prevented"]
"""Whether a frame is drawn for audit; `prevented`: it was, but no audit may begin now."""


@dataclass(slots=True)
class CascadeTotals:
    """What was counted since the agent started; the fields are those of `messages.CascadeCounts`."""

    sure: int = 0
    escalated: int = 0
    unsure: int = 0
    audited: int = 0
    changed: int = 0
    unaudited: int = 0
    alarms: int = 0
    answered: Counter[str] = field(default_factory=Counter)
    """Answers by variant."""

    @property
    def requests(self) -> int:
        """All that were answered or refused."""
        return self.sure + self.escalated + self.unsure

    def copy(self) -> CascadeTotals:
        """What was counted until now."""
        return replace(self, answered=self.answered.copy())


class CascadeAudit:
    """The state of one release's cascade."""

    def __init__(self, cascade: Cascade, state: AuditState | None, totals: CascadeTotals, limits: AuditLimits) -> None:
        """`state` as it was written to disk, of this release; `totals` go on across releases."""
        fresh = SequentialTest(cascade.changed.at_most, 1.0 - cascade.changed.certainty)
        is_ours = state is not None and (state.test.allowed, state.test.delta) == (fresh.allowed, fresh.delta)
        self.cascade = cascade
        self.totals = totals
        self.threshold = cascade.threshold
        self.test = fresh
        if state is not None and is_ours:
            self.threshold, self.test = max(cascade.threshold, state.threshold), state.test
        self.alarm = ""
        """The last alarm in words; empty before the first since the start."""
        self._limits = limits
        self._budget: AuditBudget | None = None
        self._is_pending = False
        """A frame is drawn whose outcome is not known yet. One at a time, so that outcomes are observed in order."""
        self._sure_scores: deque[float] = deque(maxlen=RECENT_SCORES)

    @property
    def state(self) -> AuditState:
        """What a restart needs."""
        return AuditState(self.threshold, self.test)

    @property
    def is_off(self) -> bool:
        """Whether alarms have tightened the threshold until everything is escalated."""
        return self.threshold >= MOST_SCORE

    def counts_since(self, before: CascadeTotals) -> CascadeCounts:
        """What was counted since then, as telemetry."""
        now = self.totals
        return CascadeCounts(
            sure=now.sure - before.sure, escalated=now.escalated - before.escalated, unsure=now.unsure - before.unsure,
            audited=now.audited - before.audited, changed=now.changed - before.changed,
            unaudited=now.unaudited - before.unaudited, alarms=now.alarms - before.alarms, threshold=self.threshold,
            allowed=self.cascade.changed.at_most,
            answered={
                name: now.answered[name] - before.answered[name] for name in (self.cascade.first, self.cascade.second)
            },
        )  # fmt: skip

    def draw(self, number: float, now: float, may_audit: Callable[[], bool]) -> Draw:
        """Whether the next frame is drawn, by a random number from 0 to 1. `may_audit` tells whether an audit could
        begin, and is asked only where it matters.

        Each frame that is drawn is ended by `on_outcome`, `on_unaudited` or `on_lost`.
        """
        if number >= self.cascade.audit_share or self.is_off:
            return "no"
        budget = self._budget or AuditBudget.full(self._limits, now)
        self._budget = budget.credited(now)
        if self._is_pending or not self._budget.allows_one or not may_audit():
            return "prevented"
        self._is_pending = True
        return "drawn"

    def is_sure(self, score: float) -> bool:
        """Whether an answer of the first variant with this score is given."""
        return is_sure(score, self.threshold)

    def on_sure(self, score: float, draw: Draw) -> None:
        """The first variant's answer was given."""
        self.totals.sure += 1
        self.totals.answered[self.cascade.first] += 1
        self.totals.unaudited += draw == "prevented"
        self._sure_scores.append(score)

    def on_escalated(self) -> None:
        """The second variant answered."""
        self.totals.escalated += 1
        self.totals.answered[self.cascade.second] += 1

    def on_unsure(self, is_given: bool) -> None:
        """The second variant could not be asked in time; the first one's answer was given, or refused."""
        self.totals.unsure += 1
        self.totals.answered[self.cascade.first] += is_given

    def on_outcome(self, differs: bool, moved_bytes: int | None = None) -> bool:
        """A drawn frame's outcome: whether it was answered surely, and the second variant differs. True at an alarm.

        `moved_bytes` is what the audit moved; None where it took none, because the frame was not sure.
        """
        self._end_audit(moved_bytes)
        before, self.test = self.test, self.test.observe(differs)
        self.totals.audited += 1
        self.totals.changed += differs
        if self.test.alarms == before.alarms:
            return False
        self.totals.alarms += 1
        old, self.threshold = self.threshold, tightened(self.threshold, self._sure_scores, self.test.alarms)
        self._sure_scores.clear()
        seen = f"{before.changed + differs} of {before.observed + 1} audited frames changed"
        now = "every answer is escalated" if self.is_off else f"threshold raised from {old:.4g} to {self.threshold:.4g}"
        self.alarm = f"{seen}, {self.cascade.changed.at_most:.2%} allowed: {now}"
        return True

    def on_unaudited(self, moved_bytes: int = 0) -> None:
        """A drawn frame was answered surely, and the second variant could not be asked."""
        self._end_audit(moved_bytes)
        self.totals.unaudited += 1

    def on_lost(self) -> None:
        """A drawn frame got no answer at all."""
        self._end_audit(None)

    def _end_audit(self, moved_bytes: int | None) -> None:
        self._is_pending = False
        if moved_bytes is not None and self._budget is not None:
            self._budget = self._budget.debited(moved_bytes)
