"""What compression makes of the trained float models: sizes, changed answers with their bounds, and seconds.

Every model is quantised to int8 with all of its layers, for its size and its seconds; then the smallest variant that
keeps an allowance is chosen on one half of the samples (`auto`, at 1, 2 and 5 % of answers changed), and judged on the
other half, which chose nothing. Samples of sound are blocks of one recording, and so depend on each other: their
bounds say less.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from compressed import WIDE_ALLOWANCE, compressor_of, file_of, keep_variants, rule_of
from record import Target, finish, make_parser
from trained import Skipped, TrainedModel, left_out, load_models

from edgesplit.device_profile import load_profile
from edgesplit.errors import InfeasibleLimits, ModelRefused
from edgesplit.input_spec import INPUT_LAYER
from edgesplit_partitioner.compression.compress import CompressionResult
from edgesplit_partitioner.compression.gate import GateTerms
from edgesplit_partitioner.costs.predict import as_agents_run, predict_intervals
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model

ALLOWANCES = (0.01, 0.02, 0.05)
CONVOLUTIONAL = ("squeezenet_fp32", "mobilenet_v1_0.25_224_float.tflite", "yolox_nano", "ultraface_rfb_320",
                 "resnet8_cifar10_float.tflite")  # fmt: skip
"""Models whose weights are those of convolutions, without the few kilobytes of `mnist_cnn`, which a graph outweighs."""
PICTURES = ("squeezenet_fp32", "mobilenet_v1_0.25_224_float.tflite", "yolox_nano", "ultraface_rfb_320")
"""Models that take the 500 photographs; the others have at most 300 samples."""
OTHERS = ("gesture_mlp", "gesture_mlp.tflite", "mnist_cnn", "resnet8_cifar10_float.tflite", "silero_vad_16k", "dtln_1",
          "dtln_2", "dtln_1.tflite", "dtln_2.tflite")  # fmt: skip
BOARDS = ("raspberrypi4", "raspberrypi5", "jetson-orin-nano")
SIZE, LEAST_PASSING = 0.30, 2.0


@dataclass
class ModelResult:
    """What was found for one model."""

    model: str
    samples: int
    base_bytes: int
    size: float | None = None
    """Bytes of int8 with all layers, relative to the float file."""
    int8_changed: str = ""
    """Changed answers of that variant, of the confirming samples."""
    int8_run_s: tuple[float, float] | None = None
    """Median seconds of a run here, of the float file and of that variant."""
    int8_predicted_s: dict[str, list[float]] = field(default_factory=dict)
    """By board: predicted seconds of the float file and of that variant; none where it changes too much to be kept."""
    variants: list[dict[str, Any]] = field(default_factory=list)
    methods: list[dict[str, Any]] = field(default_factory=list)
    """Each method with all layers: size, changed answers."""
    refused: str = ""
    took_s: float = 0.0


def find_models(only: Sequence[str]) -> Iterator[TrainedModel | Skipped]:
    """The float models with their samples, as tensors."""
    for names, count in ((PICTURES, 500), (OTHERS, 300)):
        for name in names if not only else [name for name in names if name in only]:
            own = 50 if name in ("mnist_cnn", "resnet8_cifar10_float.tflite") else count
            yield from (
                model
                for model in load_models(own, [name], tflite=True)
                if isinstance(model, Skipped) or model.spec is None
            )


def measure(model: TrainedModel, limit_s: float, allowances: Sequence[float], folder: Path) -> ModelResult:
    """Compress the model to int8 with all layers, and by each allowance."""
    result = ModelResult(model.name, len(model.samples), file_of(model.name).stat().st_size)
    rule = rule_of(model)
    if rule is None:
        result.refused = "no answer rule"
        return result

    began = time.monotonic()

    def progress(step: str) -> None:
        print(f"  {time.monotonic() - began:5.0f} s  {step}", file=sys.stderr, flush=True)

    with compressor_of(model, rule, progress) as compressor:
        try:
            wide = GateTerms(least_agreement=1.0 - WIDE_ALLOWANCE)
            plain = compressor.compress("int8", wide, out_folder=folder, limit_s=0.0)
            result.size = plain.variant_bytes / plain.base_bytes
            result.int8_changed = f"{plain.evidence.changed} of {plain.evidence.samples}"
            result.int8_run_s = (plain.base_run_s, plain.variant_run_s)
            result.int8_predicted_s = predicted_of(model.model, plain)
        except ModelRefused as refusal:
            result.refused = str(refusal)
            return result
        for allowed in allowances:
            terms = GateTerms(least_agreement=1.0 - allowed)
            try:
                made = compressor.compress("auto", terms, out_folder=folder, limit_s=limit_s)
                result.variants.append(_variant(model.model, made, allowed))
            except InfeasibleLimits as error:
                result.variants.append({"allowed": allowed, "passed": False, "sentence": f"too few: {error}"})
        result.methods = [asdict(variant) for variant in keep_variants(model, compressor)]
    result.took_s = time.monotonic() - began
    return result


def _variant(base: PreparedModel, result: CompressionResult, allowed: float) -> dict[str, Any]:
    """What one allowance gave."""
    return {
        "allowed": allowed,
        "passed": result.verdict.passed,
        "sentence": result.verdict.sentence,
        "method": result.recipe.method,
        "float_layers": len(result.recipe.float_layers),
        "without_kernel": list(result.recipe.without_kernel),
        "size": result.variant_bytes / result.base_bytes,
        "changed": result.evidence.changed,
        "samples": result.evidence.samples,
        "changed_at_most": result.evidence.changed_at_most,
        "run_s": [result.base_run_s, result.variant_run_s],
        "predicted_s": predicted_of(base, result),
    }


def predicted_of(base: PreparedModel, result: CompressionResult) -> dict[str, list[float]]:
    """By board: predicted seconds of the base and of the variant; none where its file was not kept."""
    if result.path is None:
        return {}
    variant = prepare_model(result.path.read_bytes())
    return {board: [predicted_s(model, board) for model in (base, variant)] for board in BOARDS}


def predicted_s(model: PreparedModel, board: str) -> float:
    """Seconds of the whole model on this board, as agents run it."""
    profile = as_agents_run(load_profile(board), model.graph, model.format)
    predictions = predict_intervals(model.graph, profile, model.format)
    return sum(prediction.seconds for layer, prediction in predictions.items() if layer != INPUT_LAYER)


def show(result: ModelResult) -> None:
    """Print a model's lines."""
    size = (
        ""
        if result.size is None
        else f"int8 {result.size:.3f} of {result.base_bytes} bytes, {result.int8_changed} changed"
    )
    print(f"\n{result.model} ({result.samples} samples, {result.took_s:.0f} s): {size}{result.refused}")
    if result.int8_run_s is not None:
        print(f"  int8: {seconds_text(result.int8_run_s, result.int8_predicted_s)}")
    for method in result.methods:
        print(
            f"  {method['method']}, all layers: size {method['size']:.3f}, {method['changed']} of {method['samples']}"
            " changed"
        )
    for variant in result.variants:
        head = f"  {variant['allowed']:.0%}: {'passed' if variant['passed'] else 'MISSED'}"
        if "method" not in variant:
            print(f"{head}: {variant['sentence']}")
            continue
        print(
            f"{head}: {variant['method']}, {variant['float_layers']} layers in float, size {variant['size']:.3f};"
            f" {variant['sentence']}; {seconds_text(variant['run_s'], variant['predicted_s'])}"
        )
    sys.stdout.flush()


def seconds_text(run_s: Sequence[float], predicted: Mapping[str, Sequence[float]]) -> str:
    """Milliseconds before and after, measured here and predicted."""
    boards = ", ".join(
        f"{board} {1e3 * before:.3g} -> {1e3 * after:.3g}" for board, (before, after) in predicted.items()
    )
    return f"here {1e3 * run_s[0]:.3g} -> {1e3 * run_s[1]:.3g} ms; predicted: {boards or '-'}"


def targets_of(results: Sequence[ModelResult], missing: tuple[str, ...]) -> list[Target]:
    """The issue's targets."""
    sizes = [result.size for result in results if result.model in CONVOLUTIONAL and result.size is not None]
    passing = {
        result.model
        for result in results
        for variant in result.variants
        if variant["passed"] and variant["allowed"] == 0.05
    }
    return [
        Target(
            "largest size of an int8 convolutional model, of its float file",
            max(sizes, default=None),
            SIZE,
            left_out=missing,
        ),
        Target(
            "float models with a variant that passes at 5 % changed", float(len(passing)), LEAST_PASSING, at_least=True
        ),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of models, such as squeezenet_fp32")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of each search for layers (300)")
    parser.add_argument(
        "--allowed", nargs="*", type=float, default=ALLOWANCES, help="shares of changed answers (0.01 0.02 0.05)"
    )
    options = parser.parse_args()
    results, skipped, began = [], [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="edgesplit-bench-") as name:
        for model in find_models(options.only):
            if isinstance(model, Skipped):
                skipped.append(model)
                print(f"{model.name}: left out, {model.why}")
                continue
            results.append(measure(model, options.limit_s, options.allowed, Path(name)))
            show(results[-1])
    if sizes := [result.size for result in results if result.size is not None]:
        print(f"\nmedian int8 size {statistics.median(sizes):.3f}; {time.monotonic() - began:.0f} s")
    record = {"models": [asdict(result) for result in results]}
    finish(record, targets_of(results, left_out(skipped, options.only)), options.json)


if __name__ == "__main__":
    main()
