"""What the coarse boundary codecs save and change: bits per element beside int8 with zstd, and equal answers, at each
boundary of one tensor of SqueezeNet, the ladder of ImageNet models and YOLOX.

Sizes and the clip of int4 come from the first 16 samples; answers are compared on the others, on which nothing was
chosen. A codec is refused at a boundary where fewer answers stay equal than its target says, as `--allow-changed` would
refuse it; where it is not, it must be as much smaller as the target says. Detectors answer alike where every box of
either has a partner. Tensors of quantised models are 8-bit already: no codec applies.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from boundaries import boundaries
from record import Target, finish, make_parser, models_folder
from trained import Skipped, TrainedModel, left_out, load_models

from edgesplit.answers.answer_rule import infer_answer_rule, parse_answer_rule
from edgesplit.release.boundary_codecs import INT4, INT6, INT8
from edgesplit_partitioner.costs.model import TensorCost
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.profiling.codecs import count_changes, measure_codecs, with_codecs

MODELS = ("squeezenet_fp32", "mobilenet_v1_0.25_224_float.tflite", "yolox_nano")
QUANTISED = (
    "mobilenet_v1_0.25_128_quant.tflite", "mobilenet_v1_0.5_160_quant.tflite", "mobilenet_v1_0.75_192_quant.tflite",
    "mobilenet_v2_1.0_224_quant.tflite",
)  # fmt: skip
"""The rest of the ladder."""
ANSWERS = {"yolox_nano": "boxes:yolox:0.5"}
"""What an answer is, where it is no class."""
CHOOSING = 16
LEAST_EQUAL = {INT6: 0.98, INT4: 0.95}
LEAST_SMALLER = {INT6: 1.35, INT4: 2.1}


@dataclass(frozen=True, slots=True)
class Measured:
    """One codec at one boundary."""

    model: str
    tensor: str
    codec: str
    elements: int
    bits: float
    """Per element, compressed by zstd: the median sample's, scale and zero point included."""
    int8_bits: float
    equal: float
    """Share of the answers that stay."""
    samples: int
    clip: float
    encode_s: float
    int8_encode_s: float

    @property
    def smaller(self) -> float:
        """How many times smaller than int8, both compressed."""
        return self.int8_bits / self.bits

    @property
    def is_refused(self) -> bool:
        """Whether too many answers change."""
        return self.equal < LEAST_EQUAL[self.codec]


def measure(model: TrainedModel) -> Iterator[Measured]:
    """Both codecs at each boundary."""
    graph = model.model.graph
    chosen = {name: tensor for name, tensor in graph.tensors.items() if name in boundaries(graph)}
    graph = dataclasses.replace(graph, tensors=chosen)
    sized = measure_codecs(model.model, graph, samples=model.samples[:CHOOSING])
    costs = with_codecs({name: TensorCost(bytes=tensor.bytes) for name, tensor in chosen.items()}, sized)
    rule = ANSWERS.get(model.name)
    outputs = model.model.outputs
    answer = parse_answer_rule(rule, outputs) if rule else infer_answer_rule(outputs)
    assert answer is not None, f"{model.name}: say in ANSWERS what its answer is"
    others = model.samples[CHOOSING:]
    changed = count_changes(model.model, graph, costs, answer, samples=others)
    for name, by_codec in sized.tensors.items():
        elements = chosen[name].bytes // 4
        for codec in (INT6, INT4):
            if codec in by_codec and INT8 in by_codec:
                coarse, fine = by_codec[codec].packed, by_codec[INT8].packed
                yield Measured(
                    model.name, name, codec, elements, 8 * coarse.bytes / elements, 8 * fine.bytes / elements,
                    1 - changed.tensors[name][codec] / len(others), len(others), coarse.clip,
                    by_codec[codec].cost.encode_s["cloud"], by_codec[INT8].cost.encode_s["cloud"],
                )  # fmt: skip


def no_float_boundaries(only: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The quantised models of the ladder, each with its number of float tensors at boundaries."""
    for name in QUANTISED:
        path = models_folder() / "models" / name
        if path.is_file() and (not only or name in only):
            model = prepare_model(path.read_bytes(), {})
            floats = [tensor for tensor in boundaries(model.graph) if model.types[tensor].datatype.startswith("FP")]
            yield name, len(floats)


def targets_of(measured: Sequence[Measured], missing: tuple[str, ...]) -> list[Target]:
    """The least saving over the boundaries at which a codec is not refused."""
    least = {
        codec: min((each.smaller for each in measured if each.codec == codec and not each.is_refused), default=None)
        for codec in LEAST_SMALLER
    }
    return [
        Target(f"codecs.{codec}_smaller_than_int8", least[codec], floor, at_least=True, left_out=missing)
        for codec, floor in LEAST_SMALLER.items()
    ]


def main() -> int:
    """Measure, print and write."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", default=[], help="only this one; may be given several times")
    parser.add_argument("--samples", type=int, default=116, help=f"per model, {CHOOSING} to choose by included [116]")
    options = parser.parse_args()
    wanted = [name for name in MODELS if not options.model or name in options.model]
    measured: list[Measured] = []
    skipped: list[Skipped] = []
    for model in load_models(options.samples, wanted, tflite=True) if wanted else ():
        if isinstance(model, Skipped):
            skipped.append(model)
            print(f"skipped: {model.name}: {model.why}", flush=True)
        elif model.given == "tensors":
            start = time.perf_counter()
            measured += (found := list(measure(model)))
            print(f"{model.name}: {time.perf_counter() - start:.0f} s", flush=True)
            for each in found:
                refused = "refused" if each.is_refused else ""
                print(
                    f"  {each.tensor[-40:]:40} {each.elements:8} {each.codec} {each.bits:5.2f} bits, int8 "
                    f"{each.int8_bits:5.2f} ({each.smaller:.2f}x), {each.equal:6.1%} equal, clip {each.clip:g}, encode "
                    f"{1e3 * each.encode_s:.2f} ms, int8 {1e3 * each.int8_encode_s:.2f} ms {refused}",
                    flush=True,
                )
    quantised = dict(no_float_boundaries(options.model))
    for name, floats in quantised.items():
        print(f"{name}: {floats} float boundaries")
    results = {
        "measured": [{**asdict(each), "smaller": each.smaller, "refused": each.is_refused} for each in measured],
        "float_boundaries_of_quantised_models": quantised,
        "skipped": [asdict(model) for model in skipped],
    }
    finish(results, targets_of(measured, left_out(skipped, options.model)), options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
