"""The planner's key: it may cut a released model elsewhere, and whoever steals it can do nothing else.

Each attack is signed with the real planner's key. It is tried at every door: the trust store that fetches it, the
folder that is written from its chunks, and the folder as a thief could have written it, opened by a device and by an
offload server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Targets

from edgesplit.crypto.slice_encryption import encrypt_slice
from edgesplit.errors import LinkError, MalformedMessage, TrustError
from edgesplit.input_spec import parse_input_spec
from edgesplit.mqtt.messages import decode, encode
from edgesplit.oip import protocol as oip
from edgesplit.output_kind import OutputKind
from edgesplit.plan import Row
from edgesplit.release.manifest import (
    Chunk,
    CompiledSlice,
    FingerprintFile,
    GoldenExample,
    Manifest,
    Signature,
    Signed,
    TensorSpec,
    decode_manifest,
)
from edgesplit.release_store import open_release, stored_releases, write_release
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit.trust.identity import load_or_make_key
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import recut_path, verify_release
from edgesplit_controller.tuf.key_change import KeyChange
from edgesplit_controller.tuf.repository_signer import PublishedMetadata
from edgesplit_controller.tuf.rotation import Rotation
from edgesplit_offload.models.repository import ModelRepository
from edgesplit_offload.server import release_opener
from edgesplit_partitioner.slicing import CutSlice
from support import onnx_models as tiny
from support.recut_repository import CLASS, CutRelease, RecutHarness, build_release, plant
from support.signed_repository import DAY, DEVICE


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> RecutHarness:
    """A world for tests that only add to it."""
    return RecutHarness(tmp_path_factory.mktemp("recut"))


@pytest.fixture()
def world(tmp_path: Path) -> RecutHarness:
    return RecutHarness(tmp_path)


def publish_targets(world: RecutHarness, published: PublishedMetadata) -> None:
    """Sign this list of releases and what leads to it; the planner's metadata stays."""
    signer = world.repository.signer
    world.repository.store.publish(signer.publish(published, targets=signer.next_targets(published)))


def refreshed(world: RecutHarness, name: str = DEVICE) -> TrustStore:
    store = world.store(name)
    store.refresh(world.fetch)
    return store


def write(world: RecutHarness, folder: Path, one: CutRelease, proof: dict[str, bytes]) -> None:
    write_release(folder, one.digest, one.raw, proof, one.chunks.__getitem__, bootstrap_root=world.bootstrap)


def load_remotely(world: RecutHarness, folder: Path, one: CutRelease) -> None:
    """As an offload server loads the far half of the first row."""
    shelf = ModelRepository(release_opener(folder, world.bootstrap), OnnxRuntime())
    shelf.model(oip.remote_name(one.digest, CLASS, one.manifest.plans[CLASS].rows[0].name)).half.load()


# The good case


@pytest.mark.parametrize("after", [(4,), (1, 5), (2,), (1, 2, 3, 4, 5, 6)])
def test_a_recut_is_verified_fetched_and_loaded(signed: RecutHarness, tmp_path: Path, after: tuple[int, ...]) -> None:
    """The planner's signature and the release's own: fetched, proven without a network, written, loaded on both sides,
    and the answer is the whole model's, bit for bit."""
    one = signed.recut(*after)
    assert signed.repository.add_recut(one.raw) == one.digest
    raw, proof = refreshed(signed, f"cam-{after}").manifest_with_proof(one.digest, signed.fetch)
    assert raw == one.raw and verify_release(raw, proof, signed.bootstrap).base == signed.base.manifest

    write(signed, tmp_path, one, proof)
    opened = open_release(tmp_path, one.digest, signed.bootstrap)
    load_remotely(signed, tmp_path, one)
    feeds = tiny.feeds_of(tiny.prepared("chain"))
    live = dict(feeds)
    for described in opened.manifest.slices:
        live |= OnnxRuntime().load(described, opened.slice_folder(described.name)).run(live)
    assert tiny.same_bits(live, tiny.run_whole(tiny.prepared("chain").raw, feeds))


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_kind_of_model_can_be_recut(name: str, tmp_path: Path) -> None:
    """Branches, captured tensors, loops, state, eight bits, weights that several layers use: each layer's operators
    and weights keep their bytes in whatever slice they are."""
    layers = [layer.name for layer in tiny.prepared(name).graph.layers]
    world = ModelRecutHarness(tmp_path, name)
    for count in range(len(layers) + 1):
        one = build_release(name, layers[:count], private_tensors=(), recut_of=world.base.digest)
        world.repository.add_recut(one.raw)
        write(world, tmp_path / "device", one, world.repository.proof(one.digest))


class ModelRecutHarness(RecutHarness):
    """The same with another model, and no limits."""

    def __init__(self, folder: Path, model: str) -> None:
        self.model = model
        super().__init__(folder, required_local_layers=(), private_tensors=())


def test_a_recut_over_the_same_slices_needs_no_fingerprint(tmp_path: Path) -> None:
    """Where a model has no fingerprint (TFLite), rows may still be put together anew from the release's own slices."""
    world = RecutHarness(tmp_path)
    base = build_release("chain", world.layers[:2], world.layers[:4], **world.kept).with_(fingerprint=None)
    world.publish(base)
    plan = base.manifest.plans[CLASS]
    fewer = base.with_(recut_of=base.digest, plans={CLASS: msgspec.structs.replace(plan, rows=plan.rows[1:])})
    world.repository.add_recut(fewer.raw)
    write(world, tmp_path / "device", fewer, refreshed(world).manifest_with_proof(fewer.digest, world.fetch)[1])
    load_remotely(world, tmp_path / "device", fewer)

    cut_anew = build_release("chain", world.layers[:3], **world.kept, recut_of=base.digest)
    with pytest.raises(TrustError, match="needs the release key"):
        world.repository.add_recut(cut_anew.raw)


def test_a_recut_may_tighten_limits(world: RecutHarness) -> None:
    """More layers kept, more tensors that never leave."""
    one = world.recut(4, required_local_layers=world.layers[:3], private_tensors=("image", "a1"))
    world.repository.add_recut(one.raw)
    assert refreshed(world).manifest(one.digest, world.fetch) == one.raw


def test_adding_a_recut_needs_no_release_key(world: RecutHarness) -> None:
    """With the release key taken away the planner still publishes, and the targets metadata is not written anew."""
    world.repository.keys.retire("targets", ())
    before = world.repository.store.targets().version
    assert not world.repository.signs_releases
    world.now += 60
    digest = world.repository.add_recut(world.recut().raw)
    assert world.repository.recuts() == [digest] and world.repository.store.targets().version == before
    assert refreshed(world).manifest(digest, world.fetch) == world.recut().raw
    assert world.repository.add_recut(world.recut().raw) == digest


def test_an_installed_recut_survives_the_removal_of_its_base(world: RecutHarness, tmp_path: Path) -> None:
    """(g) A base that the targets role lists no more: nothing new is installed of it, and what runs is kept."""
    one = world.recut()
    world.repository.add_recut(one.raw)
    store = refreshed(world)
    write(world, tmp_path / "device", one, store.manifest_with_proof(one.digest, world.fetch)[1])
    published = world.repository.store.published()
    published.targets.targets.clear()
    publish_targets(world, published)
    world.now += 60
    store.refresh(world.fetch)

    with pytest.raises(TrustError, match="not one that the release key signed"):
        store.manifest(one.digest, world.fetch)
    with pytest.raises(TrustError, match="not one that the release key signed"):
        verify_release(one.raw, world.repository.proof(one.digest), world.bootstrap)
    with pytest.raises(TrustError, match="no recut of a release"):
        world.repository.add_recut(world.recut(3).raw)
    open_release(tmp_path / "device", one.digest, world.bootstrap)


# What a thief of the planner's key may try: the manifest

Twist = Callable[[CutRelease], CutRelease]


def row(change: Callable[[Row], Row]) -> Twist:
    return lambda one: one.with_rows(change)


def sends(*names: str) -> Twist:
    return row(lambda one: msgspec.structs.replace(one, sends=names) if one.sends else one)


def moved_layer(one: CutRelease) -> CutRelease:
    """A layer is said to be in the slice after the one that holds it."""
    first, second = (one.cut[place].slice.layers for place in (0, 1))
    return one.with_slice(0, layers=first[:-1]).with_slice(1, layers=(first[-1], *second))


def earlier(*layers: str) -> Twist:
    """A cut after these layers, under a plan that says as the base's does what must stay."""
    return lambda one: build_release("chain", layers, recut_of=one.manifest.recut_of, private_tensors=()).with_plan(
        private_tensors=("image",), required_local_layers=one.manifest.plans[CLASS].required_local_layers
    )


def compiled(one: CutRelease) -> CutRelease:
    forged = CompiledSlice(msgspec.structs.replace(one.cut[0].slice, name="tpu"), CLASS, (one.cut[0].slice.name,))
    return one.with_(compiled=(forged,))


OTHER = TensorSpec("image", "FP32", (1, 3, 8, 8))


def labels_of(manifest: Manifest) -> OutputKind:
    """A kind of its first output with a name for the class, of which the base says nothing."""
    return OutputKind(kind="labels", outputs=(manifest.outputs[0].name,), names=("a thing that it is not",))


FORGED: dict[str, tuple[Twist, str]] = {
    "a: another model": (lambda one: one.with_(model="other@1"), "change the release's model"),
    "a: another file": (lambda one: one.with_(model_sha256="1" * 64), "model_sha256"),
    "e: other answers": (
        lambda one: one.with_(golden=(GoldenExample(Chunk("1" * 64, 9), Chunk("2" * 64, 9)),)),
        "golden",
    ),
    "e: no answers": (lambda one: one.with_(golden=()), "golden"),
    "e: an input spec": (lambda one: one.with_(input_spec=parse_input_spec("image/jpeg 16x16 q85 rgb")), "input_spec"),
    "e: an output kind": (lambda one: one.with_(output_kind=labels_of(one.manifest)), "output_kind"),
    "e: other inputs": (lambda one: one.with_(inputs=(OTHER,)), "inputs"),
    "e: other outputs": (lambda one: one.with_(outputs=()), "outputs"),
    "d: raw input may leave": (lambda one: one.with_plan(private_tensors=()), "'image' leave the device"),
    "d: a layer less kept": (
        lambda one: one.with_plan(required_local_layers=()),
        "lets layer 'stem/Conv' run elsewhere",
    ),
    "d: another layer kept": (
        lambda one: one.with_plan(required_local_layers=("conv1",)),
        "lets layer 'stem/Conv' run elsewhere",
    ),
    "d: raw input in a row": (earlier(), "must stay on the device"),
    "d: another class, weaker": (lambda one: one.with_plan("pi5", private_tensors=()), "'image' leave the device"),
    "d: another class, earlier": (
        lambda one: one.with_plan("pi5", required_local_layers=()),
        "lets layer 'stem/Conv' run elsewhere",
    ),
    "d: a plan of another class": (
        lambda one: one.with_(plans={"pi5": one.manifest.plans[CLASS]}),
        "is for another device class or model",
    ),
    "no plan": (lambda one: one.with_(plans={}), "without a plan"),
    "d: has no local row": (
        lambda one: one.with_plan(rows=one.manifest.plans[CLASS].rows[:1]),
        "has no local row",
    ),
    "d: precision lost": (
        row(lambda one: msgspec.structs.replace(one, codecs={"a": "int8"})),
        "loses precision",
    ),
    "d: more is sent": (sends("a4", "a1"), "sends other tensors"),
    "d: something else is sent": (sends("a1"), "sends other tensors"),
    "an intermediate comes back": (
        row(lambda one: msgspec.structs.replace(one, receives=("f",))),
        "remote half does not return",
    ),
    "the halves swapped": (
        row(lambda one: msgspec.structs.replace(one, device=one.remote, remote=one.device, sends=("image",))),
        "stay on the device|sends other",
    ),
    "f: no base": (lambda one: one.with_(recut_of=""), "is no recut|no recut of a release"),
    "g: a base that is not listed": (
        lambda one: one.with_(recut_of="1" * 64),
        "not one that the release key signed|no recut of a release",
    ),
    "a fingerprint of its own": (
        lambda one: one.with_(fingerprint=FingerprintFile("1" * 64, 5)),
        "fingerprint of its own",
    ),
    "c: a layer twice": (lambda one: one.with_slice(0, layers=(*one.cut[0].slice.layers, "wide")), "exactly once"),
    "c: a layer left out": (lambda one: one.with_slice(1, layers=one.cut[1].slice.layers[1:]), "exactly once"),
    "c: a slice left out": (
        lambda one: one.with_(slices=one.manifest.slices[:1]).with_plan(
            rows=(Row(name="local", device=(one.cut[0].slice.name,)),)
        ),
        "exactly once",
    ),
    "c: layers in another order": (
        lambda one: one.with_slice(0, layers=one.cut[0].slice.layers[::-1]),
        "in another order",
    ),
    "c: layers of another slice": (moved_layer, "takes or gives other tensors"),
    "other kernels": (lambda one: one.with_slice(0, kernels="plain"), "another format or other kernels"),
    "another engine": (lambda one: one.with_slice(0, format="tflite"), "another format or other kernels"),
    "no file": (lambda one: one.with_slice(0, files=()), "another format or other kernels"),
    "an output more": (
        lambda one: one.with_slice(0, outputs=(*one.cut[0].slice.outputs, TensorSpec("zzz", "FP32", (1,)))),
        "takes or gives other tensors",
    ),
    "an output of another type": (
        lambda one: one.with_slice(0, outputs=(TensorSpec(one.cut[0].slice.outputs[0].name, "FP32", (1,)),)),
        "declares a tensor differently than the model",
    ),
    "an input less": (lambda one: one.with_slice(1, inputs=()), "takes or gives other tensors"),
    "in another order": (lambda one: one.with_(slices=one.manifest.slices[::-1]), "before it is written"),
    "a compiled slice": (compiled, "compiled slice 'tpu'"),
}


@pytest.mark.parametrize("attack", FORGED)
def test_a_stolen_planner_key_can_only_sign_recuts(signed: RecutHarness, tmp_path: Path, attack: str) -> None:
    """Signed by the real planner's key, and refused: when it is added, fetched, written, opened and served."""
    twist, why = FORGED[attack]
    one = twist(signed.recut())
    with pytest.raises((TrustError, MalformedMessage), match=why):
        signed.repository.add_recut(one.raw)
    signed.steal(one.raw)
    with pytest.raises((TrustError, MalformedMessage), match=why):
        refreshed(signed).manifest(one.digest, signed.fetch)
    proof = forged_proof(signed, one)
    with pytest.raises((TrustError, MalformedMessage), match=why):
        write(signed, tmp_path / "device", one, proof)
    assert stored_releases(tmp_path / "device") == []
    plant(tmp_path / "cloud", one, proof)
    with pytest.raises(TrustError):
        open_release(tmp_path / "cloud", one.digest, signed.bootstrap)
    with pytest.raises(TrustError):
        ModelRepository(release_opener(tmp_path / "cloud", signed.bootstrap), OnnxRuntime()).model(
            oip.remote_name(one.digest, CLASS, "cut-1")
        )


def forged_proof(world: RecutHarness, one: CutRelease) -> dict[str, bytes]:
    """All that the thief can lay beside it: the planner's word, and the true base."""
    honest = world.recut(4)
    world.repository.add_recut(honest.raw)
    return world.repository.proof(honest.digest)


# What a thief may try: the slices' files


def graph(place: int, change: Callable[[onnx.ModelProto], object]) -> Twist:
    return lambda one: one.with_graph(place, change)


def on_graph(place: int, change: Callable[[onnx.GraphProto], object]) -> Twist:
    return lambda one: one.with_graph(place, lambda model: change(model.graph))


def raw_graph(place: int, change: Callable[[bytes], bytes]) -> Twist:
    return lambda one: one.with_files(place, graph=change(one.cut[place].files["graph.onnx"]))


def other_weights(one: CutRelease) -> CutRelease:
    raw = bytearray(one.cut[0].files["weights.bin"])
    raw[17] ^= 1
    return one.with_files(0, weights=bytes(raw))


def leak(graph_: onnx.GraphProto) -> None:
    """The raw input under the name of what may be sent."""
    name = graph_.output[0].name
    del graph_.node[:]
    graph_.node.append(helper.make_node("Identity", ["image"], [name]))


def add_leak(graph_: onnx.GraphProto) -> None:
    graph_.node.append(helper.make_node("Identity", ["image"], ["leak"]))
    graph_.output.append(helper.make_tensor_value_info("leak", TensorProto.FLOAT, [1, 3, 16, 16]))


def swap_weights(graph_: onnx.GraphProto) -> None:
    """Each of two weights where the other lies."""
    first, second = (list(tensor.external_data) for tensor in graph_.initializer[:2])
    for place, entries in ((0, second), (1, first)):
        del graph_.initializer[place].external_data[:]
        graph_.initializer[place].external_data.extend(entries)


def entry(key: str, value: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph_: onnx.GraphProto) -> None:
        kept = [tensor for tensor in graph_.initializer[0].external_data if tensor.key != key]
        del graph_.initializer[0].external_data[:]
        graph_.initializer[0].external_data.extend(kept)
        graph_.initializer[0].external_data.add(key=key, value=value)

    return change


def shadow(graph_: onnx.GraphProto) -> None:
    """A weight by the name of the tensor that the slice takes."""
    graph_.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), graph_.input[0].name))


def inline(graph_: onnx.GraphProto) -> None:
    """A weight's data in the graph, in place of the pointer."""
    tensor = graph_.initializer[0]
    graph_.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(tuple(tensor.dims), np.float32), tensor.name))


def function(model: onnx.ModelProto) -> None:
    """A function that has an operator's name."""
    opsets = [helper.make_opsetid("", 17)]
    node = helper.make_node("Identity", ["X"], ["Y"])
    model.functions.append(helper.make_function("", "Conv", ["X"], ["Y"], [node], opsets))


def sparse(graph_: onnx.GraphProto) -> None:
    values = numpy_helper.from_array(np.ones(1, np.float32), "w1")
    indices = numpy_helper.from_array(np.zeros(1, np.int64), "at")
    graph_.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [4]))


def twice(raw: bytes) -> bytes:
    """Protobuf merges what is there twice: one reader's last word is another's first."""
    return raw + raw


def renamed(graph_: onnx.GraphProto) -> None:
    graph_.output[0].name = "image"


def reattributed(graph_: onnx.GraphProto) -> None:
    graph_.node[0].attribute.append(helper.make_attribute("auto_pad", "SAME_UPPER"))


NODES, WEIGHT = "holds other operators", "is not the model's|not one of the model|not in the slice's"
TAMPERED: dict[str, tuple[Twist, str]] = {
    "b: other weights": (other_weights, WEIGHT),
    "b: weights exchanged": (on_graph(0, swap_weights), WEIGHT),
    "b: a weight reshaped": (on_graph(0, lambda one: one.initializer[0].dims.append(1)), WEIGHT),
    "b: a weight in the graph": (on_graph(0, inline), "an unexpected field|not one of the model"),
    "b: a weight elsewhere": (on_graph(0, entry("location", "/etc/passwd")), WEIGHT),
    "b: a weight beyond the file": (on_graph(0, entry("offset", "99999999")), WEIGHT),
    "b: a weight at no place": (on_graph(0, entry("offset", "-1")), "has no location"),
    "b: a checksum more": (on_graph(0, lambda one: one.initializer[0].external_data.add(key="x", value="y")), WEIGHT),
    "b: a weight twice": (on_graph(0, lambda one: one.initializer.append(one.initializer[0])), "a weight twice"),
    "b: a weight in a tensor's place": (on_graph(1, shadow), "an unexpected field|not one of the model"),
    "c: a node added": (on_graph(0, lambda one: one.node.append(helper.make_node("Relu", ["a1"], ["q"]))), NODES),
    "c: a node changed": (on_graph(0, reattributed), NODES),
    "c: a node removed": (on_graph(1, lambda one: one.node.pop()), NODES),
    "c: a node twice": (on_graph(0, lambda one: one.node.append(one.node[0])), NODES),
    "c: an operator exchanged": (on_graph(0, lambda one: setattr(one.node[-1], "op_type", "Neg")), NODES),
    "c: the raw input by another name": (on_graph(0, leak), NODES),
    "c: the raw input beside": (on_graph(0, add_leak), NODES),
    "an output renamed": (on_graph(0, renamed), "declares other inputs or outputs"),
    "an output more": (on_graph(0, lambda one: one.output.append(one.input[0])), "declares other inputs or outputs"),
    "an input less": (on_graph(0, lambda one: one.input.pop()), "declares other inputs or outputs"),
    "a type of an input": (
        on_graph(0, lambda one: setattr(one.input[0].type.tensor_type, "elem_type", TensorProto.DOUBLE)),
        "declares other inputs or outputs",
    ),
    "a function": (graph(0, function), "other functions"),
    "another operator set": (
        graph(0, lambda one: setattr(one.opset_import[0], "version", 13)),
        "other operator sets or another version",
    ),
    "an operator set twice": (graph(0, lambda one: one.opset_import.append(one.opset_import[0])), "set twice"),
    "another version of ONNX": (
        graph(0, lambda one: setattr(one, "ir_version", 3)),
        "other operator sets or another version",
    ),
    "metadata": (graph(0, lambda one: one.metadata_props.add(key="ort_config", value="{}")), "an unexpected field"),
    "training": (graph(0, lambda one: one.training_info.add()), "an unexpected field"),
    "a sparse weight": (on_graph(0, sparse), "sparse weight that is not"),
    "types of inner tensors": (on_graph(0, lambda one: one.value_info.append(one.input[0])), "an unexpected field"),
    "two graphs": (raw_graph(0, twice), "repeats a singular field"),
    "an end": (raw_graph(0, lambda raw: raw + b"\0"), "unexpected encoding|truncated"),
    "half": (raw_graph(0, lambda raw: raw[: len(raw) // 2]), "truncated"),
    "nothing": (raw_graph(0, lambda raw: raw[:4]), "no graph|truncated"),
}


@pytest.mark.parametrize("attack", TAMPERED)
def test_recut_files_must_contain_the_released_model(signed: RecutHarness, tmp_path: Path, attack: str) -> None:
    """The manifest is flawless, signed and names these very files; what is in them is not the model. Nothing of it is
    left on a device's disk, and what a thief puts there himself is not loaded, neither there nor by a server."""
    twist, why = TAMPERED[attack]
    one = twist(signed.recut())
    proof = signed.stolen_proof(one)
    refreshed(signed).manifest(one.digest, signed.fetch)
    with pytest.raises(TrustError, match=why):
        write(signed, tmp_path / "device", one, proof)
    assert stored_releases(tmp_path / "device") == []

    plant(tmp_path / "cloud", one, proof)
    opened = open_release(tmp_path / "cloud", one.digest, signed.bootstrap)
    bad = [cut.slice.name for cut in one.cut if not opened.has_slices([cut.slice.name])]
    assert len(bad) == 1
    with pytest.raises(TrustError, match=why):
        opened.slice_folder(bad[0])
    forged = [row_ for row_ in one.manifest.plans[CLASS].rows if bad[0] in row_.remote]
    if forged:
        with pytest.raises(TrustError, match=why):
            load_remotely(signed, tmp_path / "cloud", one)


def test_a_slice_fetched_later_is_verified_too(signed: RecutHarness, tmp_path: Path) -> None:
    """A device that first needed one slice and then another checks the other as well."""
    one = signed.recut().with_graph(1, lambda model: model.graph.node.pop())
    proof = signed.stolen_proof(one)
    names = [cut.slice.name for cut in one.cut]

    def some(*only: str) -> None:
        write_release(
            tmp_path, one.digest, one.raw, proof, one.chunks.__getitem__, only, bootstrap_root=signed.bootstrap
        )

    some(names[0])
    with pytest.raises(TrustError, match=NODES):
        some(*names)
    assert not (tmp_path / one.digest / "slices" / names[1]).exists()


def sealed(one: CutRelease) -> CutRelease:
    """The same with every slice encrypted."""
    closed = [encrypt_slice(cut.slice, cut.runs, b"s" * 32) for cut in one.cut]
    cut = tuple(CutSlice(*sealed) for sealed in closed)
    return replace(one, cut=cut).with_(slices=tuple(slice_ for slice_, _ in closed))


def test_a_recut_of_an_encrypted_release_keeps_its_ciphertext(world: RecutHarness) -> None:
    """Nobody but who has the keys could compare what is in a slice of another cut, so that there is none: neither in
    clear nor encrypted; its own slices go into other tables as they are."""
    base = sealed(build_release("chain", world.layers[:2], world.layers[:4], **world.kept)).with_(fingerprint=None)
    world.publish(base)
    elsewhere = build_release("chain", world.layers[:3], **world.kept, recut_of=base.digest)
    for recut in (elsewhere, sealed(elsewhere)):
        with pytest.raises(TrustError, match="needs the release key"):
            world.repository.add_recut(recut.raw)
        world.steal(recut.raw)
        with pytest.raises(TrustError, match="needs the release key"):
            refreshed(world).manifest(recut.digest, world.fetch)
    with_fingerprint = sealed(build_release("chain", world.layers[:2], **world.kept))
    world.publish(with_fingerprint)
    for recut in (elsewhere, sealed(elsewhere)):
        forged = recut.with_(recut_of=with_fingerprint.digest)
        with pytest.raises(TrustError, match=r"in clear|another format or other kernels"):
            world.repository.add_recut(forged.raw)

    plan = base.manifest.plans[CLASS]
    fewer = base.with_(recut_of=base.digest, plans={CLASS: msgspec.structs.replace(plan, rows=plan.rows[1:])})
    world.repository.add_recut(fewer.raw)
    assert refreshed(world).manifest(fewer.digest, world.fetch) == fewer.raw


@pytest.mark.parametrize("name", ["base.json", "fingerprint.json", "planner.json", "targets.json"])
def test_a_recut_without_its_fingerprint_does_not_open(signed: RecutHarness, tmp_path: Path, name: str) -> None:
    """The fingerprint is corrupt, of another release, or missing: the recut counts as unsigned until it is written
    again."""
    one = signed.recut()
    signed.repository.add_recut(one.raw)
    proof = signed.repository.proof(one.digest)
    write(signed, tmp_path, one, proof)
    path = tmp_path / one.digest / "proof" / name
    good = path.read_bytes()
    for bad in (good.replace(b'"', b"'", 1), good[: len(good) // 2], one.raw, None):
        path.unlink() if bad is None else path.write_bytes(bad)
        with pytest.raises(TrustError):
            open_release(tmp_path, one.digest, signed.bootstrap)
        write(signed, tmp_path, one, proof)
        open_release(tmp_path, one.digest, signed.bootstrap)


# Roles


def test_a_recut_of_a_recut_is_refused(world: RecutHarness) -> None:
    """(f) Limits could be loosened step by step: the base is always what the release key signed."""
    first = world.recut(3)
    world.repository.add_recut(first.raw)
    second = build_release("chain", world.layers[:5], **world.kept, recut_of=first.digest)
    with pytest.raises(TrustError, match="no recut of a release that the release key signed"):
        world.repository.add_recut(second.raw)
    world.steal(second.raw)
    with pytest.raises(TrustError, match="not one that the release key signed"):
        refreshed(world).manifest(second.digest, world.fetch)


def test_a_release_among_recuts_is_refused(world: RecutHarness) -> None:
    """(h) A first release of a model by the planner's key, under its own path and under the release key's."""
    other = build_release("branches", private_tensors=())
    world.steal(other.raw)
    with pytest.raises(TrustError, match="is no recut"):
        refreshed(world).manifest(other.digest, world.fetch)
    late = build_release("quantised", private_tensors=())
    world.steal(late.raw, f"releases/{late.digest}.json")
    with pytest.raises(TrustError, match="not one that the release key signed"):
        refreshed(world).manifest(late.digest, world.fetch)


def test_a_recut_among_releases_is_refused(world: RecutHarness) -> None:
    """(h) Even the release key signs no recut: what it signs is measured by nothing, and says so."""
    one = world.recut().with_plan(private_tensors=())
    world.publish(one)
    with pytest.raises(TrustError, match="only the planner's key may sign"):
        refreshed(world).manifest(one.digest, world.fetch)
    with pytest.raises(TrustError, match="only the planner's key may sign"):
        verify_release(one.raw, world.repository.proof(one.digest), world.bootstrap)


def test_a_release_listed_by_the_planner_keeps_the_release_keys_signature(world: RecutHarness) -> None:
    """The planner lists a release under its own path too: the release key's signature still decides."""
    world.steal(world.base.raw)
    assert refreshed(world).manifest(world.base.digest, world.fetch) == world.base.raw


def signer(world: RecutHarness, role: str) -> CryptoSigner:
    return CryptoSigner(load_or_make_key(world.folder / "repository" / "keys" / f"{role}.pem"))


def test_a_statement_signed_by_the_planner_is_refused(world: RecutHarness) -> None:
    """(i) A statement signed with the planner's key has no effect on any device."""
    store = refreshed(world)
    payload = decode(world.state(counter=5), Signed).payload
    made_ = signer(world, "planner").sign(payload)
    with pytest.raises(TrustError, match="not the director's"):
        store.verify_statement(
            encode(Signed(payload, (Signature(made_.keyid, made_.signature),))), DEVICE, for_install=True
        )


@pytest.mark.parametrize("role", ["director", "snapshot", "timestamp", "root"])
def test_planner_metadata_signed_by_another_role_is_refused(world: RecutHarness, role: str) -> None:
    """(i) Releases are installed all the same."""
    one = world.recut()
    world.repository.add_recut(one.raw)

    def forged(path: str, raw: bytes) -> bytes:
        if not path.endswith(".planner.json"):
            return raw
        metadata = Metadata[Targets].from_bytes(raw)
        metadata.sign(signer(world, role))
        return metadata.to_bytes()

    proof = world.repository.proof(one.digest)
    metadata = Metadata[Targets].from_bytes(proof["planner.json"])
    metadata.sign(signer(world, role))
    with pytest.raises(TrustError, match="planner"):
        verify_release(one.raw, {**proof, "planner.json": metadata.to_bytes()}, world.bootstrap)
    world.twist = forged
    store = refreshed(world)
    with pytest.raises(TrustError, match="not one that the release key signed"):
        store.manifest(one.digest, world.fetch)
    assert store.manifest(world.base.digest, world.fetch) == world.base.raw


def test_replayed_planner_metadata_is_refused(world: RecutHarness) -> None:
    """A replay of the planner's older metadata installs no recut, whatever the cache lost; releases continue."""
    first = world.recut(3)
    world.repository.add_recut(first.raw)
    backup = world.backup()
    world.now += DAY
    world.repository.add_recut(world.recut(5).raw)
    store = refreshed(world)
    assert store.manifest(first.digest, world.fetch) == first.raw

    world.restore(backup)
    # all but the planner's is fresh: the thief has the online keys as well
    publish_targets(world, world.repository.store.published())
    for name in ("planner.json", "snapshot.json", "timestamp.json"):
        (world.folder / DEVICE / "cache" / name).unlink()
    store = refreshed(world)
    with pytest.raises(TrustError, match="not one that the release key signed"):
        store.manifest(first.digest, world.fetch)
    assert store.manifest(world.base.digest, world.fetch) == world.base.raw


def test_expired_planner_metadata_installs_no_recut_but_releases_continue(world: RecutHarness) -> None:
    """Its expiry is its own: installed recuts keep running, and the release key's metadata stays valid."""
    one = world.recut()
    world.repository.add_recut(one.raw)
    store = refreshed(world)
    raw, proof = store.manifest_with_proof(one.digest, world.fetch)
    world.now += 91 * DAY
    publish_targets(world, world.repository.store.published())
    store.refresh(world.fetch)
    with pytest.raises(TrustError):
        store.manifest(one.digest, world.fetch)
    assert store.manifest(world.base.digest, world.fetch) == world.base.raw
    assert verify_release(raw, proof, world.bootstrap).manifest == one.manifest

    world.repository.refresh_timestamp()
    store.refresh(world.fetch)
    assert store.manifest(one.digest, world.fetch) == raw


def test_a_stolen_planner_key_is_rotated_away(world: RecutHarness) -> None:
    """`keys rotate planner`: what it signed before stays listed under the new key, and the old one signs nothing more;
    that a thief counted ahead does not matter."""
    one = world.recut()
    world.repository.add_recut(one.raw)
    stolen = signer(world, "planner")
    world.now += 3650 * DAY
    world.repository.add_recut(world.recut(5).raw)
    world.now -= 3650 * DAY
    store = refreshed(world)
    assert Rotation(world.repository).change(KeyChange(anew=("planner",)))
    world.now += 60

    store.refresh(world.fetch)
    assert store.manifest(one.digest, world.fetch) == one.raw
    proof = store.manifest_with_proof(one.digest, world.fetch)[1]
    forged = Metadata[Targets].from_bytes(proof["planner.json"])
    forged.sign(stolen)
    with pytest.raises(TrustError, match="planner"):
        verify_release(one.raw, {**proof, "planner.json": forged.to_bytes()}, world.bootstrap)


def test_delegations_by_the_planner_are_ignored(world: RecutHarness) -> None:
    """Roles that the planner delegates to are neither fetched nor trusted."""
    one = world.recut()
    published = world.repository.store.published()
    published.planner.delegations = published.targets.delegations
    world.repository.store.publish(world.repository.signer.publish(published, planner=published.planner))
    world.repository.add_recut(one.raw)
    world.fetched.clear()
    assert refreshed(world).manifest(one.digest, world.fetch) == one.raw
    assert not [path for path in world.fetched if "director" in path]


@pytest.mark.parametrize("path", ["recuts/", "fingerprints/", "releases/"])
def test_a_missing_file_is_retried(world: RecutHarness, path: str) -> None:
    """A file that the controller does not have (yet) is a lost link, no attack."""
    one = world.recut()
    world.repository.add_recut(one.raw)
    store = refreshed(world)

    def fetch(wanted: str, most: int) -> bytes:
        if path in wanted:
            raise FileNotFoundError(wanted)
        return world.fetch(wanted, most)

    with pytest.raises(LinkError, match="not there"):
        store.manifest(one.digest, fetch)
    assert store.manifest(one.digest, world.fetch) == one.raw


def test_planner_metadata_survives_an_offline_restart(world: RecutHarness) -> None:
    """The proof on disk holds its metadata; a corrupt one only requires a refresh first."""
    one = world.recut()
    world.repository.add_recut(one.raw)
    refreshed(world)
    again = world.store()
    assert "planner.json" not in again.proof()
    (world.folder / DEVICE / "proof.json").write_text("{}")
    with pytest.raises(LinkError, match="refresh first"):
        world.store().proof()


def test_only_recut_and_fingerprint_paths_are_served(world: RecutHarness) -> None:
    """As devices request them, over MQTT."""
    digest = world.repository.add_recut(world.recut().raw)
    fingerprint = decode_manifest(world.base.raw).fingerprint
    assert fingerprint is not None
    assert world.repository.read(f"targets/{recut_path(digest)}") == world.recut().raw
    assert len(world.repository.read(f"targets/fingerprints/{fingerprint.sha256}.json")) == fingerprint.bytes
    for path in ("targets/recuts/../../keys/planner.pem", "targets/recuts/x.json", "metadata/planner.pem"):
        with pytest.raises(FileNotFoundError):
            world.repository.read(path)
