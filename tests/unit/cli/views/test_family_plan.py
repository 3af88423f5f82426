"""A family's plan as text: the cascade beside the row without it."""

from __future__ import annotations

import pytest

from edgesplit_cli.views.family_plan import print_family_plan
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest
from unit.partitioner.planner.test_cascade import planned
from unit.partitioner.planner.test_family import LARGE, MIDDLE, SMALL


def test_the_plan_tells_the_cascade_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """What stays, what is promised, where the rest goes, and whether it gains; explained also each pair that was
    tried."""
    request = CascadeRequest(changed=0.05)
    result = planned(SMALL, MIDDLE, LARGE, request=request, objective="energy").to_builtins()
    print_family_plan(result)
    text = capsys.readouterr().out
    assert "% of frames stay here; at most 5 % of answers differ (90 % sure, 400 samples)" in text
    assert "gain on the planned link" in text and "unsure frames are asked of" in text and "tried" not in text
    print_family_plan(result, explained=True)
    assert "3 tried, certainty divided among 3; 1 % of the frames are drawn for audit" in capsys.readouterr().out
