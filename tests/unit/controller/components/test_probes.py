"""Probes of components."""

from __future__ import annotations

from edgesplit.errors import LinkError
from edgesplit_controller.components.probes import STORE_INTERVAL_S, ProbeResult, blobs_probe


def test_an_object_store_that_answers_is_asked_once_a_minute_and_a_bad_one_each_time() -> None:
    """Its reason is shown, and it is good again with the next answer."""
    time_s, asked, problem = 100.0, 0, ""

    def check() -> str:
        nonlocal asked
        asked += 1
        if problem:
            raise LinkError(problem)
        return "s3://bucket/x"

    probe = blobs_probe(check, lambda: time_s)
    good, bad = ProbeResult("object store", "good", "s3://bucket/x answers"), ProbeResult("object store", "bad", "away")
    assert [probe(), probe()] == [good, good] and asked == 1
    time_s, problem = time_s + STORE_INTERVAL_S, "away"
    assert [probe(), probe()] == [bad, bad] and asked == 3
    problem = ""
    assert [probe(), probe()] == [good, good] and asked == 4
