"""Housekeeping of one process: what is due, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgesplit_controller.app import housekeeping
from edgesplit_controller.app.housekeeping import REMINDER_INTERVAL_S, Housekeeping

NOTICE = "the root key is stored on this controller"


def test_up_said_the_root_key_warning_twice(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The start prints what is due; the log repeats it a day later, and each day after that."""
    part: Any = SimpleNamespace(
        held=lambda: True, renew=lambda: None, was_taken_over=False, reload_if_changed=lambda: None, due=lambda: [],
        publish_if_changed=lambda: False, refresh_timestamp=lambda: None, renew_held_root=lambda: None,
        view=lambda: {"notices": [NOTICE]}, restate_gateways=lambda: None,
        director=SimpleNamespace(renew=lambda: []), devices=SimpleNamespace(release_quarantined=lambda: []),
    )  # fmt: skip
    now = 1000.0
    monkeypatch.setattr(housekeeping, "time", SimpleNamespace(monotonic=lambda: now))
    names = [name for name in Housekeeping.__dataclass_fields__ if not name.startswith("_")]
    parts: dict[str, Any] = dict.fromkeys(names, part)
    work = Housekeeping(**parts)
    work()
    assert NOTICE not in caplog.text
    for days in (1, 2):
        now = 1000.0 + days * REMINDER_INTERVAL_S
        work()
        work()
        assert caplog.text.count(NOTICE) == days
