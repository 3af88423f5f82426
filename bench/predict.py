"""How well times are predicted: calibrated here, then whole models and halves that the calibration never saw.

Each model is run whole, and cut at a few places into a device and a cloud half; measured are medians, the least of
several rounds in turns, since others use the machine too.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from record import Target, finish, make_parser, models_folder, percentile

from edgesplit.device_profile import DeviceProfile, load_profile
from edgesplit.errors import EdgeError
from edgesplit_partitioner.calibration.calibrate import calibrate
from edgesplit_partitioner.costs.predict import Prediction, Predictor
from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.onnx_format.model import prepare_model
from edgesplit_partitioner.profiling.slices import measure_slices
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_slices

ROOT = Path(__file__).parent.parent
MODELS: Mapping[str, Mapping[str, int]] = {
    "mnist_cnn": {},
    "gesture_mlp": {"batch": 1},
    "dtln_1": {},
    "dtln_2": {},
    "silero_vad_16k": {"batch": 1, "sequence": 576},
    "squeezenet_fp32": {},
    "squeezenet_fp16": {},
    "ultraface_rfb_320": {},
    "yolox_nano": {},
}
"""File names of the models, with their free dimensions."""
MATERIALISED = ("light_resnet50", "light_squeezenet")
CUT_POSITIONS = (0.12, 0.3, 0.5, 0.7, 0.88)
"""Places of the cuts, as ratios of the number of layers in the order in which they run."""
ROUNDS = 4
MEDIAN, P95 = 0.10, 0.25


@dataclass(slots=True)
class Case:
    """A slice of a model, with its predicted and its measured seconds."""

    model: str
    part: str
    predicted: Prediction
    seconds: list[float] = field(default_factory=list)
    """Median seconds of each round."""

    @property
    def measured_s(self) -> float:
        """Seconds of the least disturbed round."""
        return min(self.seconds)

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return abs(self.predicted.seconds / self.measured_s - 1)

    def as_json(self) -> dict[str, Any]:
        """The case as JSON, in milliseconds."""
        return {
            "model": self.model,
            "part": self.part,
            "predicted_ms": round(1e3 * self.predicted.seconds, 4),
            "low_ms": round(1e3 * self.predicted.low_s, 4),
            "high_ms": round(1e3 * self.predicted.high_s, 4),
            "measured_ms": round(1e3 * self.measured_s, 4),
            "error": round(self.error, 4),
            "inside": self.predicted.low_s <= self.measured_s <= self.predicted.high_s,
        }


def find_models(folder: Path, scratch: Path, left_out: list[str]) -> Iterator[tuple[str, PreparedModel]]:
    """The project's own model, and those of `MODELS` and `MATERIALISED` that are in the folder. The others are added to
    `left_out`, with the reason."""
    yield "digits", prepare_model((ROOT / "examples/digits/digits.onnx").read_bytes())
    for name, bindings in MODELS.items():
        path = folder / "models" / f"{name}.onnx"
        if path.exists():
            yield name, prepare_model(path.read_bytes(), bindings)
        else:
            left_out.append(f"{name} ({path} is not there)")
    for name in MATERIALISED:
        source, target = folder / "topology" / f"{name}.onnx", scratch / f"{name}.onnx"
        command = [sys.executable, str(folder / "tools/materialise_light.py"), str(source), str(target)]
        if source.exists() and not subprocess.run(command, capture_output=True, check=False).returncode:
            yield name, prepare_model(target.read_bytes())
        else:
            left_out.append(f"{name} ({source} is not there, or cannot be made)")


def cuts(model: PreparedModel) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """The whole model, and each pair of halves, as groups of layers."""
    names = [layer.name for layer in model.graph.layers]
    yield "whole", [tuple(names)]
    for place in sorted({max(1, min(len(names) - 1, round(part * len(names)))) for part in CUT_POSITIONS}):
        yield f"after {place} of {len(names)}", atoms(model.graph, [frozenset(names[:place])])


def cases(name: str, model: PreparedModel, predictor: Predictor) -> list[tuple[list[Case], list[CutSlice]]]:
    """All slices of a model, with predicted seconds."""
    layers = {layer.name: layer for layer in model.graph.layers}
    cases_by_cut = []
    for where, groups in cuts(model):
        cut = cut_slices(model, model.graph, groups, None)
        parts = ["whole"] if len(cut) == 1 else [f"device, {where}", f"cloud, {where}"]
        chosen = [
            Case(name, part, _predict(predictor, [layers[layer] for layer in group], slice_))
            for part, group, slice_ in zip(parts, groups, cut, strict=True)
        ]
        cases_by_cut.append((chosen, cut))
    return cases_by_cut


def _predict(predictor: Predictor, layers: Sequence[Layer], cut: CutSlice) -> Prediction:
    """The slice's seconds with the cost of a run beyond its operators, which the sum over its layers leaves out."""
    together, fit = predictor.predict_sum(layers), predictor.profile.fit
    if fit is None:
        return together
    around_s = fit.run_s + max(len(cut.slice.inputs) + len(cut.slice.outputs) - 2, 0) * fit.tensor_s
    return Prediction(together.seconds + around_s, together.low_s + around_s, together.high_s + around_s)


def measure(slices: Sequence[tuple[list[Case], list[CutSlice]]], runs: int) -> None:
    """Measure in rounds over all slices, so that a disturbance affects all of them."""
    for _ in range(ROUNDS):
        for chosen, cut in slices:
            times = measure_slices(cut, runs=runs, seconds=2.0)
            for case, one in zip(chosen, cut, strict=True):
                case.seconds.append(times[one.slice.name].median_s)


def main() -> None:
    """Calibrate, predict, measure, compare, write."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="of calibration")
    parser.add_argument("--profile", type=Path, help="a profile calibrated on this machine, instead of calibrating")
    parser.add_argument(
        "--models", type=Path, default=models_folder(), help="folder of trained models [$EDGESPLIT_MODELS]"
    )
    parser.add_argument("--runs", type=int, default=15)
    given = parser.parse_args()
    begun = time.perf_counter()
    profile = load_profile(given.profile) if given.profile else _calibrate(given.minutes)
    calibrated_s = time.perf_counter() - begun
    predictor = Predictor(profile)
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as scratch:
        pairs = [
            pair
            for name, model in find_models(given.models, Path(scratch), left_out)
            for pair in _try(name, model, predictor, left_out)
        ]
        measure(pairs, given.runs)
    _report([case for chosen, _ in pairs for case in chosen], profile, calibrated_s, tuple(left_out), given.json)


def _calibrate(minutes: float) -> DeviceProfile:
    return calibrate(
        "here", base=load_profile("generic-x86"), minutes=minutes, threads=1, today=date.today().isoformat()
    )


def _try(
    name: str, model: PreparedModel, predictor: Predictor, left_out: list[str]
) -> list[tuple[list[Case], list[CutSlice]]]:
    """All slices of a model, predicted; an empty list where the model is refused, which is added to `left_out`."""
    try:
        return cases(name, model, predictor)
    except EdgeError as error:
        left_out.append(f"{name} ({error})")
        return []


def _report(
    every: Sequence[Case], profile: DeviceProfile, calibrated_s: float, left_out: tuple[str, ...], path: Path | None
) -> None:
    for case in every:
        row = case.as_json()
        print(
            f"{case.model:18} {case.part:26} predicted {row['predicted_ms']:9.3f} [{row['low_ms']:.3f} to "
            f"{row['high_ms']:.3f}], measured {row['measured_ms']:9.3f} ms, off by {case.error:6.1%}"
        )
    errors = [case.error for case in every]
    wholes = [case.error for case in every if case.part == "whole"]
    inside = sum(case.as_json()["inside"] for case in every) / len(every)
    fit = profile.fit
    assert fit is not None
    results = {
        "calibration_s": round(calibrated_s, 1),
        "cases": [case.as_json() for case in every],
        "median_error": percentile(errors, 0.5),
        "p95_error": percentile(errors, 0.95),
        "whole_models": {"median_error": percentile(wholes, 0.5), "worst_error": max(wholes)},
        "inside_the_interval": inside,
        "interval_of_whole_networks": [fit.whole.low, fit.whole.high],
    }
    print(f"{len(every)} slices of {len(wholes)} models; {inside:.0%} inside their interval")
    targets = [
        Target("median error of whole models and halves", percentile(errors, 0.5), MEDIAN, left_out=left_out),
        Target("p95 error of whole models and halves", percentile(errors, 0.95), P95, left_out=left_out),
    ]
    finish(results, targets, path)


if __name__ == "__main__":
    main()
