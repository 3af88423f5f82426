"""Files for Triton and KServe, checked by their schemas; and addresses of foreign servers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import MalformedMessage, ModelRefused, TrustError, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.release.manifest import decode_manifest, encode_manifest
from edgesplit.release.recut import check_recut
from edgesplit_cli.commands.export import select_halves
from edgesplit_cli.export_files import inference_service, service_name, triton_config, write_model
from edgesplit_cli.main import cli
from edgesplit_partitioner.costs.foreign_server import adapt_limits, check_servable, costs_for_foreign_server
from edgesplit_partitioner.costs.model import CodecCost, Costs, LayerCost, TensorCost
from support import onnx_models as tiny
from support.recut_repository import CLASS, build_release, fingerprint_for
from support.triton_schema import SCHEMA

RELEASE = "ab" * 32
NAMES = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=30)


def tensor(name: str, *shape: int, datatype: str = "FP32") -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": list(shape)}


@given(NAMES, NAMES, st.lists(st.integers(-1, 4096).filter(bool), min_size=1, max_size=6))
def test_the_triton_configuration_matches_its_schema(name: str, end: str, shape: list[int]) -> None:
    """Parsed by Triton's schema: any name is escaped, shapes are complete, and batching is off."""
    text = triton_config(name, [tensor(end, *shape)], [tensor("y", 1, datatype="INT64")], instances=3)
    config = text_format.Parse(text, SCHEMA.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == (name, "onnxruntime", 0)
    assert [(tensor.name, list(tensor.dims), tensor.data_type) for tensor in config.input] == [
        (end, shape, SCHEMA.TYPE_FP32)
    ]
    assert config.output[0].data_type == SCHEMA.TYPE_INT64
    assert [(group.kind, group.count) for group in config.instance_group] == [(SCHEMA.ModelInstanceGroup.KIND_CPU, 3)]


@pytest.mark.parametrize("kind", ["BOOL", "UINT8", "UINT64", "INT8", "INT64", "FP16", "FP32", "FP64"])
def test_every_tensor_type_has_a_triton_name(kind: str) -> None:
    """As `TYPE_…` and as the protocol's own name."""
    text_format.Parse(triton_config("m", [tensor("x", 1, datatype=kind)], []), SCHEMA.ModelConfig())


def test_a_number_without_dimensions_is_refused() -> None:
    """Triton demands dimensions."""
    with pytest.raises(ModelRefused, match="without dimensions"):
        triton_config("m", [tensor("x")], [])


def test_writing_a_model_repository_is_repeatable(tmp_path: Path) -> None:
    """The same release twice, and another beside it."""
    for model in (b"one", b"one again"):
        home = write_model(tmp_path, f"{RELEASE}.pi4.cut-1", "config", model)
    assert (home / "1" / "model.onnx").read_bytes() == b"one again"
    assert (home / "config.pbtxt").read_text() == "config"
    assert [path.name for path in tmp_path.iterdir()] == [f"{RELEASE}.pi4.cut-1"]


@pytest.mark.parametrize("model", ["digits@1", "Weird__Name@12", "8ball@3", "x" * 80 + "@1", "-.-@1"])
def test_the_kserve_manifest_uses_a_valid_kubernetes_name(model: str) -> None:
    """A host name label with the release's digest in it; protocol version 2, Triton's runtime, the storage."""
    manifest = yaml.safe_load(inference_service(RELEASE, model, "s3://bucket/models", namespace="edge"))
    name = manifest["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 50 and name.endswith(RELEASE[:12])
    assert (manifest["apiVersion"], manifest["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert manifest["metadata"]["annotations"] == {"edgesplit/release": RELEASE}
    served = manifest["spec"]["predictor"]["model"]
    assert (served["protocolVersion"], served["storageUri"]) == ("v2", "s3://bucket/models")
    assert service_name(model, RELEASE) != service_name(model, "cd" * 32)


def test_storage_that_is_no_uri_is_refused_first(tmp_path: Path) -> None:
    """Before any request: KServe would retry it for a long time."""
    words = ["export", "kserve", "m", "--out", str(tmp_path / "o"), "--storage", "/models"]
    done = CliRunner().invoke(cli, words, obj=tmp_path)
    assert isinstance(done.exception, UsageError) and "s3://" in str(done.exception)


def half(device_class: str, row: str, refusal: str = "") -> dict[str, Any]:
    return {"device_class": device_class, "row": row, "refusal": refusal}


def test_exportable_remote_halves_are_selected() -> None:
    """All exportable ones, or the one that was named; where there is none the error gives the reason."""
    some = [half("pi4", "remote", "it sends a picture"), half("pi4", "cut-1"), half("nano", "cut-1")]
    assert select_halves(some, "", "") == some[1:]
    assert select_halves(some, "pi4", "") == [some[1]]
    with pytest.raises(ModelRefused, match="picture"):
        select_halves(some, "pi4", "remote")
    with pytest.raises(UsageError, match="pi4 cut-1"):
        select_halves(some, "pi4", "cut-9")
    with pytest.raises(ModelRefused, match="offloads"):
        select_halves([], "", "")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("triton://gpu", "http://gpu:8000"),
        ("triton://gpu:9000", "http://gpu:9000"),
        ("http://kserve.example/models/", "http://kserve.example:80/models"),
        ("https://kserve.example", "https://kserve.example:443"),
        ("https://kserve.example/v2/", "https://kserve.example:443"),
        ("triton://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_server_addresses_are_parsed(text: str, url: str) -> None:
    """Triton's port is the default; a path becomes the prefix of /v2."""
    server = ForeignServer.parse(text)
    assert (server.url, server.tls) == (url, text.startswith("https"))
    assert server.accepts_gzip == text.startswith("triton")


@pytest.mark.parametrize(
    "text",
    ["", "gpu:8000", "grpc://gpu", "triton://", "http://u:p@gpu", "http://gpu?x=1", "http://gpu#x", "http://gpu:99999",
     "http://gpu:0", "http://g pu", "http://" + "x" * 600, "http://gp\nu", "http://[::1", "https://ü.example"],
)  # fmt: skip
def test_an_invalid_server_address_is_refused_with_the_syntax(text: str) -> None:
    """Secrets, other protocols, nonsense."""
    with pytest.raises(UsageError, match=r"triton://HOST"):
        ForeignServer.parse(text)


def test_a_manifest_with_an_invalid_address_is_malformed() -> None:
    """A valid address is kept."""
    one = build_release("chain", [tiny.prepared("chain").graph.layers[0].name]).with_plan(offload="triton://gpu")
    assert decode_manifest(encode_manifest(one.manifest)).plans[CLASS].offload == "triton://gpu"
    with pytest.raises(MalformedMessage, match="not the address"):
        decode_manifest(one.with_plan(offload="file:///etc").raw)


def test_a_recut_keeps_the_server_address_of_its_base() -> None:
    """A stolen planner key cannot add another server, nor drop the signed one."""
    layers = [layer.name for layer in tiny.prepared("chain").graph.layers]
    base = build_release("chain", layers[:2]).with_plan(offload="triton://gpu")
    recut = build_release("chain", layers[:4], recut_of=base.digest)
    fingerprint = fingerprint_for("chain")
    check_recut(recut.with_plan(offload="triton://gpu").manifest, base.manifest, fingerprint)
    for address in ("triton://thief", ""):
        with pytest.raises(TrustError, match="sends to"):
            check_recut(recut.with_plan(offload=address).manifest, base.manifest, fingerprint)


def costs() -> Costs:
    """A picture is decoded, then one layer."""
    packed = CodecCost(bytes=100, encode_s={"device": 0.003}, decode_s={"cloud": 0.002})
    plain = CodecCost(bytes=200, encode_s={"device": 0.001}, decode_s={"cloud": 0.001})
    tensor_cost = TensorCost(bytes=400, codecs={"raw+zstd": packed, "int8": plain, "int8+zstd": packed, "int4": plain})
    seconds = {"device": 0.01, "cloud": 0.001}
    return Costs(
        model="m@1",
        tiers=("device", "cloud"),
        inputs={"frame": TensorCost(bytes=50)},
        outputs=("y",),
        layers=(
            LayerCost(name="input", reads=("frame",), writes={"x": tensor_cost}, seconds=seconds),
            LayerCost(name="conv", reads=("x",), writes={"y": TensorCost(bytes=4)}, seconds=seconds),
        ),
    )


def test_foreign_servers_get_decoded_pictures_and_no_zstd() -> None:
    """Triton gets gzip, at gzip's price; others get nothing compressed. Lossy codecs stay, which the export undoes, but
    for int4, which no operator of ONNX decodes."""
    triton = costs_for_foreign_server(costs(), ForeignServer.parse("triton://gpu"))
    other = costs_for_foreign_server(costs(), ForeignServer.parse("https://gpu"))
    for server in (triton, other):
        assert server.layers[0].tiers == ("device",) and server.layers[1].tiers == ()
    assert set(other.layers[0].writes["x"].codecs) == {"int8"}
    zstd, gzip = costs().layers[0].writes["x"].codecs, triton.layers[0].writes["x"].codecs
    assert gzip["int8"] == zstd["int8"]
    for name in ("raw+zstd", "int8+zstd"):
        assert gzip[name].bytes > zstd[name].bytes
        assert gzip[name].encode_s["device"] > zstd[name].encode_s["device"]
    assert gzip["raw+zstd"].encode_s["device"] == pytest.approx(5.1 * 0.003)
    assert gzip["int8+zstd"].encode_s["device"] == pytest.approx(0.001 + 5.1 * 0.002)


def test_a_model_unsupported_by_foreign_servers_is_not_released() -> None:
    """The refusal names an alternative."""
    check_servable("digits@1", "onnx")
    with pytest.raises(ModelRefused, match=r"digits@1 is TFLITE.*push it so"):
        check_servable("digits@1", "tflite")


def test_all_remote_on_a_foreign_server_still_decodes_locally() -> None:
    """A foreign server does not decode pictures."""
    assert adapt_limits({"force": "cloud", "keep_first": 1}, costs()) == {"force_after": "input", "keep_first": 1}
    assert adapt_limits({"force": "device"}, costs()) == {"force": "device"}


@given(st.one_of(st.text(max_size=60), st.text(max_size=40).map("http://{}".format)))
def test_any_text_is_a_valid_address_or_refused(text: str) -> None:
    """An address comes in a signed manifest and from a command line; an accepted one round-trips."""
    try:
        server = ForeignServer.parse(text)
    except UsageError:
        return
    assert ForeignServer.parse(server.url).url == server.url
