"""Train the digit finder, export it, photograph the held-out digits, measure, and write all of it here.

    python train.py                  digits.onnx, frames/, figures.json
    python train.py --into FOLDER    the same, elsewhere: to see that a second run gives the same

Validation digits are for choosing what is written here; held-out digits are used once, after the last step.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from evaluate import accuracy
from export import to_onnx
from frames import Digits, Division, decode, divide, photograph
from measure import Measured
from network import FRAME_PX, DigitFinder
from numpy.typing import NDArray
from torch import Generator, Tensor
from torch.nn import functional

VALIDATION_DIGITS = 200
HELD_OUT_DIGITS = 200
WIDE_FRAMES_PER_DIGIT = 10
PIXEL_BYTES = FRAME_PX * FRAME_PX * 3


@dataclass(frozen=True)
class Seeds:
    """Where all randomness comes from."""

    division: int = 1
    weights: int = 2
    training: int = 3
    validation: int = 4
    held_out: int = 5


@dataclass(frozen=True)
class Stage:
    """Some steps at one frame size. Small frames come first: with less to search, a step costs a quarter."""

    frame_px: int
    batch: int
    steps: int


STAGES = (Stage(64, 64, 800), Stage(FRAME_PX, 32, 500))
THREADS = 2
STEPS_PER_LINE = 50
PEAK_RATE = 4e-3
WEIGHT_DECAY = 0.02
LABEL_SMOOTHING = 0.05
SPARSITY = (0.3, 0.1, 0.1)
"""What each narrow point costs per unit of density, beside the cross-entropy: zeros compress."""


def density(activations: Tensor) -> Tensor:
    """Mean over root mean square, frame by frame: 1 if all are equal, near 0 if few are not zero."""
    flat = activations.flatten(1)
    return (flat.mean(1) / (flat.square().mean(1) + 1e-6).sqrt()).mean()


def crowding(narrow: list[Tensor]) -> Tensor:
    """The price of everything that would have to cross a link."""
    return torch.stack([price * density(point) for price, point in zip(SPARSITY, narrow, strict=True)]).sum()


def train(digits: Digits, seeds: Seeds) -> DigitFinder:
    """The trained network. The same on every run of the same versions on the same kind of processor."""
    torch.manual_seed(seeds.weights)
    network = DigitFinder()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(network.parameters(), lr=PEAK_RATE, weight_decay=WEIGHT_DECAY)
    steps = sum(stage.steps for stage in STAGES)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, PEAK_RATE, total_steps=steps, pct_start=0.15)
    rng = Generator().manual_seed(seeds.training)
    for stage in STAGES:
        for step in range(stage.steps):
            batch = digits.pick(torch.randint(len(digits), (stage.batch,), generator=rng))
            image = decode(photograph(batch.ink, stage.frame_px, rng)).to(memory_format=torch.channels_last)
            logits, narrow = network.watch(image)
            error = functional.cross_entropy(logits, batch.label, label_smoothing=LABEL_SMOOTHING)
            loss = error + crowding(narrow)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            if (step + 1) % STEPS_PER_LINE == 0:
                print(f"{stage.frame_px} px, step {step + 1}: error {error:.3f}, loss {loss:.3f}", flush=True)
    return network


def write_frames(digits: Digits, seed: int, folder: Path) -> None:
    """One JPEG of each digit, and which digit it is."""
    folder.mkdir(parents=True, exist_ok=True)
    jpegs = photograph(digits.ink, FRAME_PX, Generator().manual_seed(seed))
    labels: dict[str, int] = {}
    for number, (jpeg, label) in enumerate(zip(jpegs, digits.label.tolist(), strict=True)):
        name = f"{number:03}.jpg"
        (folder / name).write_bytes(jpeg)
        labels[name] = label
    (folder / "labels.json").write_text(json.dumps(labels, indent=0) + "\n")


def wide_accuracy(model: onnx.ModelProto, digits: Digits, seed: int) -> float:
    """Accuracy over many frames of each digit, none of them kept."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = Generator().manual_seed(seed)
    right = 0
    for _ in range(WIDE_FRAMES_PER_DIGIT):
        images = decode(photograph(digits.ink, FRAME_PX, rng)).numpy()
        answers = [int(session.run(None, {"image": image[None]})[0].argmax()) for image in images]
        right += int((np.array(answers) == digits.label.numpy()).sum())
    return right / (WIDE_FRAMES_PER_DIGIT * len(digits))


def figures(model: onnx.ModelProto, division: Division, seeds: Seeds, into: Path) -> dict[str, Any]:
    """Everything the README states, from the files just written."""
    measured = Measured(model)
    frames = sorted((into / "frames").glob("*.jpg"))
    sizes = [frame.stat().st_size for frame in frames]
    images: NDArray[np.float32] = decode([frame.read_bytes() for frame in frames]).numpy()
    points = measured.narrow_points(below_bytes=PIXEL_BYTES)
    return {
        "accuracy": {
            "held_out": accuracy(into / "digits.onnx", into / "frames"),
            "held_out_wide": wide_accuracy(model, division.held_out, seeds.held_out + 1),
            "validation_wide": wide_accuracy(model, division.validation, seeds.validation),
        },
        "digits": {part: len(getattr(division, part)) for part in ("train", "validation", "held_out")},
        "mflop": {kind: round(value, 3) for kind, value in measured.mflop().items()},
        "parameters": measured.parameters,
        "model_bytes": (into / "digits.onnx").stat().st_size,
        "jpeg_bytes": {"min": min(sizes), "mean": round(float(np.mean(sizes))), "max": max(sizes)},
        "narrow_points": measured.compressed(points, images),
        "seeds": asdict(seeds),
        "threads": THREADS,
    }


def versions() -> dict[str, str]:
    """What else decides the outcome."""
    packages = ("torch", "scikit-learn", "numpy", "pillow", "onnx", "onnxruntime", "zstandard")
    python = {"python": platform.python_version(), "machine": platform.machine()}
    return python | {package: version(package) for package in packages}


def main() -> None:
    """Train, export, photograph, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="where the files go")
    into: Path = parser.parse_args().into
    seeds = Seeds()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(THREADS)
    division = divide(seeds.division, VALIDATION_DIGITS, HELD_OUT_DIGITS)
    started = time.monotonic()
    network = train(division.train, seeds)
    training_s = time.monotonic() - started
    write_frames(division.held_out, seeds.held_out, into / "frames")
    model = to_onnx(network)
    onnx.save(model, into / "digits.onnx")
    found = figures(model, division, seeds, into)
    found |= {"training_seconds": round(training_s), "versions": versions()}
    (into / "figures.json").write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
