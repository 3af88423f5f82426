"""How well times are predicted: calibrated here, then whole models and halves that the calibration never saw, as agents
run them.

Each model is run whole, and cut at a few places into a device and a cloud half. The agent's own tuning chooses the
engine options of the whole model and the device halves; cloud halves run as the offload server runs them. Measured are
medians, the least of several rounds in turns, since others use the machine too; the machine's load meanwhile is
recorded.
"""

from __future__ import annotations

import os
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

import msgspec
from record import Target, finish, make_parser, models_folder, percentile

from edgesplit.device_profile import DeviceProfile, load_profile
from edgesplit.errors import EdgeError
from edgesplit.runtime.options import EngineOptions
from edgesplit_agent.releases.tuning import TuningLimits, best_setup
from edgesplit_partitioner.calibration.calibrate import calibrate, profile_text
from edgesplit_partitioner.costs.predict import Prediction, Predictor, as_agents_run, as_servers_run
from edgesplit_partitioner.ir.graph import Layer
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.profiling.machine_load import load_between, read_counters
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
"""Names of the ONNX files, with their free dimensions."""
TFLITE = (
    "dtln_1",
    "dtln_2",
    "gesture_mlp",
    "mobilenet_v1_0.25_128_quant",
    "mobilenet_v1_0.25_224_float",
    "mobilenet_v1_0.5_160_quant",
    "mobilenet_v1_0.75_192_quant",
    "mobilenet_v2_1.0_224_quant",
    "resnet8_cifar10_float",
    "resnet8_cifar10_int8",
)
"""Names of the TFLite files."""
MATERIALISED = ("light_resnet50", "light_squeezenet")
CUT_POSITIONS = (0.12, 0.3, 0.5, 0.7, 0.88)
"""Places of the cuts, as ratios of the number of layers in the order in which they run."""
ROUNDS = 4
MEDIAN, P95, INSIDE = 0.10, 0.25, 0.90
OFFLOAD = EngineOptions()
"""Engine options of the offload server."""


@dataclass(slots=True)
class Case:
    """A slice of a model, with its predicted and its measured seconds."""

    model: str
    part: str
    predicted: Prediction
    setup: EngineOptions
    """Engine options with which it runs."""
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
            "setup": str(self.setup),
            "predicted_ms": round(1e3 * self.predicted.seconds, 4),
            "low_ms": round(1e3 * self.predicted.low_s, 4),
            "high_ms": round(1e3 * self.predicted.high_s, 4),
            "measured_ms": round(1e3 * self.measured_s, 4),
            "error": round(self.error, 4),
            "inside": self.predicted.low_s <= self.measured_s <= self.predicted.high_s,
        }


def find_models(folder: Path, scratch: Path, left_out: list[str]) -> Iterator[tuple[str, PreparedModel]]:
    """The project's own model, and those of `MODELS`, `TFLITE` and `MATERIALISED` that are in the folder. The others
    are added to `left_out`, with the reason."""
    yield "digits", prepare_model((ROOT / "examples/digits/digits.onnx").read_bytes(), {})
    files = {f"{name}.onnx": bindings for name, bindings in MODELS.items()}
    files |= {f"{name}.tflite": {} for name in TFLITE}
    for name, bindings in files.items():
        path = folder / "models" / name
        if path.exists():
            yield name, prepare_model(path.read_bytes(), bindings)
        else:
            left_out.append(f"{path.stem} ({name} is not in {path.parent})")
    for name in MATERIALISED:
        source, target = folder / "topology" / f"{name}.onnx", scratch / f"{name}.onnx"
        command = [sys.executable, str(folder / "tools/materialise_light.py"), str(source), str(target)]
        if source.exists() and not subprocess.run(command, capture_output=True, check=False).returncode:
            yield name, prepare_model(target.read_bytes(), {})
        else:
            left_out.append(f"{name} ({source} is not there, or cannot be made)")


def cuts(model: PreparedModel) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """The whole model, and each pair of halves, as groups of layers."""
    names = [layer.name for layer in model.graph.layers]
    yield "whole", [tuple(names)]
    for place in sorted({max(1, min(len(names) - 1, round(part * len(names)))) for part in CUT_POSITIONS}):
        yield f"after {place} of {len(names)}", atoms(model.graph, [frozenset(names[:place])])


def cases(
    name: str, model: PreparedModel, profile: DeviceProfile, *, limits: TuningLimits
) -> list[tuple[list[Case], list[CutSlice]]]:
    """All slices of a model, with predicted seconds, and the engine options that the agent's tuning chooses."""
    layers = {layer.name: layer for layer in model.graph.layers}
    chosen = as_agents_run(profile, model.graph, model.format)
    device = Predictor(chosen, model.format)
    cloud = Predictor(as_servers_run(profile, model.format), model.format)
    whole = cut_slices(model, model.graph, [tuple(layers)], None)
    setup, _ = best_setup(
        EngineOptions(threads=min(2, limits.cores)),
        limits,
        lambda candidate: _measured_s(whole, candidate),
        lambda: False,
    )
    setup = msgspec.structs.replace(setup, merge=False)  # each half is one slice
    print(f"{name}: agents choose {setup}, priced as {chosen.priced_setup}", flush=True)
    cases_by_cut = []
    for where, groups in cuts(model):
        cut = cut_slices(model, model.graph, groups, None)
        parts = ["whole"] if len(cut) == 1 else [f"device, {where}", f"cloud, {where}"]
        tiers = [(device, setup), (cloud, OFFLOAD)]
        made = [
            Case(name, part, _predict(predictor, [layers[layer] for layer in group], slice_), options)
            for part, group, slice_, (predictor, options) in zip(parts, groups, cut, tiers, strict=False)
        ]
        cases_by_cut.append((made, cut))
    return cases_by_cut


def _measured_s(cut: Sequence[CutSlice], setup: EngineOptions) -> float | None:
    """Seconds of the whole model with these engine options, by which the agent's tuning compares them; None where they
    change nothing for slices that run by themselves."""
    if setup.merge:
        return None
    return sum(time.median_s for time in measure_slices(cut, runs=9, seconds=0.4, setups=[setup]).values())


def _predict(predictor: Predictor, layers: Sequence[Layer], cut: CutSlice) -> Prediction:
    """The slice's seconds with the cost of a run beyond its operators, which the sum over its layers leaves out."""
    together, fit, whole = predictor.predict_sum(layers), predictor.profile.fit, predictor.whole_interval
    if fit is None:
        return together
    around_s = fit.run_s + max(len(cut.slice.inputs) + len(cut.slice.outputs) - 2, 0) * fit.tensor_s
    return Prediction(  # as `predict_intervals`
        together.seconds + around_s, together.low_s + around_s * whole.low, together.high_s + around_s * whole.high
    )


def measure(slices: Sequence[tuple[list[Case], list[CutSlice]]], runs: int, rounds: int) -> None:
    """Measure in rounds over all slices, so that a disturbance affects all of them."""
    for _ in range(rounds):
        for chosen, cut in slices:
            times = measure_slices(cut, runs=runs, seconds=2.0, setups=[case.setup for case in chosen])
            for case, one in zip(chosen, cut, strict=True):
                case.seconds.append(times[one.slice.name].median_s)


def main() -> None:
    """Calibrate, predict, measure, compare, write."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of calibration")
    parser.add_argument("--profile", type=Path, help="a profile calibrated on this machine, instead of calibrating")
    parser.add_argument("--keep", type=Path, help="where to write the profile that was calibrated")
    parser.add_argument(
        "--models", type=Path, default=models_folder(), help="folder of trained models [$EDGESPLIT_MODELS]"
    )
    parser.add_argument("--runs", type=int, default=15, help="of each slice in a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    begun = time.perf_counter()
    profile = load_profile(given.profile) if given.profile else _calibrate(given.minutes)
    calibrated_s = time.perf_counter() - begun
    if given.keep:
        given.keep.write_text(profile_text(profile, given.keep.suffix == ".json"), "utf-8")
    counters = read_counters()
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as scratch:
        pairs = [
            pair
            for name, model in find_models(given.models, Path(scratch), left_out)
            for pair in _try(name, model, profile, left_out)
        ]
        measure(pairs, given.runs, given.rounds)
    load = load_between(counters, read_counters(), [])
    print(f"the machine meanwhile: {load}, this benchmark's own work left out of other work")
    facts = {"calibration_s": round(calibrated_s, 1), "load": msgspec.to_builtins(load)}
    _report([case for chosen, _ in pairs for case in chosen], facts, tuple(left_out), given.json)


def _calibrate(minutes: float) -> DeviceProfile:
    return calibrate(
        "here", base=load_profile("generic-x86"), minutes=minutes, threads=1, today=date.today().isoformat()
    )


def _try(
    name: str, model: PreparedModel, profile: DeviceProfile, left_out: list[str]
) -> list[tuple[list[Case], list[CutSlice]]]:
    """All slices of a model, predicted; an empty list where the model is refused, which is added to `left_out`."""
    try:
        return cases(name, model, profile, limits=TuningLimits(os.cpu_count() or 1))
    except EdgeError as error:
        left_out.append(f"{name} ({error})")
        return []


def _report(every: Sequence[Case], facts: Mapping[str, Any], left_out: tuple[str, ...], path: Path | None) -> None:
    for case in every:
        row = case.as_json()
        print(
            f"{case.model:34} {case.part:26} predicted {row['predicted_ms']:9.3f} [{row['low_ms']:.3f} to "
            f"{row['high_ms']:.3f}], measured {row['measured_ms']:9.3f} ms, off by {case.error:6.1%}"
        )
    errors = [case.error for case in every]
    wholes = [case.error for case in every if case.part == "whole"]
    inside = sum(case.as_json()["inside"] for case in every) / len(every)
    results = {
        **facts,
        "cases": [case.as_json() for case in every],
        "median_error": percentile(errors, 0.5),
        "p95_error": percentile(errors, 0.95),
        "whole_models": {"median_error": percentile(wholes, 0.5), "worst_error": max(wholes)},
        "inside_the_interval": inside,
    }
    print(f"{len(every)} slices of {len(wholes)} models; {inside:.0%} inside their interval")
    targets = [
        Target("median error of whole models and halves", percentile(errors, 0.5), MEDIAN, left_out=left_out),
        Target("p95 error of whole models and halves", percentile(errors, 0.95), P95, left_out=left_out),
        Target("part inside the 90 % interval", inside, INSIDE, at_least=True, left_out=left_out),
    ]
    finish(results, targets, path)


if __name__ == "__main__":
    main()
