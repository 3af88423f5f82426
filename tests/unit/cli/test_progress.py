"""Progress where there is no terminal: a line now and then, with what is being done."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import LinkError
from edgesplit_cli import progress
from edgesplit_cli.progress import FIRST_LINE_S, LINE_EVERY_S, ProgressLines, controller_progress, progress_bar
from edgesplit_cli.views.rollout import progress_line, rollout_view
from support.rollouts import rollout_dict

PATIENCE_S = 20.0
PATH = "/v1/models/digits@1/profile"


class ManualClock:
    """Time, moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class BusyController(ControllerClient):
    """A controller that works on a call, and fails to answer once."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self._answers = iter([LinkError("lost"), [], [{"path": PATH, "state": "queued", "step": ""}]])

    def get(self, path: str, **query: Any) -> Any:
        """The jobs."""
        assert path == "/v1/jobs"
        self.asked.release()
        answer = next(self._answers, [{"path": PATH, "state": "running", "step": "timing each layer"}])
        if isinstance(answer, LinkError):
            raise answer
        return answer


def test_long_work_was_silent_without_a_terminal() -> None:
    """A line soon after the beginning, then one every few seconds, with the step and the time; short work has none."""
    clock, lines = ManualClock(), list[str]()
    shown = ProgressLines("profiling digits", write=lines.append, clock=clock)
    shown.update("timing each layer")
    assert lines == []
    clock.now += FIRST_LINE_S
    shown.write_if_due()
    shown.update("timing 9 slices whole")
    assert lines == ["profiling digits: timing each layer (1 s)"]
    for _ in range(10):
        clock.now += LINE_EVERY_S / 2
        shown.write_if_due()
    assert len(lines) == 6 and lines[-1] == "profiling digits: timing 9 slices whole (26 s)"


def test_a_bar_was_nothing_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the percentage there, on standard error; with JSON output nothing."""
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    with progress_bar("calibrating", quiet=False) as update:
        update(completed=3, total=4)
    with progress_bar("restoring", quiet=True) as update:
        update(completed=3, total=4)
    printed = capsys.readouterr()
    assert "calibrating: 75% (" in printed.err and "restoring" not in printed.err and printed.out == ""


def test_the_controllers_step_is_shown_while_a_call_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked beside the call, under its own path; a question that fails is asked again."""
    for name in ("FIRST_LINE_S", "LINE_EVERY_S", "POLL_S"):
        monkeypatch.setattr(progress, name, 0.0)
    controller = BusyController()
    with controller_progress(controller, "/v1/models/digits%401/profile", "profiling digits", quiet=False):
        for _ in range(5):
            assert controller.asked.acquire(timeout=PATIENCE_S)
    printed = capsys.readouterr().err
    assert "profiling digits: waiting for an earlier call of yours" in printed
    assert "profiling digits: timing each layer" in printed


def test_waiting_for_a_rollout_says_what_its_devices_do() -> None:
    """How many run it, and what the others do; a trial is explained."""
    fetching = rollout_dict(devices=3, succeeded=1, fetching=1, trial=1)
    line = progress_line(fetching)
    assert line.startswith("runs on 1 of 3 devices; 1 fetching, 1 on trial: kept once it has run")
    assert progress_line(rollout_dict(devices=1, state="paused", waits_for="an operator")) == (
        "runs on 0 of 1 device; an operator"
    )


@pytest.mark.parametrize(
    ("reached", "seconds", "text"),
    [(1, 1171.0, "assigned to 1 device in 19m31s"), (3, 3600.0, "assigned to 3 devices in 1h, about 3 an hour"),
     (240, 60.0, "assigned to 240 devices in 1m, about 240 a minute"),
     (2, 172_800.0, "assigned to 2 devices in 2d, about 1 a day")],
)  # fmt: skip
def test_a_rollouts_speed_was_a_fraction_of_a_device_a_minute(reached: int, seconds: float, text: str) -> None:
    """In words, per the unit in which it is at least one; one device has no speed."""
    view = rollout_view(rollout_dict(devices=reached, succeeded=reached, began=1000.0, ended=1000.0 + seconds))
    assert any(str(line).strip() == text for line in view.renderables), [str(line) for line in view.renderables]  # type: ignore[attr-defined]
