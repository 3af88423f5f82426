"""Requests that share a run: which graphs come into question, that bits are the same, and when it is worth it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgesplit.crypto.slice_encryption import SliceInMemory, SliceSource
from edgesplit.plan import Link, Plan, Row
from edgesplit.release.manifest import Manifest, Slice, TensorSpec
from edgesplit.runtime import Runtime, Tensor, Tensors
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit_offload.models import batch_benefit
from edgesplit_offload.models.batch_benefit import (
    choose_batches,
    is_batchable,
    is_stackable,
    measure_benefit,
    random_inputs,
)
from edgesplit_offload.models.batch_graph import batched_model, batched_source
from edgesplit_offload.models.remote_half import RemoteHalf
from edgesplit_offload.models.slice_cache import SliceCache
from edgesplit_offload.scheduling.run_times import BatchBenefit

RNG = np.random.default_rng(3)
X = TensorSpec("x", "FP32", (1, 8))
Y = TensorSpec("y", "FP32", (1, 4))
Y8 = TensorSpec("y", "FP32", (1, 8))


def weight(name: str, *shape: int) -> onnx.TensorProto:
    return numpy_helper.from_array(RNG.standard_normal(shape).astype(np.float32), name)


def graph(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], takes: TensorSpec = X, gives: TensorSpec = Y
) -> onnx.ModelProto:
    """A model of these nodes, for one input."""
    ends = [[helper.make_tensor_value_info(one.name, TensorProto.FLOAT, one.shape)] for one in (takes, gives)]
    made = helper.make_graph(nodes, "slice", ends[0], ends[1], weights)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def dense() -> onnx.ModelProto:
    """Two full connections with a reshape of the old kind between them, whose target says one."""
    target = numpy_helper.from_array(np.array([1, 6], np.int64), "target")
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", "target"], ["c"]),
        helper.make_node("LeakyRelu", ["c"], ["d"], alpha=0.2),
        helper.make_node("MatMul", ["d", "v"], ["y"]),
    ]
    return graph(nodes, [weight("w", 8, 6), weight("v", 6, 4), target])


def run(model: bytes, inputs: np.ndarray) -> np.ndarray:
    import onnxruntime

    session = onnxruntime.InferenceSession(model, OnnxRuntime().session_options(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["y"], {"x": inputs})[0])


def test_a_graph_of_batch_size_one_runs_batches_bit_for_bit() -> None:
    """Shapes and reshape targets are changed; one alone, and each of a stack, come out as they did."""
    model = dense().SerializeToString()
    many = batched_model(model)
    assert many is not None
    inputs = RNG.standard_normal((7, 8)).astype(np.float32)
    alone = np.concatenate([run(model, inputs[place : place + 1]) for place in range(7)])
    assert run(many, inputs).tobytes() == alone.tobytes()
    assert run(many, inputs[:1]).tobytes() == alone[:1].tobytes()


def node(kind: str, inputs: list[str], outputs: list[str], **attributes: object) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, outputs, **attributes)


OUT_OF_QUESTION: dict[str, onnx.ModelProto] = {
    "picks by value": graph(
        [node("TopK", ["x", "k"], ["y", "i"], axis=1)], [numpy_helper.from_array(np.array([4], np.int64), "k")]
    ),
    "of another domain": graph([node("Relu", ["x"], ["y"], domain="com.microsoft")], [], X, Y8),
    "asks for shapes": graph([node("Shape", ["x"], ["s"]), node("Reshape", ["x", "s"], ["y"])], [], X, Y8),
    "a reshape whose 0 is none": graph(
        [node("Reshape", ["x", "t"], ["y"], allowzero=1)],
        [numpy_helper.from_array(np.array([1, 8], np.int64), "t")],
        X,
        Y8,
    ),
    "a target that is something else, too": graph(
        [node("Reshape", ["x", "t"], ["r"]), node("Cast", ["t"], ["f"], to=1), node("Add", ["r", "f"], ["y"])],
        [numpy_helper.from_array(np.array([1, 8], np.int64), "t")],
        X,
        Y8,
    ),
}


@pytest.mark.parametrize("name", OUT_OF_QUESTION)
def test_a_model_that_mixes_its_batch_is_not_batched(name: str) -> None:
    """It is not even tried."""
    assert batched_model(OUT_OF_QUESTION[name].SerializeToString()) is None


@pytest.mark.parametrize("spoilt", [b"", b"\xff" * 9, b"nonsense", dense().SerializeToString()[:-3]])
def test_bytes_that_are_no_model_are_not_batched(spoilt: bytes) -> None:
    """They were signed, and still raise nothing."""
    assert batched_model(spoilt) is None


def release(folder: Path, model: onnx.ModelProto, takes: TensorSpec = X, gives: TensorSpec = Y) -> FakeRelease:
    return FakeRelease(folder, model, takes, gives)


class FakeRelease:
    """One slice, everything beyond the link; counts how often it is loaded."""

    digest = "ef" * 32

    def __init__(self, folder: Path, model: onnx.ModelProto, takes: TensorSpec, gives: TensorSpec) -> None:
        slice_ = Slice("s01", "onnx", ("all",), (takes,), (gives,))
        self.asked = 0
        self._folder = folder
        (folder / "s01").mkdir()
        onnx.save_model(
            model, str(folder / "s01" / "graph.onnx"), save_as_external_data=True, location="weights.bin",
            size_threshold=64, convert_attribute=False,
        )  # fmt: skip
        rows = (Row(name="local", device=("s01",)), Row(name="remote", remote=("s01",), sends=("x",), receives=("y",)))
        plan = Plan(
            model="m", device_class="c", rows=rows, link=Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)
        )
        self.manifest = Manifest(
            model="m@1", model_sha256="0" * 64, created="", input_spec=None, inputs=(takes,), outputs=(gives,),
            slices=(slice_,), plans={"c": plan},
        )  # fmt: skip

    def slice_folder(self, name: str) -> Path:
        self.asked += 1
        return self._folder / name


def half(of: FakeRelease, memory: SliceCache | None = None, wide: Runtime | None = None) -> RemoteHalf:
    ends = (of.manifest.inputs, of.manifest.outputs)
    return RemoteHalf(of, ("s01",), ends, OnnxRuntime(), memory or SliceCache(), wide)


class Clock:
    """Time that runs as told: by the size of the stack that ran last."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.now = seconds, 0.0

    def __call__(self) -> float:
        return self.now


def made_to_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight together take as long as one: nothing here depends on what this machine would measure."""
    monkeypatch.setattr(
        "edgesplit_offload.models.batch_benefit.measure_benefit",
        lambda *_, **__: choose_batches({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0}),
    )


def test_requests_are_batched_where_that_gains_and_answers_stay_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are in their file, as in a real slice; the unbatched session is unloaded."""
    made_to_gain(monkeypatch)
    memory, of = SliceCache(), release(tmp_path, dense())
    shared = half(of, memory)
    inputs = [{"x": RNG.standard_normal((1, 8)).astype(np.float32)} for _ in range(5)]
    before = shared.run(inputs)
    shared.measure(lambda: 0.0)
    assert shared.run_times.max_batch == 8
    after = shared.run(inputs)
    assert [one["y"].tobytes() for one in after] == [one["y"].tobytes() for one in before]
    assert shared.run(inputs[:1])[0]["y"].tobytes() == before[0]["y"].tobytes()
    assert of.asked == 2
    shared.unload()
    assert memory.bytes == 0
    assert shared.run(inputs)[4]["y"].tobytes() == before[4]["y"].tobytes()


def test_a_measurement_in_progress_kept_an_unloaded_model_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it load it again; the next request does, and is followed by another measurement."""
    memory = SliceCache()
    shared = half(release(tmp_path, dense()), memory)
    shared.load()

    def unload_meanwhile(*_: object, **__: object) -> BatchBenefit:
        shared.unload()
        assert not shared.is_loaded
        return choose_batches({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})

    monkeypatch.setattr("edgesplit_offload.models.batch_benefit.measure_benefit", unload_meanwhile)
    assert shared.claim_measurement()
    shared.measure(lambda: 0.0)
    assert (memory.bytes, shared.run_times.max_batch, shared.is_measured) == (0, 1, False)
    made_to_gain(monkeypatch)
    assert shared.claim_measurement()
    shared.measure(lambda: 0.0)
    assert (shared.run_times.max_batch, shared.is_loaded) == (8, True)


def test_a_measurement_loaded_a_model_that_was_unloaded_before_it_began(tmp_path: Path) -> None:
    """It waits for the next request instead."""
    memory = SliceCache()
    shared = half(release(tmp_path, dense()), memory)
    assert shared.claim_measurement()
    shared.unload()
    shared.measure(lambda: 0.0)
    assert (memory.bytes, shared.claim_measurement()) == (0, True)


class Wide:
    """Several threads, which give what `spoil` makes of the right answer."""

    name = "wide"

    def __init__(self, spoil: float) -> None:
        self.spoil, self.runs = spoil, 0

    def load(self, slice_: Slice, folder: SliceSource) -> Wide:
        self._program = OnnxRuntime().load(slice_, folder)
        return self

    def run(self, tensors: Tensors) -> dict[str, Tensor]:
        self.runs += 1
        return {name: value + np.float32(self.spoil) for name, value in self._program.run(tensors).items()}


@pytest.mark.parametrize("spoil", [0.0, 1.0])
def test_batches_run_on_several_threads_only_where_answers_stay_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: float
) -> None:
    """Otherwise one thread goes on running them; the engine that is not used is unloaded."""
    made_to_gain(monkeypatch)
    memory, of, wide = SliceCache(), release(tmp_path, dense()), Wide(spoil)
    shared = half(of, memory, wide)
    inputs = [{"x": RNG.standard_normal((1, 8)).astype(np.float32)} for _ in range(5)]
    before = shared.run(inputs)
    one = memory.bytes
    shared.measure(lambda: 0.0)
    tried = wide.runs
    after = shared.run(inputs)
    assert [one["y"].tobytes() for one in after] == [one["y"].tobytes() for one in before]
    assert (shared.run_times.max_batch, memory.bytes, tried > 0) == (8, one, True)
    assert (wide.runs > tried) == (spoil == 0.0)


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Softmax", ["x"], ["y"], axis=0)],
        [node("ReduceMax", ["x"], ["r"], axes=[0], keepdims=1), node("Sub", ["x", "r"], ["y"])],
        [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("Transpose", ["t"], ["y"], perm=[1, 0])],
    ],
    ids=["softmax over the stack", "largest of the stack", "turned and turned back"],
)
def test_the_trial_run_detects_a_model_that_mixes_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[onnx.NodeProto]
) -> None:
    """Only a model that keeps its inputs apart is batched: the trial decides, not the operators' names."""
    made_to_gain(monkeypatch)
    shared = half(release(tmp_path, graph(nodes, [], X, Y8), X, Y8))
    shared.measure(lambda: 0.0)
    assert shared.run_times.max_batch == (8 if nodes[0].op_type == "Transpose" else 1)


def test_an_encrypted_slice_is_batched_without_leaving_memory(tmp_path: Path) -> None:
    """Its graph is changed in memory, its weights stay where they were decrypted to."""
    of = release(tmp_path, dense())
    sealed = SliceInMemory("s01")
    for name in ("graph.onnx", "weights.bin"):
        sealed.add(name, [(tmp_path / "s01" / name).read_bytes()])
    many = batched_source(sealed)
    sealed.close()
    assert many is not None
    inputs = {"x": RNG.standard_normal((3, 8)).astype(np.float32)}
    with many:
        program = OnnxRuntime().load(of.manifest.slices[0], many)
    assert program.run(inputs)["y"].shape == (3, 4)


def test_only_fixed_tensors_of_batch_size_one_are_batched() -> None:
    """Lengths that depend on the data, text and other batches are not."""
    assert is_stackable([X, Y, TensorSpec("i", "INT64", (1, 3, 3))])
    for other in ((8,), (2, 8), (1, -1), ()):
        assert not is_stackable([TensorSpec("t", "FP32", other)])
    assert not is_stackable([TensorSpec("t", "BYTES", (1, 2))])


def test_noise_is_new_each_time_and_of_its_type() -> None:
    """Also of whole numbers and truth values."""
    rng = np.random.default_rng(0)
    for datatype, dtype in (("FP16", "f2"), ("UINT8", "u1"), ("INT64", "i8"), ("BOOL", "?")):
        spec = [TensorSpec("t", datatype, (1, 64))]
        one, other = (random_inputs(spec, rng)["t"] for _ in range(2))
        assert (one.dtype, one.shape) == (np.dtype(dtype), (1, 64))
        assert one.tobytes() != other.tobytes()


def test_the_trial_run_detects_a_wrong_number_of_answers() -> None:
    """A stack that gives one answer for all, or answers with other bits."""
    assert is_batchable([X], lambda given: given, lambda given: given)
    assert not is_batchable([X], lambda given: given, lambda given: {"x": given["x"][:1]})
    assert not is_batchable([X], lambda given: given, lambda given: {"x": np.nextafter(given["x"], np.float32(9))})


@pytest.mark.parametrize(
    ("seconds", "most", "enough"),
    [
        ({1: 1.0, 2: 1.9, 4: 3.6}, 1, 1),
        ({1: 1.0, 2: 1.6, 4: 3.0}, 1, 1),
        ({1: 1.0, 2: 1.2, 4: 1.5, 8: 2.0, 16: 3.2, 32: 6.4}, 16, 8),
        ({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0}, 32, 32),
        ({1: 2.65, 2: 3.17, 4: 3.69, 8: 5.07, 16: 7.36, 32: 10.15}, 32, 16),
        ({1: 1.0}, 1, 1),
        ({1: 1.0, 2: 1.7}, 1, 1),
    ],
)
def test_the_batch_size_is_chosen_by_measured_throughput(seconds: dict[int, float], most: int, enough: int) -> None:
    """Four tenths more must be answered; the largest stack that is best is used; two thirds of its gain are enough."""
    found = choose_batches(seconds)
    assert (found.max_batch, found.sufficient_batch) == (most, enough)


@pytest.mark.parametrize(("per_request", "sizes"), [(0.0, 5), (0.01, 2)])
def test_measuring_stops_where_a_larger_batch_gains_nothing(per_request: float, sizes: int) -> None:
    """By a clock of the test's own: a fixed cost alone gains up to the largest, a cost by size is seen at once."""
    clock = Clock({})

    def runs(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        clock.now += 0.001 + per_request * len(given["x"])
        return given

    found = measure_benefit([X], runs, runs, clock, budget_s=600.0)  # type: ignore[arg-type]
    assert len(found.seconds) - 1 == sizes
    assert found.max_batch == (32 if sizes == 5 else 1)
    assert batch_benefit.SIZES[-1] == 32
