"""Two smaller networks that learn from digits.onnx: a student of another shape, and the same network pruned.

    python distil.py                  student.onnx, pruned.onnx, held_out.npz, and their part of figures.json
    python distil.py --into FOLDER    the same, elsewhere: to see that a second run gives the same

Both see the same frames of training digits, and learn the whole network's answers on them beside the labels.
`digits.onnx` is read from here and is not changed. Validation digits choose; held-out digits are used once.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from export import to_onnx
from frames import Digits, Division, decode, divide, photograph
from network import DigitFinder, Student, Widths
from pruning import load, prune
from students import compare
from torch import Generator, Tensor, nn
from torch.nn import functional
from train import HELD_OUT_DIGITS, STEPS_PER_LINE, VALIDATION_DIGITS, Seeds, Stage, versions

HERE = Path(__file__).parent
STAGES = (Stage(64, 64, 600), Stage(128, 32, 200))
THREADS = 1
KEPT = Widths(early=32, trunk=16, head=48)
TEMPERATURE = 3.0
TAUGHT_PART = 0.7
"""How much of the loss is the whole network's answer; the rest is the label."""


@dataclass(frozen=True)
class DistilSeeds:
    """Where the randomness beyond train.py's comes from."""

    weights: int = 12
    training: int = 13


@dataclass(frozen=True)
class Course:
    """One network in training, and its highest rate of learning."""

    name: str
    network: nn.Module
    peak_rate: float


def distance(logits: Tensor, taught: Tensor, label: Tensor) -> Tensor:
    """Cross-entropy to the label and divergence from the whole network's softened answer (Hinton et al. 2015)."""
    softened = functional.log_softmax(logits / TEMPERATURE, dim=1)
    answer = functional.log_softmax(taught / TEMPERATURE, dim=1)
    divergence = functional.kl_div(softened, answer, reduction="batchmean", log_target=True) * TEMPERATURE**2
    return TAUGHT_PART * divergence + (1 - TAUGHT_PART) * functional.cross_entropy(logits, label)


def teach(teacher: DigitFinder, courses: list[Course], digits: Digits, seed: int) -> None:
    """Train each network on the same frames; the teacher answers once for all."""
    steps = sum(stage.steps for stage in STAGES)
    optimisers = [torch.optim.AdamW(c.network.parameters(), lr=c.peak_rate, weight_decay=0.01) for c in courses]
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimiser, course.peak_rate, total_steps=steps, pct_start=0.15)
        for optimiser, course in zip(optimisers, courses, strict=True)
    ]
    rng = Generator().manual_seed(seed)
    for stage in STAGES:
        for step in range(stage.steps):
            batch = digits.pick(torch.randint(len(digits), (stage.batch,), generator=rng))
            image = decode(photograph(batch.ink, stage.frame_px, rng)).to(memory_format=torch.channels_last)
            with torch.no_grad():
                taught = teacher(image)
            losses: list[str] = []
            for course, optimiser, schedule in zip(courses, optimisers, schedules, strict=True):
                loss = distance(course.network(image), taught, batch.label)
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
                schedule.step()
                losses.append(f"{course.name} {loss.item():.3f}")
            if (step + 1) % STEPS_PER_LINE == 0:
                print(f"{stage.frame_px} px, step {step + 1}: {', '.join(losses)}", flush=True)


def write_held_out(digits: Digits, file: Path) -> None:
    """The digits that samples.py draws: 16 levels of ink."""
    ink = (digits.ink * 16).round().to(torch.uint8).numpy()
    np.savez_compressed(file, ink=ink, label=digits.label.to(torch.uint8).numpy())


def trained(division: Division) -> dict[str, nn.Module]:
    """Both networks, by the name of their file."""
    seeds = DistilSeeds()
    teacher = load(onnx.load(HERE / "digits.onnx")).eval()
    torch.manual_seed(seeds.weights)
    courses = [
        Course("student", Student(), peak_rate=1e-2),
        Course("pruned", prune(teacher, KEPT), peak_rate=3e-3),
    ]
    for network in (teacher, *(course.network for course in courses)):
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    teach(teacher, courses, division.train, seeds.training)
    return {course.name: course.network for course in courses}


def main() -> None:
    """Teach, export, compare with the whole network, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=HERE, help="where the files go")
    into: Path = parser.parse_args().into
    into.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(THREADS)
    division = divide(Seeds().division, VALIDATION_DIGITS, HELD_OUT_DIGITS)
    write_held_out(division.held_out, into / "held_out.npz")
    started = time.monotonic()
    for name, network in trained(division).items():
        onnx.save(to_onnx(network), into / f"{name}.onnx")
    training_s = time.monotonic() - started
    figures = json.loads((HERE / "figures.json").read_text())
    figures["students"] = compare(HERE / "digits.onnx", [into / "student.onnx", into / "pruned.onnx"])
    figures["students"] |= {
        "seeds": asdict(DistilSeeds()),
        "threads": THREADS,
        "training_seconds": round(training_s),
        "versions": versions(),
    }
    (into / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures["students"], indent=2))


if __name__ == "__main__":
    main()
