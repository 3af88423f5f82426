"""Files that are no valid ONNX model are refused with the true reason."""

from __future__ import annotations

import io
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edgesplit.errors import ModelRefused, UsageError
from edgesplit_partitioner.onnx_format import archive as bundle
from edgesplit_partitioner.onnx_format import optimise
from edgesplit_partitioner.onnx_format.model import prepare_model
from edgesplit_partitioner.sandbox import limits
from support import onnx_models as tiny


def zipped(member: str) -> bytes:
    """A zip archive that holds one file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(member, b"something")
    return file.getvalue()


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty"),
        (b"\x20\x00\x00\x00TFL3" + bytes(40), "TFLite"),
        (zipped("archive/data.pkl"), "PyTorch"),
        (zipped("model.json"), "zip archive"),
        (pickle.dumps({"weights": [1.0]}), "pickle"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), "HDF5"),
        (b"\x1f\x8b\x08\x00" + bytes(40), "compressed"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS"),
        (b"<html>404</html>", "text"),
        (bytes(1000), "truncated or damaged"),
        (np.random.default_rng(0).bytes(4000), "truncated or damaged"),
        (b"\x08\x08", "no graph"),
    ],
)
def test_a_file_that_is_no_onnx_model_is_refused_by_name(raw: bytes, reason: str) -> None:
    """The error names the file."""
    with pytest.raises(ModelRefused, match=reason):
        prepare_model(raw)


def test_every_prefix_of_a_good_model_is_refused() -> None:
    """A download that stopped half-way is never taken for a model, wherever it stopped."""
    raw = tiny.chain()
    lengths = {*range(0, len(raw), 997), *range(64), *range(len(raw) - 64, len(raw))}
    for length in sorted(lengths):
        with pytest.raises(ModelRefused):
            prepare_model(raw[:length])


def test_damaged_bytes_are_accepted_or_refused() -> None:
    """A model with bytes overwritten is accepted or refused, nothing else."""
    seed = 20260101
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    good = tiny.listed_weights()
    for _ in range(12):
        raw = bytearray(good)
        for place in rng.integers(0, len(raw), 4):
            raw[place] = int(rng.integers(0, 256))
        try:
            prepare_model(bytes(raw))
        except ModelRefused as refusal:
            assert str(refusal)


def one_node(operator: str, domain: str = "", shape: Sequence[int | str] = (2,)) -> bytes:
    """A model of one operator."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], domain=domain)],
        "g",
        [tiny.value("x", list(shape))],
        [tiny.value("y", None)],
    )
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("my.own", 1), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString())


@pytest.mark.parametrize(("raw", "name"), [(one_node("Fooify"), "Fooify"), (one_node("Relu", "my.own"), "my.own:Relu")])
def test_unknown_operator_is_named(raw: bytes, name: str) -> None:
    """An operator that onnxruntime does not have is refused by its name."""
    with pytest.raises(ModelRefused, match=f"unknown operator '{name}'"):
        prepare_model(raw)


@pytest.mark.parametrize("operator", ["Fooify", "my.own:Relu"])
def test_a_custom_operator_was_named_only_after_a_binding(operator: str) -> None:
    """The push asked for --bind first, and refused the model for its operator once the length was given."""
    domain, _, name = operator.rpartition(":")
    with pytest.raises(ModelRefused, match=f"unknown operator '{operator}'") as refused:
        prepare_model(one_node(name, domain, ("batch", 2)))
    assert "--bind" not in str(refused.value)


def test_a_file_that_is_too_new_was_refused_for_it_only_after_a_binding() -> None:
    """As the operator above: which version is read, and how to lower it, comes before the lengths."""
    model = onnx.load_model_from_string(one_node("Relu", shape=("batch", 2)))
    model.ir_version = 99
    with pytest.raises(ModelRefused, match="IR version 99 is too new") as refused:
        prepare_model(model.SerializeToString())
    assert "--bind" not in str(refused.value)


def test_an_operator_of_onnxruntime_itself_still_asks_for_its_lengths() -> None:
    """An operator outside of ONNX's own sets is no reason to refuse a model: onnxruntime has some."""
    with pytest.raises(ModelRefused, match="--bind length=LENGTH"):
        prepare_model(one_node("Gelu", "com.microsoft", ("length", 2)))


def test_missing_external_weights_are_refused() -> None:
    """External data that was not given is named with advice; no path in the model is ever opened."""
    model = onnx.load_model_from_string(tiny.listed_weights())
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")
    with pytest.raises(ModelRefused, match=r"etc/passwd.*save_as_external_data=False"):
        prepare_model(model.SerializeToString())


@pytest.mark.parametrize(
    ("graph_inputs", "reason"),
    [
        (tiny.value("x", [2], TensorProto.STRING), "not a tensor of numbers"),
        (tiny.value("x", None), "how many dimensions"),
        (tiny.value("x", [2, 0]), r"--bind x:1=LENGTH"),
    ],
)
def test_inputs_that_cannot_be_fed_are_refused(graph_inputs: onnx.ValueInfoProto, reason: str) -> None:
    """Strings, unknown rank and zero lengths are refused each with its own reason."""
    raw = tiny.build([helper.make_node("Identity", ["x"], ["y"])], [graph_inputs], [tiny.value("y", None)])
    with pytest.raises(ModelRefused, match=reason):
        prepare_model(raw)


def test_free_dimensions_need_a_binding() -> None:
    """A free dimension is refused with the option to type, and a binding settles every shape inside."""
    with pytest.raises(ModelRefused, match=r"give each length: --bind image:3=LENGTH"):
        prepare_model(tiny.free_batch())

    model = prepare_model(tiny.free_batch(), {"batch": 2, "image:3": 5})

    assert model.inputs[0].shape == (2, 3, 4, 5)
    assert model.outputs[0].shape == (2, 60)
    assert all(-1 not in tensor.shape for tensor in model.graph.tensors.values())


def test_a_batch_that_nobody_gave_is_one() -> None:
    """And what was bound so is told, because another batch can be asked for."""
    model = prepare_model(tiny.free_batch(), {"image:3": 5})

    assert model.inputs[0].shape == (1, 3, 4, 5)
    assert model.hints.bound == {"batch": 1}
    assert prepare_model(tiny.free_batch(), {"batch": 2, "image:3": 5}).hints.bound == {}


@pytest.mark.parametrize("bindings", [{"bach": 1}, {"batch": 0}, {"batch": 2**40}])
def test_an_unknown_binding_is_a_usage_error(bindings: dict[str, int]) -> None:
    """The existing names are listed where the name is wrong."""
    with pytest.raises(UsageError, match="batch"):
        prepare_model(tiny.free_batch(), {"image:3": 4, **bindings})


def test_a_crash_of_onnxruntime_refuses_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process continues."""
    (tmp_path / "crashing_child.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(optimise, "CHILD", "crashing_child")
    with pytest.raises(ModelRefused, match="SIGSEGV"):
        prepare_model(tiny.chain())


def test_excessive_memory_use_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that allocates more memory than a model may have is refused."""
    monkeypatch.setattr(limits, "MEMORY_BYTES", 2**26)
    with pytest.raises(ModelRefused):
        prepare_model(tiny.chain())


def endless_loop(*, open_shape: bool) -> bytes:
    """A loop of 2^62 turns in 300 bytes; with `open_shape` its result's length is known only after a run."""
    node, flag = helper.make_node, TensorProto.BOOL
    body = helper.make_graph(
        [node("Identity", ["go"], ["on"]), node("Tanh", ["v"], ["next"])], "body",
        [tiny.value("i", [], TensorProto.INT64), tiny.value("go", [], flag), tiny.value("v", [1, 4])],
        [tiny.value("on", [], flag), tiny.value("next", [1, 4])],
    )  # fmt: skip
    nodes = [node("Loop", ["times", "", "x"], ["y"], body=body)]
    if open_shape:
        nodes += [node("NonZero", ["y"], ["places"])]
    outputs = [tiny.value("places", [2, "count"], TensorProto.INT64)] if open_shape else [tiny.value("y", [1, 4])]
    times = numpy_helper.from_array(np.array(2**62), "times")
    return tiny.build(nodes, [tiny.value("x", [1, 4])], outputs, [times])


@pytest.mark.parametrize("open_shape", [True, False])
def test_a_loop_of_2_to_the_62_turns_cost_ten_minutes(monkeypatch: pytest.MonkeyPatch, open_shape: bool) -> None:
    """It is refused once it has used a trial's processor seconds, once only, whether or not its shapes need a run."""
    monkeypatch.setattr(limits, "TRIAL_CPU_S", 5.0)
    tasks: list[object] = []
    run_child = optimise.run_child
    monkeypatch.setattr(
        optimise, "run_child", lambda *given, **how: (tasks.append(given[1]), run_child(*given, **how))[1]
    )
    with pytest.raises(ModelRefused, match=r"did not finish with the model within 6 s of processor time"):
        prepare_model(endless_loop(open_shape=open_shape))
    assert tasks == ["optimise", "zeros"]


def test_two_preparations_give_the_same_bytes() -> None:
    """What is stored by content hash must not depend on the run."""
    assert prepare_model(tiny.state()).raw == tiny.prepared("state").raw


def test_an_inconsistent_binding_is_named() -> None:
    """A length that makes the operators inside disagree is refused with the binding that was given."""
    raw = tiny.build(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        [tiny.value("x", ["n"])],
        [tiny.value("y", None)],
        [tiny.weight("w", 4)],
    )
    with pytest.raises(ModelRefused, match=r"with --bind n=3: .*"):
        prepare_model(raw, {"n": 3})


def test_a_bound_integer_input_decides_its_branch() -> None:
    """An input bound to a value is no input any more, and of an If on it only the branch taken is left to cut."""
    node = helper.make_node
    then = helper.make_graph(
        [node("Exp", ["x"], ["e"]), node("Neg", ["e"], ["t"])], "then", [], [tiny.value("t", None)]
    )
    other = helper.make_graph([node("Reshape", ["x", "eight"], ["o"])], "else", [], [tiny.value("o", None)])
    raw = tiny.build(
        [
            node("Equal", ["rate", "known"], ["fast"], name="fast"),
            node("If", ["fast"], ["chosen"], name="choice", then_branch=then, else_branch=other),
            node("Tanh", ["chosen"], ["y"], name="y"),
        ],
        [tiny.value("x", ["n"]), tiny.value("rate", [], TensorProto.INT64)],
        [tiny.value("y", None)],
        [tiny.scalar("known", 16000, np.int64), tiny.ints("eight", 2, 4)],
    )
    with pytest.raises(ModelRefused, match=r"--bind rate=VALUE"):
        prepare_model(raw, {"n": 6})
    model = prepare_model(raw, {"n": 6, "rate": 16000})
    assert [tensor.name for tensor in model.inputs] == ["x"]
    assert [model.proto.graph.node[place].op_type for layer in model.graph.layers for place in layer.nodes] == [
        "Exp",
        "Neg",
        "Tanh",
    ]
    with pytest.raises(UsageError, match="no such dimension"):
        prepare_model(raw, {"n": 6, "speed": 3})


def test_nodes_of_equal_name_are_renamed() -> None:
    """onnxruntime refuses two nodes of one name; names do not change the output, so the model is cut all the same."""
    node = helper.make_node
    raw = tiny.build(
        [node("Sin", ["x"], ["a"], name="n"), node("Cos", ["a"], ["b"], name="n"), node("Neg", ["b"], ["y"])],
        [tiny.value("x", [2])],
        [tiny.value("y", [2])],
    )
    assert [layer.name for layer in prepare_model(raw).graph.layers] == ["sin1", "cos1", "neg1"]


def test_an_output_listed_twice_is_one_output() -> None:
    """Outputs are identified by name."""
    ends = [tiny.value("x", [2])], [tiny.value("y", [2]), tiny.value("y", [2])]
    model = prepare_model(tiny.build([helper.make_node("Sin", ["x"], ["y"])], *ends))
    assert [tensor.name for tensor in model.outputs] == ["y"]


def test_constant_folding_is_bounded() -> None:
    """A model of a few bytes whose constant would fill 1.2 GB keeps the operator that makes it."""
    node = helper.make_node
    raw = tiny.build(
        [
            node("ConstantOfShape", ["shape"], ["ones"], value=tiny.scalar("one", 1, np.float32)),
            node("Add", ["x", "ones"], ["sum"]),
            node("ReduceMax", ["sum"], ["y"], keepdims=0),
        ],
        [tiny.value("x", [1])],
        [tiny.value("y", [])],
        [tiny.ints("shape", 300_000_000)],
    )
    one = onnx.load_model_from_string(raw)
    one.graph.node[0].attribute[0].t.dims.append(1)
    assert len(prepare_model(one.SerializeToString()).raw) < 10_000


def test_a_tensor_larger_than_any_request_is_refused() -> None:
    """Inputs of 2^60 elements can be declared, but never fed."""
    ends = [tiny.value("x", [2**30, 2**30])], [tiny.value("y", [2**30, 2**30])]
    with pytest.raises(ModelRefused, match=r"'x' has 4611686018427387904 bytes"):
        prepare_model(tiny.build([helper.make_node("Sin", ["x"], ["y"])], *ends))


def test_external_data_inside_a_function_is_refused() -> None:
    """A constant in a model's own function that refers to a file of this machine is refused unread."""
    leak = helper.make_node("Constant", [], ["k"])
    place = leak.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
    place.t.CopyFrom(onnx.TensorProto(data_type=TensorProto.UINT8, dims=[8]))
    bundle.set_external_location(place.t, "/etc/hostname", 0, 8)
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    nodes = [leak, helper.make_node("Cast", ["k"], ["f"], to=1), helper.make_node("Add", ["a", "f"], ["c"])]
    function = helper.make_function("own", "Leak", ["a"], ["c"], nodes, sets[:1])
    graph = helper.make_graph(
        [helper.make_node("Leak", ["x"], ["y"], domain="own")], "g", [tiny.value("x", [8])], [tiny.value("y", [8])]
    )
    model = helper.make_model(graph, functions=[function], opset_imports=sets, ir_version=8)
    with pytest.raises(ModelRefused, match=r"'/etc/hostname'.*which was not given"):
        prepare_model(model.SerializeToString())


def test_an_inherited_lower_memory_limit_holds() -> None:
    """Where the process is already limited to less address space than a model's child, the child keeps that limit, and
    works."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))\n"
        "from edgesplit_partitioner.onnx_format.model import prepare_model\n"
        "print(len(prepare_model(sys.stdin.buffer.read()).graph.layers))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=tiny.chain(), capture_output=True, check=True)
    assert int(done.stdout) == len(tiny.prepared("chain").graph.layers)


def test_a_model_of_a_newer_onnx_was_refused_without_advice() -> None:
    """The IR version that onnxruntime does not read: how to lower it, which then gives the same model."""
    model = onnx.load_from_string(tiny.chain())
    model.ir_version = 99
    with pytest.raises(ModelRefused, match="IR version 99 is too new") as refused:
        prepare_model(model.SerializeToString())
    lowered = re.search(r"m\.ir_version = (\d+); onnx\.save", str(refused.value))
    assert lowered is not None
    model.ir_version = int(lowered[1])
    prepare_model(model.SerializeToString())


def test_a_newer_operator_set_is_refused_with_advice() -> None:
    """onnxruntime's own words name the newest that it reads."""
    text = (
        "ONNX Runtime only *guarantees* support for models stamped with official released onnx opset versions. Opset 30"
        " is under development and support for this is limited. Current official support for domain ai.onnx is till"
        " opset 25."
    )
    assert "operator set 30 is too new" in optimise.refusal_message(text)
    assert "convert_version(model, 25)" in optimise.refusal_message(text)
