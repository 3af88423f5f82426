"""What the demo's summary tells of its devices, and what it takes for a failure."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from edgesplit.client.client import Answer
from edgesplit.oip.report import Report
from edgesplit_cli.demo.application import Frame, RequestLog, Sample, sample_of
from edgesplit_cli.demo.picture import FALLBACK, FIRST, colour_of, draw
from edgesplit_cli.demo.scenario import DEVICES, SLOWED_DEVICE, DemoDevice, scenario_events
from edgesplit_cli.demo.summary import closing_sentence, demo_summary, problems, summary_table
from edgesplit_partitioner.presentation.picture import REMOTE

PROMISE = {"at_most": 0.02, "certainty": 0.9, "samples": 300, "differing": 2}
PLANS: dict[str, Any] = {
    "pi4-wifi": {"best": "cut-3"},
    "pi3-lte": {
        "best": "digits:remote",
        "cascade": {"first": "student", "second": "digits", "escalated": 0.25, "changed": PROMISE},
    },
    "nano-3g": {"best": "local"},
}
COUNTS = {"pi3-lte": {"audited": 9, "changed": 1, "unaudited": 3, "alarms": 0, "sure": 3}}
CASCADE = next(device for device in DEVICES if device.has_cascade)


def one_hot(label: int) -> np.ndarray:
    return np.eye(10, dtype=np.float32)[label][None]


FRAME = Frame("000.jpg", b"", 3, {"digits": one_hot(3), "student": one_hot(5)})


def seen(at_s: float, label: int, **report: Any) -> Sample:
    """A sample of an answer with this label to a frame that the whole model takes for a 3 and the student for a 5."""
    fields = {"release": "r", "row": "local", **report}
    return sample_of(at_s, 0.1, Answer({"out": one_hot(label)}, Report(**fields), "i"), FRAME)


def asked(*samples: Sample, failed: tuple[str, ...] = ()) -> RequestLog:
    log = RequestLog(list(samples), len(samples) + len(failed), failed=Counter(failed))
    log.results = Counter(str(number) for number in range(len(samples)))
    return log


def logs(**changed: RequestLog) -> dict[DemoDevice, RequestLog]:
    """A run as it should be; `changed` replaces a device's log."""
    usual = {
        "pi4": asked(seen(0, 3, row="cut-3"), seen(1, 3, fallback=True)),
        "pi3": asked(
            seen(0, 5, row="student:local", variant="student", score=0.9),
            seen(1, 3, row="digits:remote", variant="digits", score=0.2, escalated=True),
            seen(2, 5, row="student:local", variant="student", score=0.9),
            seen(3, 3, row="digits:local", variant="digits", score=0.1, escalated=True),
            seen(4, 5, row="student:local", variant="student", score=0.1, unsure=True),
        ),
        "nano": asked(seen(0, 3)),
    }  # fmt: skip
    return {device: {**usual, **changed}[device.name.partition("-")[0]] for device in DEVICES}


def summary(**changed: RequestLog) -> dict[str, Any]:
    return demo_summary(logs(**changed), scenario_events(), PLANS, {}, COUNTS)


def text_of(table: Any) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


def test_the_one_device_with_a_cascade_is_the_one_whose_link_drops() -> None:
    """There escalation pays, and its rows change; another one keeps its frames to itself and is cut inside."""
    assert [device.name for device in DEVICES if device.has_cascade] == [SLOWED_DEVICE]
    assert CASCADE.model == "numerals" and "--cascade" in CASCADE.plan_options
    assert [device.plan_options for device in DEVICES if device.keep_raw_input] == [("--keep-raw-input",)]


def test_an_answer_is_compared_with_the_variant_that_gave_it() -> None:
    """The student's own answer is not wrong, but changed against the whole model's; an answer that is neither is."""
    own = seen(0, 5, row="student:local", variant="student", score=0.9)
    assert own.same_top1 and own.equals_reference and own.changed and own.answered_first and own.row == "local"
    escalated = seen(0, 3, row="digits:cut-1", variant="digits", split_after="digits:stem", score=0.1, escalated=True)
    assert escalated.same_top1 and not escalated.changed and not escalated.answered_first
    assert (escalated.row, escalated.after) == ("cut-1", "stem")
    other = seen(0, 3, row="student:local", variant="student", score=0.9)
    assert not other.same_top1 and not other.changed
    assert not seen(0, 5).same_top1 and not seen(0, 5).changed


def test_changed_answers_stand_beside_the_promise_and_the_audits() -> None:
    """Three of five are the student's, all three other than the whole model's."""
    made = summary()
    cascade = made["devices"]["pi3-lte"]["cascade"]
    assert (cascade["escalated"], cascade["unsure"], cascade["changed"]) == (2, 1, 3)
    assert cascade["answered"] == {"student": 3, "digits": 2} and cascade["promised"] == 0.02
    assert cascade["audits"] == {"audited": 9, "changed": 1, "unaudited": 3, "alarms": 0}
    assert made["devices"]["pi3-lte"]["wrong"] == 0 and made["devices"]["nano-3g"]["cascade"] is None
    shown = text_of(summary_table(made))
    for figure in ("digits 2, student 3", "2, 1", "3 of 5; promised at most 2 %", "9, 1"):
        assert figure in shown
    assert problems(made) == []
    assert closing_sentence(made).startswith("Every request was answered exactly once")
    assert closing_sentence(made).endswith("3 of 5; promised at most 2 %.")


def test_switches_are_those_of_the_rows_that_were_selected() -> None:
    """A student that answers between two escalations is no switch."""
    device = summary()["devices"]["pi3-lte"]
    assert [cut["row"] for cut in device["cuts"]] == ["remote", "local"] and device["switches"] == 1


def test_audits_that_no_telemetry_brought_are_not_made_up() -> None:
    """The agent or the controller was killed at the end: that is told, and no zero."""
    made = demo_summary(logs(), scenario_events(), PLANS, {}, {"pi3-lte": None})
    assert made["devices"]["pi3-lte"]["cascade"]["audits"] is None
    assert "not reported" in text_of(summary_table(made))


def test_typed_errors_are_told_and_are_no_failure() -> None:
    """A request that got its error by the deadline has its outcome; the run does not claim that it was answered."""
    made = summary(nano=asked(seen(0, 3), failed=("DeadlineExceeded", "DeadlineExceeded", "Unsure")))
    assert problems(made) == []
    assert "DeadlineExceeded 2, Unsure 1" in text_of(summary_table(made))
    assert closing_sentence(made).startswith("8 of 11 requests were answered exactly once")
    assert "3 got a typed error" in closing_sentence(made)


@pytest.mark.parametrize(
    "samples, told",
    [
        ((seen(0, 5, row="student:local", variant="student", score=0.9),), "0 of 1 answers escalated"),
        ((seen(0, 3, row="digits:remote", variant="digits", score=0.1, escalated=True),), "1 of 1 answers escalated"),
        ((seen(0, 3, row="student:local", variant="student", score=0.9),), "1 wrong"),
    ],
)
def test_a_cascade_that_shows_nothing_is_a_failure(samples: tuple[Sample, ...], told: str) -> None:
    """Neither a student that is never unsure nor one that never answers shows a cascade; nor does a wrong answer."""
    assert any(told in problem for problem in problems(summary(pi3=asked(*samples))))


def test_the_picture_tells_first_answers_from_escalated_ones(tmp_path: Path) -> None:
    """By colour: the student's, the whole model's by the row that it took, and an unsure one as a cloud not reached."""
    first, escalated, *_, unsure = logs()[CASCADE].samples
    assert [colour_of(sample) for sample in (first, escalated, unsure)] == [FIRST, REMOTE, FALLBACK]
    assert colour_of(replace(escalated, fallback=True)) == FALLBACK
    draw(logs(), scenario_events(), tmp_path / "demo.svg")
    assert "student, where sure" in (tmp_path / "demo.svg").read_text()
