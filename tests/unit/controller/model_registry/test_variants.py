"""Versions that stand in for another: stored with their lineage where they pass the gate, and else nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.release.lineage import VariantEvidence
from edgesplit_controller.model_registry import variants
from edgesplit_controller.model_registry.sample_sets import SampleSets
from edgesplit_controller.model_registry.variants import GateRequest, Variants
from edgesplit_controller.storage.tables.core import Model
from edgesplit_partitioner.compression.compress import CompressionResult
from edgesplit_partitioner.compression.gate import GateTerms, Verdict
from edgesplit_partitioner.compression.recipe import Recipe
from edgesplit_partitioner.compression.search import LayerHarm
from support.registry_harness import RegistryHarness, a_model, npz

TERMS = GateTerms(least_agreement=0.9)
EVIDENCE = VariantEvidence(samples=2, changed=0, changed_at_most=0.09)
HARMS = tuple(LayerHarm(layer=f"layer-{n}", changed=20 - n, samples=30, error=0.1) for n in range(12))


class Bench(RegistryHarness):
    """A registry with a model, labelled samples, and a compression that is scripted."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.sets = SampleSets(self.database, self.blobs, now=lambda: 1.0)
        self.variants = Variants(self.blobs, self.registry, self.sets)
        self.passed = True
        self.calls: list[dict[str, Any]] = []
        monkeypatch.setattr(variants, "compress", self._compress)
        monkeypatch.setattr(variants, "confirm", self._confirm)
        self.base = self.push(a_model())
        rng = np.random.default_rng(0)
        self.raw = [npz(image=rng.random((1, 3, 16, 16), np.float32)) for _ in range(4)]

    def request(self, labels: Sequence[int] = (), answer: str = "") -> GateRequest:
        """The gate, on four samples of which the first have these labels."""
        labelled = dict(zip(self.raw, labels, strict=False))
        self.registry.add_samples(self.base, tensors=self.raw, labels=labelled)
        chosen = self.sets.create(self.base, [self.blobs.put(sample) for sample in self.raw])
        return GateRequest(TERMS, chosen.sha256, answer)

    def pushed(self, raw: bytes, request: GateRequest, name: str = "small") -> Model:
        """A variant made elsewhere."""
        part = self.blobs.incoming_file()
        part.write_bytes(raw)
        return self.variants.push(self.base, part, name, "", {}, request).model

    def _verdict(self) -> Verdict:
        return Verdict(passed=self.passed, sentence="12 % of answers differ at most (90 % sure), 10 % may")

    def _compress(self, path: Path, method: str, samples: Any, rule: Any, terms: Any, **given: Any) -> Any:
        assert path.read_bytes() == self.blobs.get(self.base.sha256)
        self.calls.append({"method": method, "samples": list(samples), "rule": rule, "terms": terms, **given})
        made: Path = given["out_folder"] / "int8.onnx"
        made.write_bytes(a_model(seed=9))
        return CompressionResult(
            verdict=self._verdict(), evidence=EVIDENCE, chosen_on=EVIDENCE,
            recipe=Recipe(method="int8", format="onnx", tools={"onnxruntime": "1"}),
            path=made if self.passed else None, base_bytes=2, variant_bytes=1, base_run_s=2e-3, variant_run_s=1e-3,
            harms=HARMS,
        )  # fmt: skip

    def _confirm(self, ours: Path, theirs: Path, samples: Any, rule: Any, terms: Any, **given: Any) -> Any:
        self.calls.append({"samples": list(samples), "rule": rule, "terms": terms, **given})
        return self._verdict(), EVIDENCE


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def with_classes(count: int, name: str = "scores") -> bytes:
    """A model that answers with so many classes, in an output of this name."""
    nodes = [
        onnx.helper.make_node("Flatten", ["image"], ["f"], "f"),
        onnx.helper.make_node("MatMul", ["f", "w"], [name]),
    ]
    weights = onnx.numpy_helper.from_array(np.ones((768, count), np.float32), "w")
    graph = onnx.helper.make_graph(
        nodes, "other", [onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, [1, 3, 16, 16])],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, count])], [weights],
    )  # fmt: skip
    raw: bytes = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9
    ).SerializeToString()
    return raw


def test_a_compressed_version_has_lineage_and_the_samples_that_judged_it(bench: Bench) -> None:
    """Under the base's name, once for the same request; a plain push of the same file finds it."""
    request = bench.request(labels=[4, 3, 2, 1])
    made = bench.variants.compress(bench.base, "auto", request).model
    assert made.ref == "small@2" and made.lineage is not None
    assert made.lineage["base"] == "small@1" and made.lineage["base_sha256"] == bench.base.sha256
    assert made.lineage["samples_sha256"] == request.samples and made.lineage["answer"] == "class:scores"
    assert made.lineage["recipe"]["method"] == "int8" and made.lineage["least_agreement"] == 0.9
    call = bench.calls[0]
    assert len(call["samples"]) == 4 and sorted(call["labels"]) == [1, 2, 3, 4] and call["method"] == "auto"
    assert len(bench.registry.samples(made)) == 4 and sorted(filter(None, bench.registry.labels(made))) == [1, 2, 3, 4]
    assert bench.variants.compress(bench.base, "auto", request).model.ref == "small@2"
    assert bench.push(a_model(seed=9)).ref == "small@2"
    assert [variant.ref for variant in bench.registry.variants_of("small@1")] == ["small@2"]


def test_a_missed_gate_stores_nothing_and_ranks_the_layers(bench: Bench) -> None:
    """The verdict, then the most harmful layers, and how many more there are."""
    bench.passed = False
    request = bench.request()
    with pytest.raises(InfeasibleLimits) as missed:
        bench.variants.compress(bench.base, "int8", request)
    text = str(missed.value)
    assert "12 % of answers differ" in text and "Nothing was stored" in text and "and 4 more" in text
    assert text.index("layer-0 (20 of 30 changed)") < text.index("layer-7") and "layer-8" not in text
    with pytest.raises(InfeasibleLimits):
        bench.pushed(a_model(seed=3), request)
    assert [model.ref for model in bench.registry.all()] == ["small@1"]
    assert not [path for path in bench.blobs.incoming_file().parent.iterdir() if path.is_file()]


def test_a_variant_made_elsewhere_passes_the_same_gate(bench: Bench) -> None:
    """Under another name too, and with an output of another name; its evidence is in the lineage."""
    request = bench.request()
    made = bench.pushed(with_classes(5, "logits"), request, "small-mlp")
    assert made.ref == "small-mlp@1" and made.lineage is not None and "recipe" not in made.lineage
    assert made.lineage["evidence"]["changed_at_most"] == 0.09 and bench.calls[0]["labels"] == []
    assert bench.calls[0]["rule"].outputs == ("scores",) and bench.calls[0]["variant_rule"].outputs == ("logits",)


def test_outputs_that_mean_different_things_are_both_named(bench: Bench) -> None:
    """Five classes are not seven, and nothing is compared."""
    with pytest.raises(
        UsageError, match=r"small@1 gives 'scores' \(FP32 \[1, 5\]\), the variant 'scores' \(FP32 \[1, 7"
    ):
        bench.pushed(with_classes(7), bench.request())
    with pytest.raises(UsageError, match="has not one number"):
        bench.pushed(with_classes(5), bench.request(answer="class:nothing"))
    assert not bench.calls


def test_half_labelled_samples_are_refused(bench: Bench) -> None:
    """Accuracy of some of the samples would be none of the others."""
    with pytest.raises(UsageError, match="2 of 4 samples have no label"):
        bench.variants.compress(bench.base, "auto", bench.request(labels=[4, 3]))
