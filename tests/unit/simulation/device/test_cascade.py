"""A simulated device of a family with a cascade: who answers, what is audited, and what happens without the cloud."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest

from edgesplit.cascade import Cascade
from edgesplit.errors import EdgeError
from edgesplit.oip.report import Report
from edgesplit.plan import Link
from edgesplit.testing.virtual_time import Hub
from edgesplit_agent.releases.loaded_release import LoadedRelease
from edgesplit_agent.serving.cascade import ALARM_S
from edgesplit_simulation.device.engine import SimulatedEngine, SimulatedOffloadServer
from edgesplit_simulation.device.runtime import SimulatedHost
from edgesplit_simulation.releases import HEALTHY, Behaviour
from unit.agent.serving.test_cascade_answers import CASCADE, make_release

SEED, REQUESTS = 7, 2_000
LINK = Link(up_bytes_per_s=2e6, down_bytes_per_s=2e6, rtt_s=0.02)
PROMISED = msgspec.structs.replace(
    CASCADE, changed=msgspec.structs.replace(CASCADE.changed, differing=2), audit_share=0.2
)


@dataclass
class Birds:
    """A family on one simulated device."""

    engine: SimulatedEngine
    hub: Hub
    is_up: bool = True

    def ask(self, requests: int = 1, every_s: float = 1.0) -> list[Report | EdgeError]:
        """What came of so many requests, one after the other."""
        results: list[Report | EdgeError] = []
        for number in range(requests):
            self.engine.submit(f"{self.hub.monotonic()}-{number}", "birds", results.append)
            self.hub.run(every_s)
        return results


def birds(cascade: Cascade = PROMISED, behaviour: Behaviour = HEALTHY) -> Birds:
    """The family of the agent's own tests, on a simulated host."""
    made, _ = make_release(cascade=cascade)
    release: LoadedRelease = replace(
        made,
        host=SimulatedHost(None, made.plan, frozenset({"small.s01"}), lambda: behaviour, lambda sha256: b""),  # type: ignore[arg-type]
    )
    hub = Hub(seed=SEED)
    server = SimulatedOffloadServer(LINK)
    family = Birds(SimulatedEngine(hub, server, lambda digest, error: None), hub)
    server.is_up = lambda: family.is_up
    family.engine.serve("birds", release)
    return family


def test_as_many_requests_escalate_as_the_plan_says() -> None:
    """The others are answered by the first variant, here; telemetry counts both, and audits within the promise."""
    family = birds()
    reports = [result for result in family.ask(REQUESTS) if isinstance(result, Report)]
    assert len(reports) == REQUESTS and all(report.score is not None for report in reports)
    escalated = [report for report in reports if report.escalated]
    assert len(escalated) / REQUESTS == pytest.approx(CASCADE.escalated, abs=0.04), f"seed {SEED}"
    assert {report.variant for report in escalated} == {"large"} and all(report.link_s > 0 for report in escalated)
    assert {report.variant for report in reports if not report.escalated} == {"small"}
    (counts,) = family.engine.cascades.close_windows().values()
    assert (counts.sure, counts.escalated, counts.unsure) == (REQUESTS - len(escalated), len(escalated), 0)
    assert counts.answered == {"small": counts.sure, "large": counts.escalated}
    assert counts.audited > 100 and 0 < counts.changed < 0.05 * counts.audited and counts.alarms == 0
    assert family.engine.cascades.close_windows()["birds"].sure == 0


def test_answers_that_drift_raise_an_alarm_and_tighten_the_threshold() -> None:
    """By the agent's own test: after it more is escalated than was planned."""
    family = birds(behaviour=Behaviour(drift=0.2))
    family.ask(REQUESTS)
    (alarm,) = family.engine.cascades.alarms(family.hub.monotonic())
    assert alarm.startswith("birds: ") and "allowed" in alarm
    assert family.engine.cascades.alarms(family.hub.monotonic() + ALARM_S) == ()
    (counts,) = family.engine.cascades.close_windows().values()
    assert counts.alarms >= 1 and counts.threshold > CASCADE.threshold
    assert counts.escalated > 1.3 * CASCADE.escalated * REQUESTS


def test_without_the_cloud_unsure_answers_are_marked() -> None:
    """The first variant's, as the plan has no floor above it; sure ones are as before, and their audits prevented."""
    family = birds()
    family.is_up = False
    results = family.ask(400)
    reports = [result for result in results if isinstance(result, Report)]
    unsure = [report for report in reports if report.unsure]
    assert len(reports) == 400 and {report.variant for report in reports} == {"small"}
    assert len(unsure) / 400 == pytest.approx(CASCADE.escalated, abs=0.08), f"seed {SEED}"
    (counts,) = family.engine.cascades.close_windows().values()
    assert (counts.escalated, counts.unsure) == (0, len(unsure)) and counts.unaudited > 0


def test_a_release_without_a_cascade_counts_none() -> None:
    """And draws no numbers for one, so that a seed's run stays the same."""
    family = birds()
    assert family.engine.cascades.of("birds") is not None
    made, _ = make_release(cascade=None)
    plain = replace(made, host=family.engine.serving["birds"].host)
    family.engine.serve("birds", plain)
    assert family.engine.cascades.of("birds") is None and family.engine.cascades.close_windows() == {}
    (report,) = family.ask()
    assert isinstance(report, Report) and report.score is None and not report.escalated
    family.engine.drop("birds")
    assert family.engine.cascades.of("birds") is None
