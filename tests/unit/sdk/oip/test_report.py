"""The phases of a request's time, as statistics count them."""

from __future__ import annotations

import pytest

from edgesplit.oip.report import Report, from_parameters, to_parameters
from edgesplit_agent.serving.http_endpoint import statistics_parts


def test_phases_of_a_race_do_not_exceed_the_request() -> None:
    """In a race both sides work at the same time: their sum was reported as longer than the request."""
    raced = Report(release="r", row="cut-1", latency_s=0.3, encode_s=0.01, device_s=0.2, link_s=0.1, remote_s=0.15)
    parts = statistics_parts(raced, 0.3)
    assert sum(parts.values()) == pytest.approx(raced.latency_s)
    assert parts == {"queue": 0.0, "compute_input": 0.01, "compute_infer": pytest.approx(0.29)}


def test_unexplained_time_is_queueing() -> None:
    """Before anything ran."""
    parts = statistics_parts(Report(release="r", row="local", latency_s=0.5, device_s=0.2), 0.6)
    assert parts == {"queue": pytest.approx(0.3), "compute_input": 0.0, "compute_infer": 0.2}


def test_phases_of_a_joined_request_do_not_exceed_its_own_duration() -> None:
    """A request that joined another one's answer late was reported with more compute time than it took."""
    parts = statistics_parts(Report(release="r", row="local", latency_s=0.5, encode_s=0.1, device_s=0.4), 0.2)
    assert parts == {"queue": 0.0, "compute_input": 0.1, "compute_infer": pytest.approx(0.1)}


def test_the_marks_of_a_cascade_travel_with_the_answer() -> None:
    """A score of 0 is a score; outside of a cascade there is none."""
    report = Report(release="r", row="small:local", variant="small", score=0.0, unsure=True)
    assert from_parameters(to_parameters(report)) == report
    assert to_parameters(report)["edgesplit_score"] == 0.0
    plain = to_parameters(Report(release="r", row="local"))
    assert not {"edgesplit_score", "edgesplit_escalated", "edgesplit_unsure"} & set(plain)
