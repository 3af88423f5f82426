"""A rollout as the controller's API describes it."""

from __future__ import annotations

from typing import Any

from edgesplit_controller.rollout.states import MEMBER_STATES


def rollout_dict(
    *, devices: int, state: str = "running", waits_for: str = "", began: float = 1000.0, ended: float | None = None,
    **states: int,
) -> dict[str, Any]:  # fmt: skip
    """A rollout of one stage whose devices are in these states."""
    counts = {**dict.fromkeys(MEMBER_STATES, 0), **states}
    stage = {"number": 1, "size": "100%", "devices": devices, "states": states, "needs_approval": False, "open": 0}
    return {
        "id": 7, "model": "digits@1", "withdraws": False, "release": "a" * 64, "targets": ["all"], "state": state,
        "reason": "", "waits_for": waits_for, "superseded_by": None, "stages": [stage], "stage": 1, "devices": devices,
        "states": counts, "began": began, "ended": ended, "terms": {"rate": None}, "failures": [], "following": False,
    }  # fmt: skip
