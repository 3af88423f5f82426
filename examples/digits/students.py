"""What the smaller models are worth beside the whole one: right, equal, size, work, seconds.

    python students.py          as committed: student.onnx and pruned.onnx against digits.onnx

Needs numpy, pillow, onnx and onnxruntime (zstandard for measure.py's other figures); no PyTorch.
"""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from evaluate import read_frame
from measure import Measured
from numpy.typing import NDArray
from samples import DEFAULT_COUNT, DEFAULT_SEED, samples

HERE = Path(__file__).parent
Z_90 = 1.6449
"""Standard deviations of a normal variable that hold 90 % of it."""
TIMED_RUNS = 100


def decoded(jpegs: Sequence[bytes]) -> list[NDArray[np.float32]]:
    """Frames as the model reads them."""
    return [read_frame(io.BytesIO(jpeg)) for jpeg in jpegs]


def answers(model: Path, frames: Sequence[NDArray[np.float32]]) -> NDArray[np.int64]:
    """The digit that the model sees on each frame."""
    session = _session(model)
    return np.array([int(session.run(None, {"image": frame})[0].argmax()) for frame in frames])


def interval(right: int, trials: int) -> list[float]:
    """Wilson's interval of a share, 90 % sure, rounded to 0.1 %."""
    share, z = right / trials, Z_90
    centre = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return [round((centre - half) / scale, 3), round(min(1.0, (centre + half) / scale), 3)]


def compare(whole: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Accuracy of each model, and its agreement with `whole`, on samples.py's frames; size, work and seconds."""
    jpegs, labels = zip(*samples(DEFAULT_COUNT, DEFAULT_SEED), strict=True)
    frames, truth = decoded(jpegs), np.array(labels)
    theirs = answers(whole, frames)
    return {"samples": {"count": DEFAULT_COUNT, "seed": DEFAULT_SEED}} | {
        model.stem: _figures(model, answers(model, frames), theirs, truth) for model in (whole, *others)
    }


def seconds(models: Sequence[Path]) -> dict[str, float]:
    """Median seconds of one frame, one thread, the models in turn so that a busy machine slows all of them alike."""
    sessions = [(_session(model), model.stem) for model in models]
    frame = np.zeros((1, 3, 128, 128), np.float32)
    taken: dict[str, list[float]] = {name: [] for _, name in sessions}
    for _ in range(TIMED_RUNS):
        for session, name in sessions:
            started = time.perf_counter()
            session.run(None, {"image": frame})
            taken[name].append(time.perf_counter() - started)
    return {name: float(np.median(times)) for name, times in taken.items()}


def _figures(
    model: Path, ours: NDArray[np.int64], theirs: NDArray[np.int64], truth: NDArray[np.int64]
) -> dict[str, Any]:
    right, equal, total = int((ours == truth).sum()), int((ours == theirs).sum()), len(truth)
    measured = Measured(onnx.load(model))
    return {
        "right": right,
        "accuracy": round(right / total, 3),
        "accuracy_90": interval(right, total),
        "agrees": round(equal / total, 3),
        "agrees_90": interval(equal, total),
        "bytes": model.stat().st_size,
        "parameters": measured.parameters,
        "mflop": round(measured.mflop()["total"], 2),
        "nodes": len(onnx.load(model).graph.node),
    }


def _session(model: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def main() -> None:
    """Print the comparison and the seconds on this machine."""
    files = [HERE / "digits.onnx", HERE / "student.onnx", HERE / "pruned.onnx"]
    print(json.dumps(compare(files[0], files[1:]), indent=2))
    for name, median in seconds(files).items():
        print(f"{name}: {median * 1000:.2f} ms a frame, one thread")


if __name__ == "__main__":
    main()
