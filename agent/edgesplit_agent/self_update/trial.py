"""Is the version of the agent that runs on trial a good one? Pure.

A model proves itself by its answers; the agent by doing what nobody could put right from afar if it did not: it reaches
the controller's broker, where the version before did, and serves what was served before it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

TRIAL_S = 300.0
"""So long a version on trial has until it must be seen to be well."""
Verdict = Literal["wait", "healthy", "unhealthy"]


@dataclass(frozen=True, slots=True)
class OwnTrial:
    """What the judge goes by. Times are of one monotonic clock."""

    release: str
    began: float
    """When this start began to serve."""
    lasts_s: float = TRIAL_S
    served: frozenset[str] = frozenset()
    """The models that answered before."""
    online_since: float | None = None
    """None: the broker is not reached now."""
    offline: bool = False
    """The version before did not reach it either."""

    @property
    def well_since(self) -> float | None:
        """Since when the broker is no reason against it; None: it is one."""
        return self.began if self.offline else self.online_since


def judge_own(trial: OwnTrial, serving: Collection[str], now: float, health_s: float) -> Verdict:
    """What is to be done with the version on trial now."""
    if trial.well_since is not None and trial.served <= set(serving):
        # A connection that comes and goes is judged when it has lasted, or when the time is up and it is not there.
        return "healthy" if now >= trial.well_since + health_s else "wait"
    return "unhealthy" if now >= trial.began + trial.lasts_s else "wait"


def why_own(trial: OwnTrial, serving: Collection[str]) -> str:
    """Why it is unhealthy, for people."""
    if trial.well_since is None:
        return f"it did not reach the broker within {trial.lasts_s:g} s"
    lacking = ", ".join(sorted(trial.served - set(serving)))
    return f"it does not serve {lacking}, which the version before it served"


def looks_at(trial: OwnTrial, health_s: float) -> list[float]:
    """The moments at which time alone could change the verdict."""
    moments = [trial.began + trial.lasts_s]
    return moments if trial.well_since is None else [*moments, trial.well_since + health_s]
