"""What `edgectl deploy` prints of a release with a cascade."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from edgesplit_cli.commands.deploy import _print_deployment
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest
from unit.partitioner.planner.test_cascade import planned
from unit.partitioner.planner.test_family import LARGE, MIDDLE, SMALL


def deployment(prices: dict[str, Any]) -> dict[str, Any]:
    """As the controller answers."""
    plan = {"device_class": "raspberrypi4", "rows": [{"name": "small/local"}]}
    return {
        "release": "a" * 64, "model": "nets@1", "encrypted": False, "devices": ["cam-1"], "plans": [plan],
        "supersedes": [], "offline": [], "prices": prices,
    }  # fmt: skip


def test_a_cascade_is_told_with_its_price(capsys: pytest.CaptureFixture[str]) -> None:
    """What stays and is promised, and what a request costs beside the best row without it, as `plan` prints it."""
    result = planned(SMALL, MIDDLE, LARGE, request=CascadeRequest(changed=0.05), objective="energy")
    _print_deployment(deployment({"raspberrypi4": msgspec.to_builtins(result.cascade)}))
    text = capsys.readouterr().out
    assert "% of frames stay here; at most 5 % of answers differ (90 % sure, 400 samples)" in text
    assert "mean ms" in text and "gain on the planned link" in text and "tried" not in text


def test_a_release_without_a_cascade_has_no_price(capsys: pytest.CaptureFixture[str]) -> None:
    """Its rows alone are printed."""
    _print_deployment(deployment({}))
    text = capsys.readouterr().out
    assert "raspberrypi4: small/local" in text and "mean ms" not in text
