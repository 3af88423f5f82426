"""A model is compressed by each method, passes the gate on samples that chose nothing, and is cut like any other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

from edgesplit.answers.answer_rule import AnswerRule
from edgesplit.errors import InfeasibleLimits, ModelRefused, UsageError
from edgesplit.runtime import run_slices
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit.runtime.loader import load_slices
from edgesplit_partitioner.compression.compress import CompressionResult, Compressor, compress
from edgesplit_partitioner.compression.confirm import confirm
from edgesplit_partitioner.compression.gate import GateTerms
from edgesplit_partitioner.compression.recipe import Method
from edgesplit_partitioner.ir.prepared_model import PreparedModel
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.slicing import atoms, cut_slices
from support import onnx_models
from support.classifiers import Classifier, onnx_classifier, tflite_classifier
from support.onnx_models import same_bits
from support.transformers import transformer

RULE = AnswerRule("class", ("scores",))
TERMS = GateTerms(least_agreement=0.95)
MAKERS = {"onnx": onnx_classifier, "tflite": tflite_classifier}
"""The classifiers by format."""


def run(model: Classifier, method: Method, folder: Path, terms: GateTerms = TERMS) -> CompressionResult:
    """Compress the classifier."""
    folder.mkdir(exist_ok=True)
    (folder / model.file_name).write_bytes(model.raw)
    return compress(
        folder / model.file_name, method, model.samples, RULE, terms, out_folder=folder, labels=model.labels
    )


@pytest.mark.parametrize("format_", MAKERS)
@pytest.mark.parametrize("method", ["int8", "fp16"])
def test_a_compressed_model_passes_and_is_smaller(format_: str, method: Method, tmp_path: Path) -> None:
    """The file is smaller, takes and gives the same tensors, and its evidence is of the half that confirmed."""
    model = MAKERS[format_]()
    result = run(model, method, tmp_path)
    assert result.verdict.passed and result.path is not None
    assert result.evidence.samples == 120
    assert result.evidence.samples_digest != result.chosen_on.samples_digest
    assert result.variant_bytes < 0.65 * result.base_bytes
    base, variant = prepare_model(model.raw), prepare_model(result.path.read_bytes())
    assert (variant.inputs, variant.outputs) == (base.inputs, base.outputs)
    assert result.recipe.method == method and result.recipe.format == format_
    assert result.evidence.accuracy_base is not None and result.evidence.accuracy_base.share > 0.9


@pytest.mark.parametrize("format_", MAKERS)
@pytest.mark.parametrize("method", ["int8", "int8-dynamic", "fp16"])
def test_the_same_model_and_samples_make_the_same_bytes(format_: str, method: Method, tmp_path: Path) -> None:
    """A recipe makes the same file again."""
    model = MAKERS[format_]()
    first, second = (run(model, method, tmp_path / name) for name in ("first", "second"))
    assert first.path is not None and second.path is not None
    assert first.path.read_bytes() == second.path.read_bytes()
    assert first.recipe == second.recipe


@pytest.mark.parametrize("format_", MAKERS)
def test_an_int8_model_is_cut_at_every_boundary(format_: str, tmp_path: Path) -> None:
    """Slices of the compressed model give the whole's bits, and int8 crosses at least one boundary."""
    model = MAKERS[format_]()
    result = run(model, "int8", tmp_path)
    assert result.path is not None
    variant = prepare_model(result.path.read_bytes())
    layers = [layer.name for layer in variant.graph.layers]
    whole = _run(tmp_path / "whole", variant, [frozenset(layers)], model)
    for count in range(1, len(layers)):
        live = _run(tmp_path / str(count), variant, [frozenset(layers[:count])], model)
        assert same_bits({"scores": live["scores"]}, {"scores": whole["scores"]}), f"cut after {layers[count - 1]}"
    kinds = {variant.types[name].datatype for layer in variant.graph.layers for name in layer.writes}
    assert kinds & {"INT8", "UINT8"}


@pytest.mark.parametrize("format_", MAKERS)
def test_layers_that_hurt_stay_in_float(format_: str, tmp_path: Path) -> None:
    """Where one channel's values dwarf the others', int8 changes answers; the layers around it are found and left in
    float, and the variant passes."""
    model = MAKERS[format_](spread=3000.0)
    result = run(model, "int8", tmp_path)
    assert result.verdict.passed, result.verdict.sentence
    assert result.recipe.float_layers
    assert [harm.layer for harm in result.harms][: len(result.recipe.float_layers)] == list(result.recipe.float_layers)
    assert list(result.harms) == sorted(result.harms, key=lambda harm: -harm.error)


def test_a_missed_gate_leaves_no_file_and_ranks_the_layers(tmp_path: Path) -> None:
    """Terms that int8 cannot keep are missed: the evidence is told, layers are ranked, nothing is written."""
    model = onnx_classifier(1400, noise=1000.0)
    result = run(model, "int8", tmp_path, GateTerms(least_agreement=0.99))
    assert not result.verdict.passed
    assert result.path is None
    assert not (tmp_path / "variant.onnx").exists()
    assert result.harms
    assert result.verdict.sentence.endswith("; allowed: 1 % of answers changed")


def test_auto_takes_the_smallest_file_that_passes(tmp_path: Path) -> None:
    """Where int8 passes as it is, no larger file is taken."""
    model = onnx_classifier()
    assert run(model, "auto", tmp_path).recipe.method in ("int8", "int8-dynamic")


def test_what_was_made_for_one_allowance_is_kept_for_the_next(tmp_path: Path) -> None:
    """One compressor gives each allowance what a compression of its own does, and makes and confirms nothing twice."""
    model = onnx_classifier(spread=3000.0)
    alone = [run(model, "auto", tmp_path / str(kept), GateTerms(least_agreement=kept)) for kept in (0.9, 0.95)]
    steps: list[str] = []
    file = tmp_path / model.file_name
    file.write_bytes(model.raw)
    with Compressor(file, model.samples, RULE, labels=model.labels, progress=steps.append) as compressor:
        for kept, expected in zip((0.9, 0.95), alone, strict=True):
            result = compressor.compress("auto", GateTerms(least_agreement=kept), out_folder=tmp_path)
            assert (result.recipe, result.evidence, result.verdict) == (
                expected.recipe, expected.evidence, expected.verdict,
            )  # fmt: skip
    assert len(steps) == len(set(steps))


def test_a_file_that_describes_tensors_which_no_node_writes_is_compressed(tmp_path: Path) -> None:
    """Tools leave descriptions of tensors behind that were fused away: no range is measured of them."""
    model = onnx_classifier()
    described = onnx.load_from_string(model.raw)
    described.graph.value_info.append(onnx.helper.make_tensor_value_info("fused_away", onnx.TensorProto.FLOAT, [1, 8]))
    stale = dataclasses.replace(model, raw=described.SerializeToString())
    assert run(stale, "int8", tmp_path).verdict.passed


def test_too_few_samples_are_told_before_any_work(tmp_path: Path) -> None:
    """Both halves are counted: 460 samples for 1 %."""
    with pytest.raises(InfeasibleLimits, match=r"240 samples are too few: .* takes 230 for these terms; give 460"):
        run(onnx_classifier(), "int8", tmp_path, GateTerms(least_agreement=0.99))


def test_a_model_without_products_has_no_dynamic_form(tmp_path: Path) -> None:
    """The refusal says which method to use."""
    file = tmp_path / "conv.onnx"
    file.write_bytes(onnx_models.branches())
    model = prepare_model(file.read_bytes())
    rng = np.random.default_rng(0)
    samples = [
        {spec.name: rng.standard_normal(spec.shape).astype(np.float32) for spec in model.inputs} for _ in range(90)
    ]
    rule = AnswerRule("close", tuple(spec.name for spec in model.outputs), tolerance=0.1)
    with pytest.raises(ModelRefused, match="products and recurrences"):
        compress(file, "int8-dynamic", samples, rule, TERMS, out_folder=tmp_path)


def test_a_transformer_is_compressed_without_ranges(tmp_path: Path) -> None:
    """int8-dynamic makes its weights bytes and needs no ranges; its products count as integer ones, and its slices give
    the whole's bits."""
    model = transformer()
    result = run(model, "int8-dynamic", tmp_path, GateTerms(least_agreement=0.9))
    assert result.verdict.passed and result.path is not None
    assert result.variant_bytes < 0.6 * result.base_bytes
    assert (result.recipe.method, result.recipe.calibration_samples) == ("int8-dynamic", 0)
    base, variant = prepare_model(model.raw), prepare_model(result.path.read_bytes())
    assert (variant.inputs, variant.outputs) == (base.inputs, base.outputs)
    works = [[work for layer in each.graph.layers for work in layer.work] for each in (base, variant)]
    in_float, in_int8 = (sum(work.flops for work in each if work.operator == "gemm") for each in works)
    assert in_int8 == pytest.approx(in_float, rel=0.01)
    assert sum(work.flops for work in works[1] if work.is_int8) > 0.8 * in_float
    layers = [layer.name for layer in variant.graph.layers]
    whole = _run(tmp_path / "whole", variant, [frozenset(layers)], model)
    for count in range(1, len(layers), 4):
        live = _run(tmp_path / str(count), variant, [frozenset(layers[:count])], model)
        assert same_bits({"scores": live["scores"]}, {"scores": whole["scores"]}), f"cut after {layers[count - 1]}"


def test_an_operator_without_an_integer_kernel_is_named(tmp_path: Path) -> None:
    """It stays in float, and the recipe says so."""
    model = onnx_classifier()
    result = run(_with_tanh(model), "int8", tmp_path)
    assert "Tanh" in result.recipe.without_kernel


@pytest.mark.parametrize("format_", MAKERS)
def test_a_variant_made_elsewhere_passes_the_same_gate(format_: str, tmp_path: Path) -> None:
    """The model itself changes nothing; one with other weights changes too much."""
    base, other = MAKERS[format_](), MAKERS[format_](seed=5)
    files = [tmp_path / name / base.file_name for name in ("base", "copy", "other")]
    for file, model in zip(files, (base, base, other), strict=True):
        file.parent.mkdir()
        file.write_bytes(model.raw)
    verdict, evidence = confirm(files[0], files[1], base.samples, RULE, TERMS, labels=base.labels)
    assert verdict.passed
    assert (evidence.changed, evidence.samples, evidence.right_to_wrong) == (0, 240, 0)
    verdict, evidence = confirm(files[0], files[2], base.samples, RULE, TERMS, labels=base.labels)
    assert not verdict.passed
    assert evidence.changed > 100


def test_labels_and_samples_must_be_as_many(tmp_path: Path) -> None:
    """A list of labels that is too short is an error of the caller."""
    classifier = onnx_classifier()
    file = tmp_path / classifier.file_name
    file.write_bytes(classifier.raw)
    with pytest.raises(UsageError, match="239 labels for 240 samples"):
        compress(file, "int8", classifier.samples, RULE, TERMS, out_folder=tmp_path, labels=classifier.labels[1:])


def _run(folder: Path, model: PreparedModel, sets: list[frozenset[str]], given: Classifier) -> dict[str, np.ndarray]:
    """The model cut for these device sets, its slices run one after the other on one sample."""
    slices = cut_slices(model, model.graph, atoms(model.graph, sets), None)
    onnx_models.write_slices(folder, slices)
    programs = load_slices(onnx_models.manifest_of(model, slices), lambda name: folder / name, DispatchingRuntime())
    return run_slices(programs, [slice_.slice.name for slice_ in slices], given.samples[0])


def _with_tanh(model: Classifier) -> Classifier:
    """The classifier with another activation after its first convolution."""
    proto = onnx.load_model_from_string(model.raw)
    next(node for node in proto.graph.node if node.name == "relu0").op_type = "Tanh"
    return Classifier(proto.SerializeToString(), model.file_name, model.samples, model.labels)
