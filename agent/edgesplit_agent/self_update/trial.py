"""Decides whether the agent version on trial is healthy; pure functions.

A model is judged by its answers. An agent version is judged by the two things without which a device cannot be repaired
remotely: it reaches the controller's broker, if the version before it did, and it serves the models that were served
before it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

TRIAL_S = 300.0
"""Seconds that a version on trial has to prove itself healthy."""
Verdict = Literal["wait", "healthy", "unhealthy"]


@dataclass(frozen=True, slots=True)
class VersionTrial:
    """What is known of the version on trial. Times are of one monotonic clock, in seconds."""

    release: str
    """Release of the version on trial."""
    began: float
    """When this start began to serve."""
    lasts_s: float = TRIAL_S
    """Seconds after which the trial has failed."""
    served: frozenset[str] = frozenset()
    """The models that answered before the trial."""
    online_since: float | None = None
    """When the present connection to the broker was made; None while there is none."""
    offline: bool = False
    """The version before had no connection to the broker either."""

    @property
    def well_since(self) -> float | None:
        """Since when the requirement on the broker has been met; None while it is not."""
        return self.began if self.offline else self.online_since

    def verdict(self, serving: Collection[str], now: float, health_s: float) -> Verdict:
        """What is to be done with the version at `now`: commit it once it has served for `health_s` seconds with the
        broker reached, roll it back once its time is up."""
        if self.well_since is not None and self.served <= set(serving):
            # An unstable connection: healthy once it has lasted `health_s`; unhealthy only if it is lost when the
            # time is up. A connection that has not lasted long enough by then prolongs the trial.
            return "healthy" if now >= self.well_since + health_s else "wait"
        return "unhealthy" if now >= self.began + self.lasts_s else "wait"

    def unhealthy_reason(self, serving: Collection[str]) -> str:
        """Reason of an "unhealthy" verdict, for people."""
        if self.well_since is None:
            return f"it did not reach the broker within {self.lasts_s:g} s"
        missing = ", ".join(sorted(self.served - set(serving)))
        return f"it does not serve {missing}, which the version before it served"

    def verdict_times(self, health_s: float) -> list[float]:
        """The times at which the verdict can change without any event."""
        times = [self.began + self.lasts_s]
        return times if self.well_since is None else [*times, self.well_since + health_s]
