"""What a request's time went into, as statistics count it."""

from __future__ import annotations

import pytest

from edgesplit.oip.report import Report
from edgesplit_agent.serving.http_endpoint import statistics_parts


def test_parts_are_never_more_than_the_whole_when_device_and_cloud_race() -> None:
    """A race has both at work at the same time: their sum was told as longer than the request."""
    raced = Report(release="r", row="cut-1", latency_s=0.3, encode_s=0.01, device_s=0.2, link_s=0.1, remote_s=0.15)
    parts = statistics_parts(raced)
    assert sum(parts.values()) == pytest.approx(raced.latency_s)
    assert parts == {"queue": 0.0, "compute_input": 0.01, "compute_infer": pytest.approx(0.29)}


def test_what_no_part_explains_was_waiting() -> None:
    """In a queue, before anything ran."""
    parts = statistics_parts(Report(release="r", row="local", latency_s=0.5, device_s=0.2))
    assert parts == {"queue": pytest.approx(0.3), "compute_input": 0.0, "compute_infer": 0.2}
