"""The registry: immutable models by content, suggestions for wrong names; blobs that are verified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgesplit.errors import MalformedMessage, ModelRefused, NotFound, UsageError
from edgesplit.input_spec import InputSpec
from edgesplit_controller.errors import Conflict
from edgesplit_controller.model_registry.golden import golden_pairs, judged_pairs
from edgesplit_controller.model_registry.interface import InterfaceRequest, kind_of, store_names, stored_names
from edgesplit_controller.model_registry.registry import MOST_SAMPLES
from edgesplit_controller.storage.blobs import BlobLost, BlobStore
from edgesplit_partitioner.profiling.layers import synthetic_frame
from support.registry_harness import RegistryHarness, a_model, npz

SPEC = "image/jpeg 64x48 rgb nchw scale=1/255"


@pytest.fixture
def bench(tmp_path: Path) -> RegistryHarness:
    return RegistryHarness(tmp_path)


def test_a_model_version_is_identified_by_its_content(bench: RegistryHarness) -> None:
    """The same file, spec and bindings are the same version; a change of any of them is the next version."""
    first = bench.push(a_model())
    assert bench.push(a_model()).ref == first.ref == "small@1"
    assert bench.push(a_model(), input_text=SPEC).ref == "small@2"
    assert bench.push(a_model(), input_text="  image/jpeg   64x48 rgb nchw scale=1/255").ref == "small@2"
    assert bench.push(a_model(seed=1)).ref == "small@3"
    assert bench.push(a_model(), name="other").ref == "other@1"
    assert bench.blobs.get(first.sha256) == a_model()


def test_a_refused_model_leaves_no_row_and_no_file(bench: RegistryHarness, tmp_path: Path) -> None:
    """An unbound dimension is reported with the option to type."""
    with pytest.raises(ModelRefused, match="--bind images=LENGTH"):
        bench.push(a_model(batch="images"))
    with pytest.raises(ModelRefused):
        bench.push(a_model()[:500])
    assert bench.registry.all() == []
    assert not [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()]
    assert bench.push(a_model(batch="images"), bindings={"images": 1}).ref == "small@1"


def test_an_unknown_model_suggests_similar_names(bench: RegistryHarness) -> None:
    """The message lists the models whose names are close."""
    bench.push(a_model())
    assert bench.registry.get("small@1").id == bench.registry.get("small").id
    for wrong, hint in (("smal", "small"), ("small@2", "small@1"), ("xyz", "there is: small")):
        with pytest.raises(NotFound, match=hint):
            bench.registry.get(wrong)
    for malformed in ("Small", "small@x", "small@0", "../small", ""):
        with pytest.raises(UsageError):
            bench.registry.get(malformed)


def test_a_second_registry_loads_the_prepared_model(bench: RegistryHarness, tmp_path: Path) -> None:
    """Loaded anew it has the same optimised bytes, input layer and layers."""
    model = bench.push(a_model(), input_text=SPEC)

    again = RegistryHarness(tmp_path)
    loaded = again.registry.load(again.registry.get("small"))

    assert loaded.prepared.raw == again.blobs.get(model.optimised_sha256)
    assert isinstance(loaded.spec, InputSpec) and loaded.spec.tensor == "image"
    assert [layer["name"] for layer in model.shown["layers"]] == [layer.name for layer in loaded.graph.layers]
    assert loaded.graph.layers[0].name == "input"


def test_samples_are_checked_and_bounded(bench: RegistryHarness) -> None:
    """Frames for a model with an input spec, exact tensors for one without; duplicates count once."""
    pictures = bench.push(a_model(), input_text=SPEC)
    spec = bench.registry.load(pictures).spec
    assert spec is not None
    frames = [synthetic_frame(spec, seed) for seed in range(3)]
    assert bench.registry.add_samples(pictures, frames=[*frames, frames[0]]) == 3
    assert bench.registry.samples(pictures) == frames
    tensors = bench.push(a_model())
    good = npz(image=np.zeros((1, 3, 16, 16), np.float32))
    assert bench.registry.add_samples(tensors, tensors=[good]) == 1
    for model, frame, archive in (
        (pictures, b"no jpeg", None),
        (pictures, None, good),
        (tensors, frames[0], None),
        (tensors, None, npz(image=np.zeros((1, 3, 8, 8), np.float32))),
        (tensors, None, npz(picture=np.zeros((1, 3, 16, 16), np.float32))),
        (tensors, None, b"PK\x03\x04 no archive"),
    ):
        with pytest.raises(UsageError):
            bench.registry.add_samples(model, [frame] if frame else [], [archive] if archive else [])
    with pytest.raises(Conflict):
        bench.registry.add_samples(
            pictures, frames=[synthetic_frame(spec, seed) for seed in range(10, 11 + MOST_SAMPLES)]
        )


def test_labels_are_stored_with_their_samples(bench: RegistryHarness) -> None:
    """A label may come with a sample or later; a sample without one has None."""
    pictures = bench.push(a_model(), input_text=SPEC)
    spec = bench.registry.load(pictures).spec
    assert spec is not None
    one, other, third = (synthetic_frame(spec, seed) for seed in range(3))
    bench.registry.add_samples(pictures, frames=[one, other], labels={one: 7})
    assert bench.registry.labels(pictures) == [7, None]
    bench.registry.add_samples(pictures, frames=[other, third], labels={other: 3})
    assert bench.registry.labels(pictures) == [7, 3, None] and bench.registry.labels(pictures, 1) == [7]


def test_golden_inputs_hold_the_whole_models_outputs(bench: RegistryHarness) -> None:
    """The same for every call, and none where an input is too large for a chunk."""
    loaded = bench.registry.load(bench.push(a_model(), input_text=SPEC))
    pairs = golden_pairs(loaded, [], "small")
    assert len(pairs) == 1 and pairs == golden_pairs(loaded, [], "small")
    assert b'"scores"' in pairs[0].response and b'"frame"' in pairs[0].request


def test_a_damaged_or_missing_blob_raises(tmp_path: Path) -> None:
    """Storing it again repairs a lost blob."""
    store = BlobStore(tmp_path)
    digest = store.put(b"weights")
    assert store.get(digest) == b"weights" and store.put(b"weights") == digest
    store.path(digest).write_bytes(b"weightz")
    with pytest.raises(BlobLost, match="damaged"):
        store.get(digest)
    store.path(digest).unlink()
    with pytest.raises(BlobLost, match="cannot be read"):
        store.get(digest)
    assert store.put_all([b"weights", b"weights", b""])[0] == digest
    assert store.get(digest) == b"weights"


def test_golden_inputs_for_gates_of_answers_have_class_and_the_bases_answer(bench: RegistryHarness) -> None:
    """Evenly spread over the labelled samples; what the base answers is what its outputs say."""
    model, base = bench.push(a_model()), bench.push(a_model(seed=1), name="base")
    raw = [npz(image=np.random.default_rng(seed).normal(size=(1, 3, 16, 16)).astype(np.float32)) for seed in range(8)]
    bench.registry.add_samples(model, tensors=raw, labels={one: number for number, one in enumerate(raw[:6])})
    samples = bench.registry.spread_samples(model, 3)
    assert [label for _, label in samples] == [0, 2, 4]
    loaded, loaded_base = bench.registry.load(model), bench.registry.load(base)

    pairs = judged_pairs(loaded, samples, "small", loaded_base)

    assert [pair.label for pair in pairs] == [0, 2, 4]
    of_base = judged_pairs(loaded_base, samples, "base", loaded_base)
    assert [pair.answer for pair in pairs] == [pair.answer for pair in of_base]
    assert all(isinstance(pair.answer, int) for pair in pairs)
    assert [pair.request for pair in pairs] == [pair.request for pair in of_base]
    assert pairs[0].response != of_base[0].response
    assert {pair.answer for pair in judged_pairs(loaded, samples, "small", None)} == {None}


def test_gates_of_answers_need_classes(bench: RegistryHarness) -> None:
    """A detector's outputs have no label to compare with, and samples must fit into a chunk."""
    loaded = bench.registry.load(bench.push(a_model()))
    with pytest.raises(UsageError, match="need samples"):
        judged_pairs(loaded, [], "small", None)


def test_an_output_kind_is_part_of_what_a_version_is(bench: RegistryHarness) -> None:
    """Another kind, or other names, is another version; `none` is as if nothing was said."""
    plain = bench.push(a_model(), interface=InterfaceRequest(output="none"))
    labels = bench.push(a_model(), interface=InterfaceRequest(output="labels"))
    named = bench.push(a_model(), interface=InterfaceRequest(names=("cat", "dog", "cow", "hen", "owl")))
    assert [model.ref for model in (plain, labels, named)] == ["small@1", "small@2", "small@3"]
    assert bench.push(a_model()).ref == "small@1"
    assert bench.push(a_model(), interface=InterfaceRequest(output="auto")).ref == "small@2"
    kind = kind_of(bench.registry.get("small@3"))
    assert kind is not None and kind.to_text() == "labels:scores" and kind.name_of(4) == "owl"
    assert kind_of(plain) is None


def test_a_proposal_that_asks_is_not_taken(bench: RegistryHarness) -> None:
    """Nothing is stored; what is proposed and what is asked are told."""
    with pytest.raises(UsageError, match=r"how were pixels scaled.*Proposed: --input 'image/jpeg 640x480 rgb nchw"):
        bench.push(a_model(), interface=InterfaceRequest(input="auto"))
    with pytest.raises(UsageError, match="give one of them"):
        bench.push(a_model(), interface=InterfaceRequest(input=SPEC, preset="imagenet"))
    assert bench.registry.all() == []


def test_a_preset_becomes_a_spec_that_is_stored(bench: RegistryHarness) -> None:
    """As text, by which the model is loaded from then on, and as the kind of its outputs."""
    model = bench.push(a_model(batch="batch"), interface=InterfaceRequest(preset="imagenet"))
    assert model.input_text.startswith("image/jpeg 640x480 rgb nchw crop=0.875 scale=1/255 mean=")
    spec = bench.registry.load(model).spec
    assert spec is not None and (spec.fit, spec.tensor_width) == ("crop", 16)
    assert model.shown["output"] == "labels:scores" and model.shown["batches"] == {"batch": 1}


def test_names_are_stored_for_the_push_that_follows(bench: RegistryHarness) -> None:
    """By their digest; what is no list of names is refused."""
    digest = store_names(bench.blobs, ["cat", "dög"])
    assert stored_names(bench.blobs, digest) == ("cat", "dög")
    with pytest.raises(MalformedMessage, match="no list of names"):
        stored_names(bench.blobs, bench.blobs.put(b"{}"))
