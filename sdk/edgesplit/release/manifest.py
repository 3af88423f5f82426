"""A release: a model, its plans and all its slices, device and cloud halves together, as one signed unit.

The manifest is one TUF target. It names every slice and every chunk by SHA-256, so whoever trusts the manifest's
bytes can trust each byte it leads to. This module is the format; `edgesplit.trust.store` decides what is believed.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec

from edgesplit import identifiers
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.input_spec import InputSpec
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import settle
from edgesplit.plan import Plan, Row

FORMAT: Final = "edgesplit.release/1"
SliceFormat = Literal["input", "onnx", "tflite", "agent"]
FileName = Literal["graph.onnx", "weights.bin", "model.tflite", "wheels.tar"]
Cipher = Literal["chacha20-poly1305"]
TAG_BYTES: Final = 16
"""What each chunk grows by when it is encrypted."""
Kernels = Literal["default", "plain", "edgetpu"]


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of bytes, named by its SHA-256. At most `LIMITS.chunk_bytes` long, and a tag more where encrypted."""

    sha256: str
    bytes: int


class Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How something is encrypted (`edgesplit.crypto.slice_encryption`), chunk by chunk, and which content key opens
    it."""

    cipher: Cipher
    key_id: str
    """Names the key; the controller makes it anew from this and a secret of its own."""
    commitment: str
    """A digest of the key: whoever was given a key can tell at once whether it is this one."""


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an encrypted file must decrypt to."""

    bytes: int
    digest: str
    """HMAC-SHA256 under the content key: who lacks the key cannot even confirm a guess of the file."""


class SliceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a slice: its chunks in order, and the digest of the whole, as they travel and lie on disk."""

    name: FileName
    bytes: int
    sha256: str
    chunks: tuple[Chunk, ...]
    plain: Plain | None = None
    """In an encrypted slice."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's name, its Open Inference Protocol data type and its shape; -1 is a length known only at run time."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers between neighbouring cuts: what is signed, sent and run.

    Format `input` has no files: it is the manifest's input spec (bytes of a picture in, the first tensor out). Format
    `agent` is no layers at all, but the agent itself for one kind of machine (`edgesplit.release.agent_release`).
    """

    name: str
    format: SliceFormat
    layers: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: tuple[SliceFile, ...] = ()
    kernels: Kernels = "default"
    """`plain`: without the engine's default delegate (XNNPACK), which refuses the model these layers are cut from;
    each slice alone it might take, and compute other bits than the whole. `edgetpu`: compiled, runs there only."""
    sealed: Sealed | None = None
    """None: in clear."""

    @property
    def bytes(self) -> int:
        """Size of all files of this slice."""
        return sum(file.bytes for file in self.files)


class Compiled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One slice compiled for an accelerator that does what all of `covers` do, its twins on the CPU."""

    slice: Slice
    device_class: str
    """Whose devices have that accelerator."""
    covers: tuple[str, ...]


class Golden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An input with the whole model's answer: one Open Inference Protocol request and response body, by chunk."""

    request: Chunk
    response: Chunk
    sealed: Sealed | None = None
    """None: in clear. They are sample pictures."""


class AnatomyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which bytes are the model's anatomy (`edgesplit.release.fingerprint`)."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The signed description of a release. Its SHA-256 over the exact bytes is the release's digest."""

    format: Literal["edgesplit.release/1"] = FORMAT
    model: str
    """`name@version`."""
    model_sha256: str
    created: str
    """UTC, ISO 8601."""
    input_spec: InputSpec | None
    """How a camera's bytes become the first tensor, or None where applications give tensors."""
    inputs: tuple[TensorSpec, ...]
    """What an application gives: `frame` (UINT8, [-1]) with an input spec, else the model's own inputs."""
    outputs: tuple[TensorSpec, ...]
    slices: tuple[Slice, ...]
    """In an order in which they can run."""
    plans: dict[str, Plan]
    """By device class."""
    golden: tuple[Golden, ...] = ()
    compiled: tuple[Compiled, ...] = ()
    """In no row: whoever can run one runs it in place of the slices that it covers."""
    anatomy: AnatomyFile | None = None
    """What the model consists of, so that it can be cut elsewhere without the release key; None where only its slices
    as they are can be put into another table."""
    recut_of: str = ""
    """The release that this is another cut of, signed by the planner; empty in what the release key signs."""

    @property
    def every_slice(self) -> tuple[Slice, ...]:
        """Compiled ones too."""
        return (*self.slices, *(one.slice for one in self.compiled))

    @property
    def is_encrypted(self) -> bool:
        """Whether its slices need content keys."""
        return any(one.sealed is not None for one in self.every_slice)

    def slice(self, name: str) -> Slice:
        """The slice of that name; KeyError if there is none."""
        for one in self.every_slice:
            if one.name == name:
                return one
        raise KeyError(name)

    def chunk_list(self) -> dict[str, int]:
        """Size by digest of all that a device may ask for, each once, in the order in which requests count chunks:
        slices as they are listed, then golden inputs."""
        return {**self.chunks(), **self.golden_chunks()}

    def golden_chunks(self) -> dict[str, int]:
        """Size by digest of the golden inputs and their answers."""
        return {chunk.sha256: chunk.bytes for golden in self.golden for chunk in (golden.request, golden.response)}

    def chunks(self, slice_names: set[str] | None = None) -> dict[str, int]:
        """Size by digest of every chunk of the named slices (all of them by default), each once."""
        wanted = [one for one in self.every_slice if slice_names is None or one.name in slice_names]
        return {chunk.sha256: chunk.bytes for one in wanted for file in one.files for chunk in file.chunks}


class Wanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model that a device shall serve, and the release it shall serve it from."""

    model: str
    """The model's name without its version: what applications ask for."""
    release: str
    """SHA-256 of the manifest."""
    now: bool = False
    """Fetch it at once, whatever hours the device keeps for fetching."""
    keys: bytes = b""
    """Where the release is encrypted: the content keys of the slices that this device runs, and of the golden inputs,
    for this device's eyes only (`edgesplit.crypto.key_wrapping`)."""


class Gateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Through whom a device reaches every tier beyond its first link."""

    device: str
    """The gateway's own name: its server's certificate says `gateway_host` of it."""
    address: str
    """HOST:PORT, as this device reaches it."""


class Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The director's word on what one device shall run. Signed by the director key; newest counter wins."""

    device: str
    releases: tuple[Wanted, ...]
    counter: int
    """Strictly grows; at least the Unix time at which it was made, so a restored backup never goes back."""
    expires: int
    """Unix seconds after which the statement installs nothing new."""
    gateway: Gateway | None = None
    """Whom it offloads to; None: the cloud's offload server."""
    keeps: tuple[Wanted, ...] = ()
    """Of a gateway: releases whose far halves it finishes for the devices behind it."""


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signature by the key of that TUF key id."""

    keyid: str
    sig: str
    """Hex."""


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes and the signatures over exactly these bytes."""

    payload: bytes
    signatures: tuple[Signature, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes (JSON, keys in order), whose SHA-256 names the release."""
    return msgspec.json.encode(manifest, order="deterministic")


def release_digest(raw: bytes) -> str:
    """The release that these manifest bytes are."""
    return hashlib.sha256(raw).hexdigest()


def decode_manifest(raw: bytes) -> Manifest:
    """A manifest that is consistent in itself; MalformedMessage says what is wrong. Trust is not decided here."""
    if len(raw) > LIMITS.manifest_bytes:
        raise MalformedMessage(f"manifest of {len(raw)} bytes, at most {LIMITS.manifest_bytes}")
    try:
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(f"manifest: {error}") from error
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Names, sizes and references hang together."""
    known = [identifiers.slice_name(one.name) for one in manifest.slices]
    every = [*known, *(identifiers.slice_name(one.slice.name) for one in manifest.compiled)]
    if len(set(every)) != len(every) or len(every) > LIMITS.slices:
        raise MalformedMessage("manifest: slice names repeat, or too many slices")
    if manifest.recut_of:
        identifiers.sha256_hex(manifest.recut_of)
    if manifest.anatomy is not None:
        identifiers.sha256_hex(manifest.anatomy.sha256)
        if not 0 < manifest.anatomy.bytes <= LIMITS.anatomy_bytes:
            raise MalformedMessage(f"manifest: an anatomy of {manifest.anatomy.bytes} bytes")
    if any(not one.covers or not set(one.covers) <= set(known) for one in manifest.compiled):
        raise MalformedMessage("manifest: a compiled slice covers slices that are not there")
    for one in manifest.every_slice:
        _check_sealed(one.name, one.sealed)
        for file in one.files:
            _check_file(one.name, file, one.sealed)
    for golden in manifest.golden:
        _check_sealed("golden inputs", golden.sealed)
    for plan in manifest.plans.values():
        if not plan.rows or len(plan.rows) > LIMITS.rows:
            raise MalformedMessage(f"manifest: a plan of {len(plan.rows)} rows")
        if plan.offload:
            _check_offload(plan.offload)
        for row in plan.rows:
            if sorted((*row.device, *row.remote)) != sorted(known):
                raise MalformedMessage(f"manifest: row {row.name!r} does not place every slice exactly once")
            if set(row.sends) & set(plan.never_leaves):
                raise MalformedMessage(f"manifest: row {row.name!r} sends what may never leave the device")
            _check_hops(row, plan)
            here = {layer for one in manifest.slices if one.name in row.device for layer in one.layers}
            if not here.issuperset(plan.earliest_cut):
                raise MalformedMessage(f"manifest: row {row.name!r} cuts earlier than its plan says is allowed")


def _check_offload(address: str) -> None:
    try:
        ForeignServer.parse(address)
    except UsageError as error:
        raise MalformedMessage(f"manifest: {error}") from error


def _check_hops(row: Row, plan: Plan) -> None:
    """Each further link has its tier, and beyond it run some of the slices that run beyond the one before."""
    if len(row.hops) > max(0, len(plan.tiers) - 2):
        raise MalformedMessage(f"manifest: row {row.name!r} goes through more tiers than its plan has")
    beyond, answers = row.remote, row.receives
    for hop in row.hops:
        further = set(hop.remote)
        if tuple(name for name in beyond if name in further) != hop.remote or not set(hop.receives) <= set(answers):
            raise MalformedMessage(f"manifest: row {row.name!r} runs or answers beyond a link what does not cross it")
        if set(hop.sends) & set(plan.never_leaves):
            raise MalformedMessage(f"manifest: row {row.name!r} sends what may never leave the device")
        beyond, answers = hop.remote, hop.receives


def _check_sealed(owner: str, sealed: Sealed | None) -> None:
    if sealed is not None:
        try:
            identifiers.sha256_hex(sealed.key_id)
            identifiers.sha256_hex(sealed.commitment)
        except MalformedMessage as error:
            raise MalformedMessage(f"manifest: the key of {owner}: {error}") from error


def _check_file(owner: str, file: SliceFile, sealed: Sealed | None) -> None:
    identifiers.sha256_hex(file.sha256)
    tag = 0 if sealed is None else TAG_BYTES
    for chunk in file.chunks:
        identifiers.sha256_hex(chunk.sha256)
        if not tag < chunk.bytes <= LIMITS.chunk_bytes + tag:
            raise MalformedMessage(f"manifest: a chunk of {chunk.bytes} bytes in {owner}")
    if sum(chunk.bytes for chunk in file.chunks) != file.bytes or file.bytes > LIMITS.slice_bytes:
        raise MalformedMessage(f"manifest: sizes of {owner}/{file.name} do not add up")
    if (file.plain is None) != (sealed is None):
        raise MalformedMessage(f"manifest: {owner}/{file.name} is neither in clear nor encrypted")
    if file.plain is not None:
        identifiers.sha256_hex(file.plain.digest)
        if file.plain.bytes != file.bytes - tag * len(file.chunks):
            raise MalformedMessage(f"manifest: sizes of {owner}/{file.name}, encrypted and not, do not fit each other")


def remote_slices(manifest: Manifest) -> set[str]:
    """Every slice that some row of some plan does not run on the device."""
    return {name for plan in manifest.plans.values() for row in plan.rows for name in row.remote}


def gateway_slices(manifest: Manifest) -> set[str]:
    """Every slice that some row beyond a gateway's link runs: a gateway finishes alone where the cloud does not."""
    through = [plan for plan in manifest.plans.values() if plan.has_gateway]
    return {name for plan in through for row in plan.rows for name in row.remote}


def device_slices(plan: Plan, manifest: Manifest) -> set[str]:
    """Every slice that any row of the plan runs on the device, and what was compiled for this class of device."""
    compiled = {one.slice.name for one in manifest.compiled if one.device_class == plan.device_class}
    return compiled | {name for row in plan.rows for name in row.device}


settle(__name__)
