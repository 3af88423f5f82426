"""Every parser of bytes from a network, in this process: only our own errors come out, within bounded memory.

docs/security.md lists the places where bytes come in, and which row here tries each. Parsers behind a socket or the
API are in test_fuzz_http.py and test_fuzz_api.py; model files in test_fuzz_models.py.
"""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import strategies as st
from PIL import Image

from edgesplit import input_spec
from edgesplit.client.model_interface import decode_interface
from edgesplit.crypto import key_wrapping
from edgesplit.device_profile import parse_profile
from edgesplit.errors import EdgeError
from edgesplit.http1.content_coding import decode_body
from edgesplit.http1.response import Reply
from edgesplit.identifiers import ModelRef, device_name, sha256_hex
from edgesplit.limits import LIMITS
from edgesplit.links import parse_link
from edgesplit.mqtt import messages, remote_inference
from edgesplit.oip import protocol as oip
from edgesplit.oip import report
from edgesplit.quantities import parse_daily_span, parse_duration, parse_rate, parse_size
from edgesplit.release import boundary_codecs, fingerprint, manifest, onnx_graph
from edgesplit.release.manifest import Signed, TensorSpec
from edgesplit.trust import identity
from edgesplit.trust.identity import Claim, Enrolled, EnrolmentRequest, Renewal
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import verify_chain
from edgesplit_agent.control.enrolment import enrolment_context
from edgesplit_agent.control.fetcher import ChunkFetcher, MetadataFetcher
from edgesplit_agent.control.remote_inference import RemoteInferenceService
from edgesplit_controller.fleet.devices import public_key_sha256
from edgesplit_controller.messaging.broker import parse_accepted_client
from edgesplit_controller.messaging.delivery import Delivery, Sources
from edgesplit_controller.model_registry.registry import read_tensors
from edgesplit_controller.pki.authority import Authority
from edgesplit_offload.revocation import RevokedSerials
from edgesplit_partitioner.costs.model import load_costs
from support.fuzzing import EXAMPLES, JSON, SEED, fuzzed, spoiled
from support.registry_harness import a_model
from support.signed_repository import DEVICE, TrustHarness, sample_release

MIB = 2**20


@dataclass(frozen=True)
class Parser:
    """One way in: what it does with bytes, and what good ones look like."""

    read: Callable[[bytes], object]
    good: list[bytes]
    memory_bytes: int = 8 * MIB
    """More than this is never taken for an example of these sizes."""
    share: float = 1.0


def message(kind: Any, *good: messages.Message | msgspec.Struct) -> Parser:
    return Parser(lambda raw: messages.decode(raw, kind), [messages.encode(one) for one in good])


class NoWire:
    """A session that goes nowhere."""

    def publish(self, *_: object, **__: object) -> None: ...

    def subscribe(self, *_: object, **__: object) -> None: ...

    unsubscribe = subscribe


def metadata_fetcher() -> Callable[[bytes], object]:
    fetcher = MetadataFetcher(NoWire(), "cam-1")
    fetcher._request = (b"tag", "metadata/timestamp.json", 10_000)
    return lambda raw: fetcher.on_message(raw, b"tag")


def delivery() -> Callable[[bytes], object]:
    """All kinds of topics take these bytes; the workers do not run, their queues are bounded."""
    nothing: Any = None
    made = Delivery(Sources(nothing, nothing, nothing, nothing, nothing))
    kinds = ("birth", "reported", "telemetry", "fetch", "fetch_reply", "odd")
    return lambda raw: [made.on_message(messages.topic("cam", kind), raw, raw[:20]) for kind in kinds]  # type: ignore[arg-type]


def world(folder: Path) -> tuple[TrustHarness, TrustStore]:
    made = TrustHarness(folder)
    made.add()
    store = made.store()
    store.refresh(made.fetch)
    return made, store


def metadata_parser(folder: Path, name: str) -> Parser:
    """One file of the repository is spoiled; a fresh device refreshes from it, and one that has seen good metadata."""
    made, _ = world(folder)
    asked = next(path for path in made.fetched if path.endswith(f"{name}.json"))
    good = made.bootstrap if name == "root" else made.repository.read(asked)

    def read(raw: bytes) -> None:
        made.fetched.clear()
        store = made.store(f"fresh-{len(list(folder.iterdir())) % 3}")
        store.refresh(lambda path, most: raw if path == asked else made.fetch(path, most))

    return Parser(read, [good], share=0.3, memory_bytes=16 * MIB)


def picture(kind: str, width: int = 24, height: int = 16) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(SEED).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


CAMERA = msgspec.structs.replace(
    input_spec.parse_input_spec("image/jpeg 24x16 rgb scale=1/255"), tensor="x", tensor_width=8, tensor_height=8
)
PNG_CAMERA, WEBP_CAMERA, RAW_CAMERA = (
    msgspec.structs.replace(input_spec.parse_input_spec(spec), tensor="x", tensor_width=8, tensor_height=8)
    for spec in ("image/png 24x16 letterbox", "image/webp 24x16 crop", "image/raw 24x16 nv12 int8")
)
MICROPHONE = msgspec.structs.replace(input_spec.parse_input_spec("audio/pcm16 16k 32"), tensor="x")
SPECS = (TensorSpec("h", "FP32", (2, 3)),)


def coded(raw: bytes) -> object:
    """A request by each codec, from whatever tensors are in the body."""
    asked = oip.decode_request(raw, None)
    return [boundary_codecs.decode_tensors(asked.inputs, SPECS, {"h": codec}) for codec in boundary_codecs.CODECS]


def quantised(codec: str) -> Parser:
    """A request whose tensor was encoded by this codec, decoded by it alone."""
    sent = boundary_codecs.encode("h", np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3), codec, 0.5)
    entries = [
        {"name": name, "shape": tensor.shape, "datatype": oip.datatype(tensor), "data": tensor.reshape(-1).tolist()}
        for name, tensor in sent.items()
    ]

    def decode(raw: bytes) -> object:
        return boundary_codecs.decode_tensors(oip.decode_request(raw, None).inputs, SPECS, {"h": codec})

    return Parser(decode, [msgspec.json.encode({"inputs": entries})])


def costs_file() -> bytes:
    tensor = {"bytes": 64, "codecs": {"raw+zstd": {"bytes": 40}}}
    layers = [{"name": "a", "reads": ["x"], "writes": {"y": tensor}, "seconds": {"device": 0.1, "cloud": 0.01}}]
    whole = {
        "format": "edgesplit.costs/1", "model": "m@1", "tiers": ["device", "cloud"], "inputs": {"x": {"bytes": 100}},
        "outputs": ["y"], "layers": layers,
    }  # fmt: skip
    return msgspec.json.encode(whole)


def npz() -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros((3, 4), np.float32), y=np.arange(5))
    return out.getvalue()


def request_body() -> bytes:
    return b"".join(oip.encode_request(oip.InferRequest({"h": np.ones((2, 3), np.float32)}, ("y",), "id"))[0])


def header_length() -> int:
    return oip.encode_request(oip.InferRequest({"h": np.ones((2, 3), np.float32)}, ("y",), "id"))[1]


TENSOR = {"name": "h", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}
JSON_REQUEST = msgspec.json.encode({"inputs": [TENSOR], "id": "x", "parameters": {"timeout": 5}})
JSON_ANSWER = msgspec.json.encode({"model_name": "m", "outputs": [TENSOR], "parameters": {"edgesplit_row": "r"}})
BIRTH = messages.Birth(1, 0.5, "1", "pi4", True, "http://h", "s", "9")
REPORTED = messages.Reported(1, 2, (messages.ModelState("m", "r", "r", "failed"),))
ANATOMY = fingerprint.encode_fingerprint(
    fingerprint.Fingerprint(
        ir_version=9, opsets=(("", 17),), functions=(),
        layers=(fingerprint.LayerFingerprint("conv", ("x",), ("y",), ("n",)),),
        tensors=(fingerprint.TensorFingerprint(TensorSpec("x", "FP32", (1, 4)), "d"),), weights=("w",),
    )
)  # fmt: skip
WINDOW = messages.TelemetryWindow(model="m@1", release="r", row="local")
TELEMETRY = messages.Telemetry(
    session=1, sequence=2, emulated=True, up_bytes_per_s=1e6, rtt_s=0.1, remote_usable=True, models=(WINDOW,)
)


JOB = remote_inference.InferenceJob(
    device=DEVICE, id="0" * 16, session=1, number=1, process=1, model="m", deadline_s=1.0, expires=2**40,
    body=remote_inference.BodyHead.of(b"question", 3),
)  # fmt: skip
PIECE = remote_inference.InferencePiece("0" * 16, 0, b"question")


def remote_inferences() -> Callable[[bytes], object]:
    """A device's service, whose thread does not run: its buffers are bounded."""
    nothing: Any = None
    return RemoteInferenceService(nothing, nothing, lambda *_: None, lambda: 1).on_message


def text(parse: Callable[[str], object], *good: str) -> Parser:
    """A parser of text that comes in JSON: any text that JSON can carry."""
    return Parser(lambda raw: parse(raw.decode("utf-8", "replace")), [one.encode() for one in good])


def parsers(folder: Path) -> dict[str, Parser]:
    """Every way in."""
    authority = Authority(folder / "ca")
    key = identity.load_or_make_key(folder / "key")
    csr = identity.certificate_request(key, "cam-1")
    x25519 = key_wrapping.load_or_make_encryption_key(folder / "x25519")
    public = x25519.public_key().public_bytes_raw()
    certificate = authority.sign_request(csr, "cam-1")
    (folder / "list.pem").write_bytes(authority.revocation_list([1, 2, 3]))
    trusted, store = world(folder / "world")
    statement = trusted.state(counter=5, digest="0" * 64)
    signed_job = trusted.repository.sign_inference_job(JOB)
    ca_pem = authority.ca_pem
    claim = Claim(
        device="cam-1", device_class="pi4", token="t", controller_url="https://c", ca_pem=ca_pem, tuf_root="{}",
        expires=1,
    )  # fmt: skip
    enrolled = Enrolled(
        device="d", certificate_pem="c", ca_pem="c", broker_host="h", broker_port=1, offload_url="https://o"
    )
    renewal = Renewal(certificate_pem=certificate.decode(), csr_pem=csr.decode(), signature=b"s" * 64)
    proof = trusted.repository.proof(trusted.repository.releases()[0])
    plain = request_body()

    def crl(raw: bytes) -> object:
        (folder / "spoiled.pem").write_bytes(raw)
        return 7 in RevokedSerials(folder / "spoiled.pem", authority.certificate_file)

    def chunks(raw: bytes) -> None:
        fetcher = ChunkFetcher(NoWire(), "cam-1")
        fetcher._wanted = {"a" * 64: len(raw)}
        fetcher.on_message("a" * 64, raw)
        fetcher.on_message(raw[:64].decode("latin-1"), raw)

    def costs(raw: bytes) -> object:
        (folder / "costs.json").write_bytes(raw)
        return load_costs(folder / "costs.json")

    def renewed(raw: bytes) -> None:
        asked = identity.decode_document(raw, Renewal)
        identity.check_renewal(asked, authority.parse_device_certificate(asked.certificate_pem.encode()))

    return {
        "birth": message(messages.Birth | messages.Death, BIRTH),
        "reported": message(messages.Reported, REPORTED),
        "telemetry": message(messages.Telemetry, TELEMETRY),
        "fetch": message(
            messages.FetchMetadata | messages.FetchChunks,
            messages.FetchMetadata("metadata/1.root.json"),
            messages.FetchChunks.from_indexes("a" * 64, [3, 17]),
        ),
        "fetch_reply": message(messages.FetchReply, messages.FetchReply("metadata/x.json", 0, 3, b"abc")),
        "fetch_reply, on the device": Parser(metadata_fetcher(), message(messages.FetchReply, messages.FetchReply(
            "metadata/timestamp.json", 0, 3, b"abc")).good),
        "chunk, on the device": Parser(chunks, [b"chunk"]),
        "anything, on the controller": Parser(delivery(), [messages.encode(TELEMETRY), messages.encode(
            messages.FetchMetadata("metadata/1.root.json"))]),
        "topic": Parser(lambda raw: messages.device_of_topic(raw.decode("latin-1")), [b"edgesplit/v1/cam-1/birth"]),
        "broker's log": text(parse_accepted_client, "New client connected from 1.2.3.4:5 as cam (p5"),
        "signed": message(Signed, messages.decode(statement, Signed)),
        "statement": Parser(lambda raw: store.verify_statement(raw, DEVICE, for_install=True), [statement]),
        "inference job": Parser(lambda raw: store.verify_inference_job(raw, DEVICE), [signed_job]),
        "inference job, on the device": Parser(
            remote_inferences(),
            [messages.encode(remote_inference.SignedJob(signed_job)), messages.encode(PIECE)],
        ),
        "inference reply": message(
            remote_inference.Reply, remote_inference.AnswerHead("0" * 16, JOB.body), PIECE,
            remote_inference.JobFailed("0" * 16, "Busy", "later"),
        ),
        "manifest": Parser(manifest.decode_manifest, [sample_release()[0]]),
        "listed manifest": Parser(
            lambda raw: trusted.store("again").manifest("0" * 64, lambda path, most: raw), [sample_release()[0]]
        ),
        "bootstrap root": Parser(lambda raw: TrustStore(folder / "other", raw), [trusted.bootstrap]),
        "proof": Parser(lambda raw: verify_chain({**proof, "targets.json": raw}, trusted.bootstrap), [
            proof["targets.json"]]),
        **{f"tuf {name}": metadata_parser(folder / f"tuf-{name}", name)
           for name in ("root", "timestamp", "snapshot", "targets")},
        "claim": Parser(identity.decode_claim, [identity.encode_document(claim)]),
        "enrolment request": Parser(
            lambda raw: identity.decode_document(raw, EnrolmentRequest),
            [msgspec.json.encode(EnrolmentRequest(token="t", csr_pem=csr.decode()))],
        ),
        "enrolment answer": Parser(
            lambda raw: identity.decode_document(raw, Enrolled), [msgspec.json.encode(enrolled)]
        ),
        "renewal": Parser(renewed, [msgspec.json.encode(renewal)]),
        "certificate request": Parser(lambda raw: authority.sign_request(raw, "cam-1"), [csr]),
        "certificate request's key": Parser(public_key_sha256, [csr]),
        "certificate": Parser(authority.parse_device_certificate, [certificate, authority.ca_pem.encode()]),
        "authority in a claim": Parser(lambda raw: enrolment_context(raw.decode("latin-1")), [ca_pem.encode()]),
        "revocation list": Parser(crl, [(folder / "list.pem").read_bytes()], share=0.5),
        "inference request, JSON": Parser(lambda raw: oip.decode_request(raw, None), [JSON_REQUEST]),
        "inference request, binary": Parser(lambda raw: oip.decode_request(raw, header_length()), [plain]),
        "inference answer, JSON": Parser(
            lambda raw: report.from_parameters(dict(oip.decode_response(raw, None).parameters)), [JSON_ANSWER]
        ),
        "inference answer, binary": Parser(lambda raw: oip.decode_response(raw, 20), [b"{\"outputs\":[]}      "]),
        "remote name": text(oip.parse_remote_name, oip.remote_name("a" * 64, "pi4", "cut-1")),
        "codecs": Parser(coded, [JSON_REQUEST]),
        "int6": quantised("int6"),
        "int4": quantised("int4"),
        "zstd body": Parser(
            lambda raw: decode_body(raw, "zstd"),
            [zstandard.ZstdCompressor().compress(plain)],
            2 * MIB + LIMITS.http_body_bytes,
        ),
        "gzip body": Parser(lambda raw: decode_body(raw, "gzip"), [gzip.compress(plain)]),
        "deflate body": Parser(lambda raw: decode_body(raw, "deflate"), [zlib.compress(plain)]),
        "picture": Parser(lambda raw: input_spec.prepare(CAMERA, raw), [
            picture("JPEG"), picture("PNG"), picture("BMP"), picture("GIF")], 600 * MIB),
        "png picture": Parser(lambda raw: input_spec.prepare(PNG_CAMERA, raw), [picture("PNG")], 600 * MIB),
        "webp picture": Parser(lambda raw: input_spec.prepare(WEBP_CAMERA, raw), [picture("WEBP")], 600 * MIB),
        "raw picture": Parser(lambda raw: input_spec.prepare(RAW_CAMERA, raw), [b"\x01\x80" * 288]),
        "model interface": Parser(
            lambda raw: decode_interface("/v2/models/m", Reply(200, {}, raw)),
            [b'{"inputs": [{"name": "frame"}], "edgesplit": {"input_spec": {"width": 8, "height": 8}, "output_kind":'
             b' {"kind": "boxes", "outputs": ["y"], "layout": "yolox", "threshold": 0.3, "names": ["cat"]}}}'],
        ),
        "sound": Parser(lambda raw: input_spec.prepare(MICROPHONE, raw), [b"\x01\x02" * 32]),
        "tensors in an npz": Parser(read_tensors, [npz()], 64 * MIB),
        "input spec": text(
            input_spec.parse_input_spec, "image/jpeg 24x16 q85 rgb scale=1/255 mean=0.5", "audio/pcm16 16k 32",
            "image/raw 24x16 nv12 letterbox pad=3 int8", "image/png 24x16 crop=0.9 fp16"
        ),
        # PyYAML takes a second for the deepest nests, and a minute where memory is traced.
        "device profile": replace(
            text(lambda said: parse_profile(said, "pushed"), "name: x\nclass: [1, 2]\n", '{"a": 1}'), share=0.2
        ),
        "costs file": Parser(costs, [costs_file()]),
        "link": text(parse_link, "8mbit/40ms", "wifi"),
        "rate": text(parse_rate, "8mbit", "100kB"),
        "duration": text(parse_duration, "1h30m", "1.5e-3 s"),
        "size": text(parse_size, "512MB", ".5 GiB"),
        "span of the day": text(parse_daily_span, "22:30-6:00"),
        "model reference": text(ModelRef.parse, "digits@3"),
        "device name": text(device_name, "cam-1"),
        "digest": text(sha256_hex, "a" * 64),
        "content keys, wrapped": Parser(
            lambda raw: key_wrapping.unwrap(raw, x25519, "cam-1", "r"),
            [key_wrapping.wrap({"k": b"x" * 32}, public, "cam-1", "r")],
        ),
        "content keys, opened": Parser(key_wrapping.decode_keys, [msgspec.msgpack.encode({"keys": {"k": b"x" * 32}})]),
        "encryption key": Parser(
            lambda raw: key_wrapping.verify_encryption_key(raw[:32], raw[32:], key.public_key(), csr.decode(), "cam-1"),
            [b"".join(key_wrapping.sign_encryption_key(x25519, key, csr.decode()))],
        ),
        "fingerprint of a model": Parser(
            lambda raw: fingerprint.decode_fingerprint(raw, fingerprint.fingerprint_file(raw)), [ANATOMY]
        ),
        "graph of a recut slice": Parser(onnx_graph.read_graph, [a_model()]),
    }  # fmt: skip


NAMES = [
    "birth", "reported", "telemetry", "fetch", "fetch_reply", "fetch_reply, on the device", "chunk, on the device",
    "anything, on the controller", "topic", "broker's log", "signed", "statement", "inference job",
    "inference job, on the device", "inference reply", "manifest", "listed manifest",
    "bootstrap root", "proof", "tuf root", "tuf timestamp", "tuf snapshot", "tuf targets", "claim",
    "enrolment request", "enrolment answer", "renewal", "certificate request", "certificate request's key",
    "certificate", "authority in a claim", "revocation list", "inference request, JSON", "inference request, binary",
    "inference answer, JSON", "inference answer, binary", "remote name", "codecs", "int6", "int4", "zstd body",
    "gzip body", "deflate body", "picture", "png picture", "webp picture", "raw picture", "model interface", "sound",
    "tensors in an npz", "input spec", "device profile", "costs file",
    "link", "rate", "duration", "size", "span of the day", "model reference", "device name", "digest",
    "content keys, wrapped", "content keys, opened", "encryption key", "fingerprint of a model",
    "graph of a recut slice",
]  # fmt: skip


@pytest.fixture(scope="module")
def ways_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Parser]]:
    print(f"EDGESPLIT_SEED={SEED}")
    yield parsers(tmp_path_factory.mktemp("fuzz"))


def test_every_parser_is_fuzzed(ways_in: dict[str, Parser]) -> None:
    """The table of parsers and the list that pytest runs are one and the same, and each takes its good examples."""
    assert list(ways_in) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_only_our_own_errors_come_out(ways_in: dict[str, Parser], name: str) -> None:
    """D13: garbage, deep nests, and good bytes with flips, cuts, doublings and false lengths: an answer or an error of
    ours, never another."""
    parser = ways_in[name]

    @fuzzed(spoiled(parser.good), share=parser.share)
    def tried(raw: bytes) -> None:
        with suppress(EdgeError):
            parser.read(raw)

    tried()


STRUCTURED = {
    "message": lambda value: messages.decode(
        msgspec.msgpack.encode(value),
        messages.Birth | messages.Death | messages.Reported | messages.Telemetry | messages.FetchMetadata
        | messages.FetchChunks | messages.FetchReply,
    ),
    "signed": lambda value: messages.decode(msgspec.msgpack.encode(value), Signed),
    "manifest": lambda value: manifest.decode_manifest(msgspec.json.encode(value)),
    "inference request": lambda value: oip.decode_request(msgspec.json.encode(value), None),
    "inference answer": lambda value: oip.decode_response(msgspec.json.encode(value), None),
    "claim": lambda value: identity.decode_claim(msgspec.json.encode(value)),
    "costs": lambda value: load_costs(value if isinstance(value, dict) else {"format": value}),
}  # fmt: skip
FIELDS = {
    "message": (
        "type",
        "session",
        "agent_uptime_s",
        "counter",
        "models",
        "path",
        "chunks",
        "offset",
        "total",
        "data",
        "release",
        "first",
        "bitmap",
    ),
    "signed": ("payload", "signatures"),
    "manifest": ("format", "model", "slices", "plans", "golden", "inputs", "outputs", "created", "input_spec"),
    "inference request": ("inputs", "outputs", "id", "parameters", "name", "shape", "datatype", "data"),
    "inference answer": ("outputs", "model_name", "id", "parameters"),
    "claim": ("device", "token", "tuf_root", "expires"),
    "costs": ("format", "model", "tiers", "inputs", "outputs", "layers", "idle_watts", "links", "raw_inputs"),
}


@pytest.mark.parametrize("name", STRUCTURED)
def test_structured_garbage_is_refused(name: str) -> None:
    """Right names with wrong values, of any type and depth."""
    shaped = st.dictionaries(st.sampled_from(FIELDS[name]), JSON, max_size=8)

    @fuzzed(st.one_of(shaped, JSON))
    def tried(value: Any) -> None:
        try:
            msgspec.msgpack.encode(value), msgspec.json.encode(value)
        except (OverflowError, msgspec.EncodeError, UnicodeEncodeError, ValueError):
            return  # no wire carries it
        with suppress(EdgeError):
            STRUCTURED[name](value)

    tried()


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded(ways_in: dict[str, Parser], name: str) -> None:
    """D13: an example of some kilobytes never costs more than its parser's bound, whatever lengths it claims."""
    parser = ways_in[name]
    worst = 0

    @fuzzed(spoiled(parser.good), share=0.2 * parser.share)
    def tried(raw: bytes) -> None:
        nonlocal worst
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with suppress(EdgeError):
            parser.read(raw)
        worst = max(worst, tracemalloc.get_traced_memory()[1] - before)

    tracemalloc.start()
    try:
        tried()
    finally:
        tracemalloc.stop()
    print(f"{name}: at most {worst} bytes in {EXAMPLES} examples")
    assert worst < parser.memory_bytes


# What was found, and bombs: by hand, for chance seldom finds them


def test_a_letter_in_a_claims_authority_that_is_not_ascii_was_a_type_error() -> None:
    """A claim that was mangled on its way is malformed, and says so."""
    with pytest.raises(EdgeError, match="no certificate"):
        enrolment_context("\x80")


def test_a_zip_of_zeros_is_refused_before_it_is_unpacked() -> None:
    """A sample of kilobytes that would become gigabytes: refused by what it says of itself."""
    out = io.BytesIO()
    np.savez_compressed(out, x=np.zeros(400 * MIB // 8, np.float64))
    assert len(out.getvalue()) < MIB
    tracemalloc.start()
    try:
        with pytest.raises(EdgeError, match="unpacked"):
            read_tensors(out.getvalue())
        assert tracemalloc.get_traced_memory()[1] < 64 * MIB
    finally:
        tracemalloc.stop()


def test_an_image_of_a_billion_pixels_is_refused_by_its_header() -> None:
    """A JPEG whose header claims 65,000 by 65,000: no pixel of it is decoded."""
    raw = bytearray(picture("JPEG"))
    at = raw.index(b"\xff\xc0") + 5
    raw[at : at + 4] = b"\xfd\xe8\xfd\xe8"
    with pytest.raises(EdgeError):
        input_spec.prepare(CAMERA, bytes(raw))


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate"])
def test_a_compressed_bomb_is_cut_off(coding: str) -> None:
    """A body of a megabyte or less with more than any body may have inside."""
    zeros = bytes(LIMITS.http_body_bytes + 1)
    raw = {"zstd": zstandard.ZstdCompressor(level=3).compress, "gzip": gzip.compress, "deflate": zlib.compress}[coding](
        zeros
    )
    assert len(raw) < MIB
    with pytest.raises(EdgeError, match="more than"):
        decode_body(raw, coding)


def test_a_spoiled_revocation_list_leaves_the_previous_one_in_force(tmp_path: Path) -> None:
    """What was revoked stays revoked, whatever becomes of the file."""
    authority = Authority(tmp_path / "ca")
    path = tmp_path / "list.pem"
    path.write_bytes(authority.revocation_list([77]))
    revoked = RevokedSerials(path, authority.certificate_file, look_every_s=0.0)
    for spoiled_list in (b"", b"\xff" * 50, path.read_bytes()[:-20]):
        path.write_bytes(spoiled_list)
        assert 77 in revoked and 78 not in revoked
