"""Still frames of a made-up video with known truth: what is repeated, what of it is wrong, and how often audits say so.

The video has scenes that stand still under a sensor's noise, each a held-out frame of the digits example; the model is
its distilled student, which changes its mind within some of them. These scenes are the world: a stream draws them with
replacement, never one twice in a row, calibrates until enough frames have counted, and works on. The truth of a
threshold is what it would change over the whole world. Frames come once a second of the stream's own clock; nothing is
timed.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import numpy as np
import onnxruntime
from PIL import Image
from record import Target, finish, make_parser

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.input_spec import FRAME, parse_input_spec
from edgesplit.oip.report import Report
from edgesplit_agent.policy.frame_difference import Thumbnail, difference, thumbnail
from edgesplit_agent.serving.request import Answer
from edgesplit_agent.serving.still_stream import StillStream
from edgesplit_cli.demo.scenario import INPUT_SPEC
from edgesplit_partitioner.bounds.binomial import lower_share
from support.still_video import one_hot, video

STUDENT = Path(__file__).parents[1] / "examples" / "digits" / "student.onnx"
SCENES, FRAMES_PER_SCENE, NOISES = 30, 50, (4.0, 12.0)
"""Scenes of the world, frames of each, and standard deviations of the noise in grey levels."""
SETTINGS = ((0.05, 0), (0.05, 17), (0.05, 50), (0.02, 50), (0.01, 50))
"""Share of answers that may change, and the spacing of the frames that count, in seconds."""
WORK_SCENES = 100
"""Scenes of a stream after its calibration."""
BROKEN, SURE = 0.10, 0.01
"""Share of streams whose promise may be broken; a target is missed if its lower bound, 99 % sure, exceeds it."""
RULE = AnswerRule("class", ("y",))
ANSWERS = [Answer(one_hot(label), Report(release="a" * 64, row="local")) for label in range(10)]


@dataclass(frozen=True, slots=True)
class Shown:
    """A frame as a stream sees it, and what the model says to it."""

    thumbnail: Thumbnail
    label: int


World = list[list[Shown]]
"""Frames by scene."""


@dataclass(frozen=True, slots=True)
class Course:
    """What came of one stream."""

    calibrated_frames: int
    """Frames until its calibration ended."""
    threshold: float
    """What it found, in parts of full scale; 0: nothing is repeated."""
    repeated: float
    """Share of the frames at work whose answer was repeated; of all frames at work, those"""
    changed: float
    """whose repeated answer was not the model's."""
    audited: int
    """Frames at work that were drawn for audit."""
    alarms: int


def world(scenes: int, frames: int, noise: float, seed: int) -> World:
    """The video and the student's answers to it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    student = onnxruntime.InferenceSession(str(STUDENT), options)
    spec, name = parse_input_spec(INPUT_SPEC), student.get_inputs()[0].name
    shown: World = [[] for _ in range(scenes)]
    for frame in video(scenes, frames, seed, noise):
        made = thumbnail({FRAME: np.frombuffer(frame.jpeg, np.uint8)}, spec)
        assert made is not None, "the video's frames can be decoded"
        pixels = np.asarray(Image.open(io.BytesIO(frame.jpeg)), np.float32).transpose(2, 0, 1)[None]
        (scores,) = student.run(None, {name: pixels / np.float32(255)})
        shown[frame.scene].append(Shown(made, int(scores.argmax())))
    return shown


def drawn_frames(shown: World, draws: random.Random) -> Iterator[Shown]:
    """Frames without end, scene after scene, each from any of its frames on, for half to one and a half times its
    frames: if all were equally long, a spacing of that length would count each scene's first frame alone."""
    scene = -1
    while True:
        scene = draws.choice([other for other in range(len(shown)) if other != scene])
        frames = shown[scene]
        first = draws.randrange(len(frames))
        for place in range(draws.randint(len(frames) // 2, len(frames) + len(frames) // 2)):
            yield frames[(first + place) % len(frames)]


def changed_by(shown: World, threshold: float) -> float:
    """Share of answers that a threshold would change, over all scenes, each from each of its frames on."""
    changed = frames = 0
    for scene in shown:
        distances = _Distances(scene)
        for first in range(len(scene)):
            reference = first
            for place in range(first + 1, first + len(scene)):
                frame = place % len(scene)
                if distances.between(reference, frame) < threshold:
                    changed += scene[reference].label != scene[frame].label
                else:
                    reference = frame
            frames += len(scene)
    return changed / frames


class _Distances:
    """Differences of a scene's frames, each computed once."""

    def __init__(self, scene: list[Shown]) -> None:
        self._scene = scene
        self._known: dict[tuple[int, int], float] = {}

    def between(self, reference: int, frame: int) -> float:
        """The difference of a frame to the one that was answered."""
        if (known := self._known.get((reference, frame))) is None:
            known = difference(self._scene[reference].thumbnail, self._scene[frame].thumbnail)
            self._known[reference, frame] = known
        return known


def play(stream: StillStream, frame: Shown, at: float, draws: random.Random) -> tuple[bool, bool, bool]:
    """One frame through the stream: whether its answer was repeated, that was wrong, and it was drawn for audit."""
    look = stream.look(frame.thumbnail, at, draws.random() < stream.audit_probability)
    if look.repeats is not None and not look.is_audit:
        stream.on_repeated()
        return True, int(look.repeats.answer.outputs["y"].argmax()) != frame.label, False
    stream.on_answered(look, ANSWERS[frame.label])
    return False, False, look.is_audit


def course(shown: World, allowed: float, spacing_s: float, seed: int) -> Course:
    """One stream from its first frame to the end of its work."""
    draws = random.Random(seed)
    stream, frames = StillStream(RULE, allowed, spacing_s=spacing_s), drawn_frames(shown, draws)
    now = 0
    while stream.state == "calibrating":
        play(stream, next(frames), float(now), draws)
        now += 1
    calibrated, found = now, stream.threshold
    work = WORK_SCENES * len(shown[0])
    seen = [play(stream, frame, float(now + place), draws) for place, frame in enumerate(islice(frames, work))]
    repeated, changed, audited = (sum(flags) for flags in zip(*seen, strict=True))
    return Course(calibrated, found, repeated / work, changed / work, audited, stream.counts.alarms)


def summary(courses: list[Course], truth: Mapping[float, float], allowed: float, spacing_s: float) -> dict[str, Any]:
    """The figures of one setting; `truth`: the share that each threshold found changes."""
    return {
        "allowed": allowed, "spacing_s": spacing_s, "streams": len(courses),
        "calibrated_after_frames": float(np.median([each.calibrated_frames for each in courses])),
        "repeated": float(np.mean([each.repeated for each in courses])),
        "changed": float(np.mean([each.changed for each in courses])),
        "most_changed": max(each.changed for each in courses),
        "broken": sum(truth[each.threshold] > allowed for each in courses),
        "truly_changed": {f"{threshold:.5f}": share for threshold, share in truth.items()},
        "streams_with_alarms": sum(each.alarms > 0 for each in courses),
        "alarms": sum(each.alarms for each in courses),
        "audited": sum(each.audited for each in courses),
        "courses": [asdict(each) for each in courses],
    }  # fmt: skip


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Target]]:
    """All settings in each world, and the targets of those whose spacing is as long as a scene."""
    results, targets = [], []
    for noise in options.noise:
        shown = world(options.scenes, options.frames, noise, options.seed)
        unsure = sum(len({frame.label for frame in scene}) > 1 for scene in shown)
        print(
            f"noise {noise:g}, {options.scenes} scenes of {options.frames} frames, {unsure} of them unsure:", flush=True
        )
        for allowed, spacing_s in options.settings:
            courses = [course(shown, allowed, spacing_s, options.seed + number) for number in range(options.streams)]
            truth = {found: changed_by(shown, found) for found in sorted({each.threshold for each in courses})}
            told = {"noise": noise, "unsure_scenes": unsure, **summary(courses, truth, allowed, spacing_s)}
            results.append(told)
            print(_line(told), flush=True)
            if spacing_s >= options.frames:
                name = f"noise {noise:g}, {allowed:.0%} allowed, spacing of a scene: lower bound of broken promises"
                targets.append(Target(name, lower_share(told["broken"], len(courses), SURE), BROKEN))
    return {"seed": options.seed, "settings": results}, targets


def _line(told: dict[str, Any]) -> str:
    return (
        f"  {told['allowed']:.0%} allowed, spacing {told['spacing_s']} s: {told['repeated']:.1%} repeated,"
        f" {told['changed']:.2%} changed (at most {told['most_changed']:.2%}),"
        f" {told['broken']} of {told['streams']} broken,"
        f" {told['alarms']} alarms in {told['streams_with_alarms']} streams ({told['audited']} audits),"
        f" calibrated after {told['calibrated_after_frames']:.0f} frames"
    )


def main() -> None:
    """Run it."""
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=20, help="streams of each setting (default %(default)s)")
    parser.add_argument("--scenes", type=int, default=SCENES, help="scenes of the world (default %(default)s)")
    parser.add_argument("--frames", type=int, default=FRAMES_PER_SCENE, help="frames of a scene (default %(default)s)")
    parser.add_argument("--noise", type=float, nargs="+", default=NOISES, help="grey levels (default: 4 and 12)")
    parser.add_argument("--seed", type=int, default=11)
    options = parser.parse_args()
    options.settings = SETTINGS
    results, targets = measure(options)
    finish(results, targets, options.json)


if __name__ == "__main__":
    main()
