"""Cascades: how often the promise of a threshold breaks, what stays on the device, and how soon audits notice.

Three pairs of the ladder on its 500 photographs and two of the digits family on 600 frames, which are the world:
calibration frames are drawn from them with replacement, and the truth is the share over all of them. Beside it worlds
at the limit whose frames are never seen twice. Then the sequential test of audits: streams at exactly the limit, at
multiples of it, and streams in which labels are rotated or photographs darkened after a while. Then what a cascade
costs, as the planner predicts it for a board: calibrated on all photographs, beside the best row of the variant that
it asks second.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import digits_family
import ladder
import msgspec
import numpy as np
import numpy.typing as npt
from audit_streams import first_alarms, share_by_frame
from digits_family import digit_frame_bytes, digit_outputs, digit_truth, digit_variant
from ladder import LADDER, ladder_outputs, photograph_labels, photographs
from ladder_costs import RUNGS, median_frame_bytes, rung, variant_of
from promise_worlds import AtOnce, Photographs, Rising, World, count_broken, fix_threshold
from record import Target, finish, make_parser, models_folder, percentile

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.answers.comparison import is_right, predicted_label
from edgesplit.answers.score import score
from edgesplit.errors import InfeasibleLimits
from edgesplit.links import parse_link
from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest, FamilyAnswers, VariantAnswers
from edgesplit_partitioner.planner.family import Variant, plan_family

ALLOWED = (0.01, 0.02, 0.05)
DELTA = 0.1
CALIBRATION_FRAMES = 300
SURE = 0.01
"""A target on a share is missed if its lower bound, 99 % sure, exceeds what was promised."""
MOST_ALARMS = 1_070
"""Of 10,000 streams: a true probability of 10 % exceeds it once in a hundred runs."""
STREAM_FRAMES = 5_000
"""Audited frames of a stream at the limit."""
DRIFT_STREAMS = 500
GOOD_FRAMES = 500
"""Audited frames before the drift."""
DRIFT_FRAMES = 3_000
"""Audited frames after it, within which an alarm counts."""
FRAMES_PER_S = 10.0
AUDITED = 0.01
"""Share of frames that are audited, for seconds: one audit in 10 s."""
BRIGHTNESS = (0.4, 0.2)
"""Of darkened photographs."""
ROTATED = "labels rotated"
LINKS = ("8mbit/30ms", "1mbit/60ms")
BOARDS = ("raspberrypi3b+", "raspberrypi4")


@dataclass(frozen=True, slots=True)
class Task:
    """Models of one task on the same labelled frames."""

    pairs: tuple[tuple[str, str], ...]
    """Small model and big model."""
    rule: AnswerRule
    classes: int
    truth: Callable[[], tuple[int, ...]]
    """Label of each frame."""
    outputs: Callable[[str, float], Sequence[Mapping[str, npt.NDArray[Any]]]]
    """Of a model, by its name, on each frame at a brightness."""
    variant: Callable[[str, str, int], Variant]
    """A model's costs on a board, for frames of so many bytes."""
    frame_bytes: Callable[[], int]
    missing: Callable[[str], list[str]]
    """Files of a model that are not here."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models on the frames: the small one's scores, and whether the big one differs."""

    task: Task = field(repr=False)
    small: str
    big: str
    world: Photographs = field(repr=False)
    drifts: Mapping[str, Photographs] = field(repr=False)
    """The world after a change, by its name: the small one's labels moved by one, as by a wrong map, or both models on
    darkened frames."""
    small_right: float
    big_right: float

    @property
    def name(self) -> str:
        """Both names."""
        return f"{self.small}, {self.big}"


@dataclass(frozen=True, slots=True)
class Labels:
    """A model's answers and scores on all frames."""

    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    right: float


def ladder_truth() -> tuple[int, ...]:
    """Label of each photograph."""
    return tuple(label for _, label in photographs())


def ladder_variant(name: str, board: str, frame_bytes: int) -> Variant:
    """A model of the ladder with its costs."""
    return variant_of(rung(rung_name(name)), board, frame_bytes)


def rung_name(name: str) -> str:
    """A model of the ladder as the name of a variant."""
    return next(rung for rung, model in RUNGS.items() if model.name == name and model == LADDER[name])


LADDER_TASK = Task(
    pairs=(("v1_0.25", "v1_0.75"), ("v1_0.5", "v2_1.0"), ("v1_0.75", "v2_1.0")), rule=ladder.RULE, classes=1000,
    truth=ladder_truth, outputs=lambda name, brightness: ladder_outputs(LADDER[name], brightness),
    variant=ladder_variant, frame_bytes=median_frame_bytes,
    missing=lambda name: [path.name for path in (LADDER[name].path, photograph_labels()) if not path.is_file()],
)  # fmt: skip
DIGITS_TASK = Task(
    pairs=(("student", "digits"), ("pruned", "digits")), rule=digits_family.RULE, classes=digits_family.CLASSES,
    truth=digit_truth, outputs=digit_outputs, variant=digit_variant, frame_bytes=digit_frame_bytes,
    missing=lambda _: [],
)  # fmt: skip
TASKS = (LADDER_TASK, DIGITS_TASK)


def answers_of(task: Task, name: str, brightness: float = 1.0) -> Labels:
    """Answers of a model."""
    outputs = task.outputs(name, brightness)
    rights = [is_right(task.rule, output, label) for output, label in zip(outputs, task.truth(), strict=True)]
    return Labels(
        np.array([predicted_label(task.rule, output) for output in outputs]),
        np.array([score("margin", task.rule, output) for output in outputs]),
        float(np.mean(rights)),
    )


def make_pair(task: Task, small: str, big: str) -> Pair:
    """Run or read both models, on frames as they are and darkened."""
    ours, theirs = answers_of(task, small), answers_of(task, big)
    drifts = {ROTATED: Photographs(ours.scores, (ours.labels + 1) % task.classes != theirs.labels)}
    for brightness in BRIGHTNESS:
        dark_ours, dark_theirs = answers_of(task, small, brightness), answers_of(task, big, brightness)
        drifts[f"darkened to {brightness}"] = Photographs(dark_ours.scores, dark_ours.labels != dark_theirs.labels)
    world = Photographs(ours.scores, ours.labels != theirs.labels)
    return Pair(task, small, big, world, drifts, ours.right, theirs.right)


def promises(
    name: str, world_at: Callable[[float], World], draws: int, random: np.random.Generator
) -> Iterator[tuple[dict[str, Any], Target]]:
    """Of each allowance: how often the promise broke, what stays, and the target."""
    for allowed in ALLOWED:
        frames = CALIBRATION_FRAMES
        promise = count_broken(world_at(allowed), allowed, DELTA, draws=draws, frames=frames, random=random)
        least = lower_share(promise.broken, promise.draws, SURE)
        target = f"{name}, {allowed:.0%} allowed: lower bound of the share of broken promises"
        yield (
            {"world": name, "allowed": allowed, **asdict(promise), "least_broken": least},
            Target(target, least, DELTA),
        )


def limit_streams(streams: int, random: np.random.Generator) -> Iterator[tuple[dict[str, Any], Target | None]]:
    """Alarms of streams at the limit and at multiples of it, with the target on those at the limit."""
    for allowed in ALLOWED:
        for multiple in (1, 1.5, 2, 5):
            count = streams if multiple == 1 else max(1, streams // 10)
            draw = share_by_frame([(0, allowed * multiple)], random)
            at = first_alarms(allowed, DELTA, count, STREAM_FRAMES, draw)
            row = {"allowed": allowed, "changed": allowed * multiple, "streams": count, **alarm_times(at)}
            goal = MOST_ALARMS * streams / 10_000
            name = f"alarms in {streams} streams at exactly {allowed:.0%}, {STREAM_FRAMES} audited frames each"
            yield row, Target(name, row["alarms"], goal) if multiple == 1 else None


def alarm_times(at: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Alarms, and audited frames until them; times at which half or 95 % of all streams have had theirs, None where
    they have not."""
    waited = [float(frames) if frames else float("inf") for frames in at]
    half, most = percentile(waited, 0.5), percentile(waited, 0.95)
    return {
        "alarms": int((at > 0).sum()),
        "median_frames": None if half == float("inf") else int(half),
        "p95_frames": None if most == float("inf") else int(most),
    }


def drift(pair: Pair, what: str, allowed: float, random: np.random.Generator) -> dict[str, Any]:
    """Streams in which the world changes after `GOOD_FRAMES` audited frames, each with a threshold of its own. Alarms
    are counted among those that the change brings above the limit."""
    after = pair.drifts[what]
    choices = [fix_threshold(pair.world, allowed, DELTA, CALIBRATION_FRAMES, random) for _ in range(DRIFT_STREAMS)]
    thresholds = np.array([np.inf if choice.threshold is None else choice.threshold for choice in choices])

    def draw(frame: int, streams: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        scores, differs = (pair.world if frame < GOOD_FRAMES else after).draw(len(streams), random)
        return differs & (scores >= thresholds[streams])

    at = first_alarms(allowed, DELTA, DRIFT_STREAMS, GOOD_FRAMES + DRIFT_FRAMES, draw)
    early = (at > 0) & (at <= GOOD_FRAMES)
    changed_after = np.array([after.loss(threshold) for threshold in thresholds])
    above = at[(changed_after > allowed) & ~early]
    delays = alarm_times(np.where(above > 0, above - GOOD_FRAMES, 0)) if len(above) else {"median_frames": None}
    seconds = None if delays["median_frames"] is None else delays["median_frames"] / (FRAMES_PER_S * AUDITED)
    return {
        "pair": pair.name,
        "drift": what,
        "allowed": allowed,
        "changed_before": float(np.mean([pair.world.loss(threshold) for threshold in thresholds])),
        "changed_after": float(changed_after.mean()),
        "stay_before": float(np.mean([pair.world.stay(threshold) for threshold in thresholds])),
        "stay_after": float(np.mean([after.stay(threshold) for threshold in thresholds])),
        "streams": DRIFT_STREAMS,
        "streams_above": len(above),
        "early_alarms": int(early.sum()),
        **delays,
        "median_s": seconds,
    }


def prices(pair: Pair) -> Iterator[dict[str, Any]]:
    """What the cascade of a pair costs on each board and link at each allowance, predicted, beside the best row of the
    big one; calibrated on all frames."""
    task, frame_bytes = pair.task, pair.task.frame_bytes()
    names = [pair.task.variant(name, BOARDS[0], frame_bytes).name for name in (pair.small, pair.big)]
    given = [answers_of(task, name) for name in (pair.small, pair.big)]
    answers = FamilyAnswers(
        answer=task.rule.to_text(), truth=task.truth(),
        variants={
            name: VariantAnswers(labels=tuple(one.labels.tolist()), scores={"margin": tuple(one.scores.tolist())})
            for name, one in zip(names, given, strict=True)
        },
    )  # fmt: skip
    for board in BOARDS:
        variants = [task.variant(name, board, frame_bytes) for name in (pair.small, pair.big)]
        for link, allowed in itertools.product(LINKS, ALLOWED):
            request = CascadeRequest(changed=allowed, variants=(names[0], names[1]))
            row = {"pair": pair.name, "board": board, "link": link, "allowed": allowed}
            try:
                planned = plan_family(
                    "family@1", variants, {"device-cloud": parse_link(link)}, cascade=request, answers=answers
                ).cascade
            except InfeasibleLimits as error:
                yield row | {"refused": str(error)}
                continue
            assert planned is not None
            yield row | {
                "stay": 1.0 - planned.cascade.escalated, "accuracy": planned.way.accuracy, "gain": planned.gain,
                "escalated_to": planned.second_row, "cascade": msgspec.structs.asdict(planned.way.figures),
                "alone": planned.alone.name, "alone_accuracy": planned.alone.accuracy,
                "alone_figures": msgspec.structs.asdict(planned.alone.figures),
            }  # fmt: skip


def print_price(row: dict[str, Any]) -> None:
    """One line of what a cascade costs beside the best row without it."""
    if "refused" in row:
        print(f"{row['pair']:18} {row['board']:15} {row['link']:10} {row['allowed']:4.0%} allowed: {row['refused']}")
        return
    ours, theirs = row["cascade"], row["alone_figures"]

    def text(figures: dict[str, Any]) -> str:
        joules = "-" if figures["joules"] is None else f"{figures['joules'] * 1e3:.0f} mJ"
        times = f"{figures['seconds'] * 1e3:.0f} ms, p95 {figures['p95_s'] * 1e3:.0f}"
        return f"{times}, {joules}, {figures['server_runs']:.2f} server runs"

    print(
        f"{row['pair']:18} {row['board']:15} {row['link']:10} {row['allowed']:4.0%} allowed: {row['stay']:4.0%} stay,"
        f" {row['accuracy']:.1%}: {text(ours)}; {row['alone']} {row['alone_accuracy']:.1%}: {text(theirs)};"
        f" {row['gain']:.2f} times (predicted)"
    )


def print_promise(row: dict[str, Any]) -> None:
    """One line of what stays and what broke."""
    print(
        f"{row['world']:34} {row['allowed']:4.0%} allowed: {row['stay']:6.1%} stay, {row['loss']:6.2%} changed,"
        f" {row['broken']} of {row['draws']} broken"
    )


def print_drift(row: dict[str, Any]) -> None:
    """One line of a drift: how far, and how soon it was noticed."""
    seconds = "-" if row["median_s"] is None else f"{row['median_s']:.0f} s"
    print(
        f"{row['pair']:18} {row['drift']:15} {row['allowed']:4.0%} allowed: {row['changed_before']:.1%} to"
        f" {row['changed_after']:.1%} changed, {row['stay_before']:.0%} to {row['stay_after']:.0%} stay;"
        f" {row['early_alarms']} early alarms; {row['streams_above']} of {row['streams']} streams above the limit:"
        f" {row.get('alarms', 0)} alarms, median {row['median_frames']} audited frames ({seconds}),"
        f" p95 {row.get('p95_frames')}"
    )


def measure(options: Namespace) -> tuple[dict[str, Any], list[Target]]:
    """All measurements, printed as they come, with the targets."""
    random = np.random.default_rng(options.seed)
    print(f"seed {options.seed}")
    pairs, skipped = [], []
    for task in TASKS:
        for small, big in task.pairs:
            missing = [*task.missing(small), *task.missing(big)]
            if missing:
                skipped.append(f"{small}, {big} ({', '.join(dict.fromkeys(missing))} not in {models_folder()})")
            else:
                pairs.append(make_pair(task, small, big))
    worlds: list[tuple[str, Callable[[float], World]]] = [
        (pair.name, lambda _, world=pair.world: world)
        for pair in pairs  # type: ignore[misc]
    ]
    worlds += [("simulated, rising", lambda _: Rising()), ("simulated, all at once", AtOnce)]
    rows, targets = [], []
    for name, world_at in worlds:
        for row, target in promises(name, world_at, options.draws, random):
            print_promise(row)
            rows.append(row)
            targets.append(target)
    targets += [Target(f"{name}: share of broken promises", None, DELTA, left_out=(name,)) for name in skipped]
    streams = []
    for row, goal in limit_streams(options.streams, random):
        print(row)
        streams.append(row)
        targets += [goal] if goal else []
    drifts = [drift(pair, what, allowed, random) for pair in pairs for what in pair.drifts for allowed in ALLOWED]
    for row in drifts:
        print_drift(row)
    priced = [row for pair in pairs for row in prices(pair)]
    for row in priced:
        print_price(row)
    told = [
        {"pair": pair.name, "small_right": pair.small_right, "big_right": pair.big_right}
        | {"agree": float(1.0 - pair.world.differs.mean())}
        for pair in pairs
    ]
    results = {"seed": options.seed, "delta": DELTA, "calibration_frames": CALIBRATION_FRAMES}
    results |= {"frames_per_s": FRAMES_PER_S, "audited": AUDITED, "pairs": told}
    return results | {"promises": rows, "streams": streams, "drifts": drifts, "prices": priced}, targets


def main() -> None:
    """Measure, print, record."""
    parser = make_parser(__doc__)
    parser.add_argument("--draws", type=int, default=2_000, metavar="N", help="calibrations of each pair and allowance")
    parser.add_argument("--streams", type=int, default=10_000, metavar="N", help="streams at exactly the limit")
    parser.add_argument("--seed", type=int, default=15, metavar="N")
    options = parser.parse_args()
    results, targets = measure(options)
    finish(results, targets, options.json)


if __name__ == "__main__":
    sys.exit(main())
