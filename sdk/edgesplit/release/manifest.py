"""Manifest of a release: a model, its plans and all its slices, device and remote halves together, as one signed unit.

The manifest is one TUF target. It names every slice and every chunk by SHA-256, so that trust in the manifest's bytes
extends to each byte that it refers to. This module is the format; verification is in `edgesplit.trust.verification`.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from edgesplit import identifiers
from edgesplit.cascade import EXIT, WHOLE, Cascade, cascade_problem
from edgesplit.decoding import decode_json
from edgesplit.errors import MalformedMessage, UsageError
from edgesplit.foreign_server import ForeignServer
from edgesplit.input_spec import InputSpec
from edgesplit.limits import LIMITS
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.output_kind import OutputKind
from edgesplit.plan import Hop, Plan, Row
from edgesplit.release.lineage import Lineage

FORMAT: Final = "edgesplit.release/2"
SliceFormat = Literal["input", "onnx", "tflite", "agent"]
FileName = Literal["graph.onnx", "weights.bin", "model.tflite", "wheels.tar"]
Cipher = Literal["chacha20-poly1305"]
TAG_BYTES: Final = 16
"""Size of the authentication tag that encryption adds to each chunk."""
Kernels = Literal["default", "plain", "edgetpu"]
VARIANT_SLICE_MARK: Final = "."
"""Separates a variant's name from the name of its slice, as in `small.s01-conv`."""


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a file, named by its SHA-256. At most `LIMITS.chunk_bytes` long, plus a tag where it is encrypted."""

    sha256: str
    bytes: int


def chunk_of(data: bytes) -> Chunk:
    """The chunk whose content is `data`."""
    return Chunk(hashlib.sha256(data).hexdigest(), len(data))


class EncryptionInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How data is encrypted (`edgesplit.crypto.slice_encryption`), chunk by chunk, and with which content key."""

    cipher: Cipher
    key_id: str
    """Name of the key; the controller derives the key from it and a secret of its own."""
    commitment: str
    """Digest of the key, with which a recipient can check that it has the right one."""


class PlaintextInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plaintext that an encrypted file must decrypt to."""

    bytes: int
    digest: str
    """HMAC-SHA256 under the content key: without the key, not even a guess of the file's content can be confirmed."""


class SliceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a slice: its chunks in order, and the digest of the whole, as it is transferred and stored."""

    name: FileName
    bytes: int
    sha256: str
    chunks: tuple[Chunk, ...]
    plaintext: PlaintextInfo | None = None
    """For an encrypted slice."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor's name, its Open Inference Protocol data type and its shape; -1 is a length known only at run time."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layers between neighbouring cuts: the unit that is signed, transferred and run.

    Format `input` has no files: it is the manifest's input spec (bytes of a picture in, the first tensor out). Format
    `agent` contains no layers, but the agent itself for one kind of machine (`edgesplit.release.agent_release`).
    """

    name: str
    format: SliceFormat
    layers: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    files: tuple[SliceFile, ...] = ()
    kernels: Kernels = "default"
    """`plain`: without the engine's default delegate (XNNPACK), which refuses the whole model; it might accept a single
    slice and then compute other bits than the whole model does. `edgetpu`: compiled for the Edge TPU, runs there only.
    """
    encryption: EncryptionInfo | None = None
    """None: not encrypted."""

    @property
    def bytes(self) -> int:
        """Size of all files of this slice."""
        return sum(file.bytes for file in self.files)


class CompiledSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A slice compiled for an accelerator; it replaces the slices in `covers`, which compute the same on the CPU."""

    slice: Slice
    device_class: str
    """Device class that has the accelerator."""
    covers: tuple[str, ...]


class GoldenExample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Golden example: an input with the whole model's answer, as Open Inference Protocol request and response body."""

    request: Chunk
    response: Chunk
    encryption: EncryptionInfo | None = None
    """None: not encrypted. They are sample pictures."""
    label: int | msgspec.UnsetType = msgspec.UNSET
    """The class that the input shows, where rollout gates judge by it. Unset is not written, because agents before 0.3
    do not know the field."""
    answer: int | msgspec.UnsetType = msgspec.UNSET
    """The class that the base of a variant answers (of other models, the whole model), where gates judge by it."""


class FingerprintFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Digest and size of the model's fingerprint file (`edgesplit.release.fingerprint`)."""

    sha256: str
    bytes: int


class ReleaseVariant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One model of a family: its slices are those whose names begin with its own and `VARIANT_SLICE_MARK`."""

    name: str
    model: str
    """`name@version`."""
    model_sha256: str
    accuracy: float
    """Share of right answers among the family's labelled samples, 0 to 1, which its rows state too. Where the samples
    have no labels: of answers as another variant gives them (`Plan.agreement_with`)."""
    least_accuracy: float
    """Lower bound of the accuracy, 90 % sure (one-sided Clopper-Pearson)."""
    samples: int
    """Number of samples."""
    outputs: tuple[str, ...]
    """Its tensors that are the manifest's outputs, in their order; of a detector those that its layout reads, in the
    layout's order."""
    input_spec: InputSpec | None = None
    answer: str = ""
    """Of a detector, `boxes:LAYOUT:THRESHOLD`: its outputs are decoded by this rule into the manifest's only one
    (`edgesplit.answers.detections`). Empty: they are given as they are."""
    labels: tuple[int, ...] = ()
    """Label of each class index of its outputs, -1 for none. Empty: its classes are those of the manifest's outputs."""
    golden: int = 0
    """Number of its golden examples; those of all variants follow each other in the manifest."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Signed description of a release. The SHA-256 of its exact bytes is the release's digest."""

    format: Literal["edgesplit.release/2"] = FORMAT
    model: str
    """`name@version`."""
    model_sha256: str
    created: str
    """UTC, ISO 8601."""
    input_spec: InputSpec | None
    """How a camera's bytes become the first tensor, or None where applications send tensors."""
    inputs: tuple[TensorSpec, ...]
    """Inputs of a request: `frame` (UINT8, [-1]) with an input spec, otherwise the model's own inputs."""
    outputs: tuple[TensorSpec, ...]
    slices: tuple[Slice, ...]
    """In an order in which they can run."""
    plans: dict[str, Plan]
    """By device class."""
    golden: tuple[GoldenExample, ...] = ()
    compiled: tuple[CompiledSlice, ...] = ()
    """Compiled slices. They are in no row: a device that can run one runs it in place of the slices that it covers."""
    fingerprint: FingerprintFile | None = None
    """The model's fingerprint, with which it can be cut elsewhere without the release key; None where a recut may only
    rearrange the existing slices."""
    lineage: Lineage | msgspec.UnsetType = msgspec.UNSET
    """For a version that stands in for another. Unset is not written, because agents before 0.3 do not know the field.
    """
    recut_of: str = ""
    """For a recut, signed by the planner: digest of the release that it is another cut of. Empty where the release key
    signs."""
    variants: tuple[ReleaseVariant, ...] | msgspec.UnsetType = msgspec.UNSET
    """Variants of a family, each with an input spec of its own. Not written for one model, so that agents which do not
    know families refuse those only."""

    output_kind: OutputKind | msgspec.UnsetType = msgspec.UNSET
    """What the outputs are, where the model was pushed with it. Not written for others, so that agents from before 0.3
    refuse those only."""

    @property
    def family(self) -> tuple[ReleaseVariant, ...]:
        """The variants; empty for one model."""
        return () if isinstance(self.variants, msgspec.UnsetType) else self.variants

    def variant(self, name: str) -> ReleaseVariant | None:
        """The variant of that name; None if there is none, as for one model."""
        return next((variant for variant in self.family if variant.name == name), None)

    def slices_of(self, variant: str) -> tuple[Slice, ...]:
        """The slices of a variant, in an order in which they can run; those of one model for the name ""."""
        if not variant:
            return self.slices
        prefix = variant + VARIANT_SLICE_MARK
        return tuple(slice_ for slice_ in self.slices if slice_.name.startswith(prefix))

    def input_spec_of(self, slice_: Slice) -> InputSpec | None:
        """The input spec by which that input slice decodes."""
        variant = self.variant(slice_.name.partition(VARIANT_SLICE_MARK)[0])
        return variant.input_spec if variant is not None else self.input_spec

    def outputs_of(self, variant: str) -> tuple[str, ...]:
        """Names of a variant's tensors that are the outputs, in their order; the outputs' own for one model."""
        found = self.variant(variant)
        return found.outputs if found is not None else tuple(spec.name for spec in self.outputs)

    def tensors_of(self, variant: str) -> dict[str, TensorSpec]:
        """Specifications of a variant's tensors by name: two variants may have tensors of one name."""
        specs = {spec.name: spec for slice_ in self.slices_of(variant) for spec in (*slice_.inputs, *slice_.outputs)}
        shared = self.inputs if variant else (*self.inputs, *self.outputs)
        return {**specs, **{spec.name: spec for spec in shared}}

    def variant_of_golden(self, number: int) -> str:
        """Name of the variant that the golden example at this place is of; empty for one model."""
        for variant in self.family:
            if number < variant.golden:
                return variant.name
            number -= variant.golden
        return ""

    @property
    def exit_outputs(self) -> frozenset[str]:
        """Tensors by which plans let a request end early; none of them is among `outputs`."""
        cascades = (plan.cascade for plan in self.plans.values())
        return frozenset(cascade.exit_output for cascade in cascades if cascade is not None and cascade.exit_output)

    @property
    def score_outputs(self) -> frozenset[str]:
        """Tensors of first variants by which cascades tell how sure an answer is; they are no part of it."""
        cascades = (plan.cascade for plan in self.plans.values())
        return frozenset(cascade.score_output for cascade in cascades if cascade is not None and cascade.score_output)

    def slices_for(self, tensor: str) -> tuple[str, ...]:
        """Names of the slices that compute a tensor of one model, with all that they depend on, in an order in which
        they can run; empty where none writes it."""
        needed, found = {tensor}, list[str]()
        for slice_ in reversed(self.slices):
            if not needed.isdisjoint(spec.name for spec in slice_.outputs):
                found.append(slice_.name)
                needed.update(spec.name for spec in slice_.inputs)
        return tuple(reversed(found))

    @property
    def all_slices(self) -> tuple[Slice, ...]:
        """All slices, including compiled ones."""
        return (*self.slices, *(compiled.slice for compiled in self.compiled))

    @property
    def is_encrypted(self) -> bool:
        """True if any of its slices needs a content key."""
        return any(slice_.encryption is not None for slice_ in self.all_slices)

    def slice(self, name: str) -> Slice:
        """The slice of that name; KeyError if there is none."""
        for slice_ in self.all_slices:
            if slice_.name == name:
                return slice_
        raise KeyError(name)

    def chunk_list(self) -> dict[str, int]:
        """Size by digest of all chunks that a device may request, each once, in the order in which requests index them:
        slices as listed, then golden examples."""
        return {**self.chunk_sizes(), **self.golden_chunk_sizes()}

    def golden_chunk_sizes(self) -> dict[str, int]:
        """Size by digest of the chunks of the golden examples."""
        return {chunk.sha256: chunk.bytes for golden in self.golden for chunk in (golden.request, golden.response)}

    def chunk_sizes(self, slice_names: set[str] | None = None) -> dict[str, int]:
        """Size by digest of every chunk of the named slices (by default of all), each once."""
        wanted = [slice_ for slice_ in self.all_slices if slice_names is None or slice_.name in slice_names]
        return {chunk.sha256: chunk.bytes for slice_ in wanted for file in slice_.files for chunk in file.chunks}


class DesiredRelease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Desired state of one model on a device: the release that it shall serve."""

    model: Annotated[str, Meta(max_length=80)]
    """The model's name without its version, as applications request it."""
    release: Annotated[str, Meta(max_length=64)]
    """SHA-256 of the manifest."""
    fetch_now: bool = False
    """Fetch at once, regardless of the device's download window."""
    keys: Annotated[bytes, Meta(max_length=LIMITS.wrapped_bytes)] = b""
    """For an encrypted release: content keys of the slices that this device runs, and of the golden examples, wrapped
    for this device (`edgesplit.crypto.key_wrapping`)."""


class Gateway(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The gateway through which a device reaches every tier beyond its first link."""

    device: Annotated[str, Meta(max_length=63)]
    """The gateway's device name; its server certificate is for `gateway_host(device)`."""
    address: Annotated[str, Meta(max_length=400)]
    """HOST:PORT, as this device reaches it."""


class Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Desired state of one device, signed by the director key; the statement with the highest counter wins."""

    device: Annotated[str, Meta(max_length=63)]
    releases: Annotated[tuple[DesiredRelease, ...], Meta(max_length=LIMITS.reported_models)]
    counter: int
    """Strictly increasing, and at least the Unix time of signing, so that a restored backup never goes back."""
    expires: int
    """Unix seconds; afterwards the statement installs nothing new."""
    gateway: Gateway | None = None
    """The device's offload target; None: the cloud's offload server."""
    gateway_releases: Annotated[tuple[DesiredRelease, ...], Meta(max_length=LIMITS.gateway_releases)] = ()
    """For a gateway: releases whose remote halves it runs for the devices behind it."""


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A signature by the key with that TUF key id."""

    keyid: Annotated[str, Meta(max_length=128)]
    sig: Annotated[str, Meta(max_length=8_192)]
    """Hex."""


class Signed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes and the signatures over exactly these bytes."""

    payload: Annotated[bytes, Meta(max_length=LIMITS.message_bytes)]
    signatures: Annotated[tuple[Signature, ...], Meta(max_length=1_024)]


def encode_manifest(manifest: Manifest) -> bytes:
    """Encode the manifest as JSON with sorted keys; the SHA-256 of the bytes names the release."""
    return msgspec.json.encode(manifest, order="deterministic")


def release_digest(raw: bytes) -> str:
    """Digest of the release with these manifest bytes."""
    return hashlib.sha256(raw).hexdigest()


def decode_manifest(raw: bytes) -> Manifest:
    """Decode a manifest and check its consistency; MalformedMessage describes the error. Signatures are not verified
    here."""
    manifest = decode_json(raw, Manifest, "manifest", LIMITS.manifest_bytes)
    _check_manifest(manifest)
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Check names, sizes and cross-references."""
    _check_variants(manifest)
    known = [identifiers.slice_name(slice_.name) for slice_ in manifest.slices]
    all_names = [*known, *(identifiers.slice_name(compiled.slice.name) for compiled in manifest.compiled)]
    if len(set(all_names)) != len(all_names) or len(all_names) > LIMITS.slices:
        raise MalformedMessage("manifest: slice names repeat, or too many slices")
    if manifest.recut_of:
        identifiers.sha256_hex(manifest.recut_of)
    if manifest.fingerprint is not None:
        identifiers.sha256_hex(manifest.fingerprint.sha256)
        if not 0 < manifest.fingerprint.bytes <= LIMITS.fingerprint_bytes:
            raise MalformedMessage(f"manifest: a fingerprint of {manifest.fingerprint.bytes} bytes")
    if any(not compiled.covers or not set(compiled.covers) <= set(known) for compiled in manifest.compiled):
        raise MalformedMessage("manifest: a compiled slice covers slices that do not exist")
    for slice_ in manifest.all_slices:
        _check_sealed(slice_.name, slice_.encryption)
        for file in slice_.files:
            _check_file(slice_.name, file, slice_.encryption)
    for golden in manifest.golden:
        _check_sealed("golden inputs", golden.encryption)
    if isinstance(manifest.lineage, Lineage):
        identifiers.sha256_hex(manifest.lineage.base_sha256)
        identifiers.sha256_hex(manifest.lineage.samples_sha256)
    if isinstance(manifest.output_kind, OutputKind):
        missing = set(manifest.output_kind.outputs) - {spec.name for spec in manifest.outputs}
        if missing:
            raise MalformedMessage(f"manifest: its output kind reads {min(missing)!r}, which is no output")
    for plan in manifest.plans.values():
        if not plan.rows or len(plan.rows) > LIMITS.rows:
            raise MalformedMessage(f"manifest: a plan of {len(plan.rows)} rows")
        if plan.offload:
            _check_offload(plan.offload)
        _check_cascade(plan, manifest)
        for row in plan.rows:
            _check_variant(row, manifest)
            own = [slice_.name for slice_ in manifest.slices_of(row.variant)]
            if sorted((*row.device, *row.remote)) != sorted(own):
                raise MalformedMessage(f"manifest: row {row.name!r} does not place every slice exactly once")
            if set(row.sends) & set(plan.private_tensors):
                raise MalformedMessage(f"manifest: row {row.name!r} sends tensors that must stay on the device")
            links: tuple[Row | Hop, ...] = (row, *row.hops)
            for link in links:
                if max(len(link.sends), len(link.receives)) > LIMITS.inference_tensors:
                    raise MalformedMessage(
                        f"manifest: row {row.name!r} sends {len(link.sends)} tensors and receives {len(link.receives)},"
                        f" at most {LIMITS.inference_tensors}"
                    )
            _check_hops(row, plan)
            local_layers = {layer for slice_ in manifest.slices if slice_.name in row.device for layer in slice_.layers}
            if not local_layers.issuperset(plan.required_layers(row)):
                raise MalformedMessage(f"manifest: row {row.name!r} cuts earlier than its plan allows")


def _check_variants(manifest: Manifest) -> None:
    """Check that a family's variants have names of their own, slices, an accuracy and the outputs."""
    try:
        names = [identifiers.variant_name(variant.name) for variant in manifest.family]
    except UsageError as error:
        raise MalformedMessage(f"manifest: {error}") from error
    if len(set(names)) != len(names) or len(names) > LIMITS.variants:
        raise MalformedMessage("manifest: names of variants repeat, or too many variants")
    if len({bool(variant.answer) for variant in manifest.family}) > 1:
        raise MalformedMessage("manifest: some variants of the family answer by boxes, and some do not")
    for variant in manifest.family:
        identifiers.sha256_hex(variant.model_sha256)
        fits = len(manifest.outputs) == 1 if variant.answer else len(variant.outputs) == len(manifest.outputs)
        if not manifest.slices_of(variant.name) or not fits:
            raise MalformedMessage(f"manifest: variant {variant.name!r} has no slices, or not the family's outputs")
        if not 0 <= variant.least_accuracy <= variant.accuracy <= 1 or min(variant.samples, variant.golden) < 0:
            raise MalformedMessage(f"manifest: variant {variant.name!r} states no accuracy")
    placed = sum(len(manifest.slices_of(name)) for name in names)
    if manifest.family and (placed != len(manifest.slices) or manifest.recut_of or manifest.compiled):
        raise MalformedMessage("manifest: a family has slices of no variant, or is a recut, or has compiled slices")
    if manifest.family and sum(variant.golden for variant in manifest.family) != len(manifest.golden):
        raise MalformedMessage("manifest: a family's golden examples are not those of its variants")


def _check_variant(row: Row, manifest: Manifest) -> None:
    """Check that a row is of a variant of this family with its accuracy, or of one model and states none."""
    variant = manifest.variant(row.variant)
    if (variant is None) != (not manifest.family) or (variant is None and row.variant):
        raise MalformedMessage(f"manifest: row {row.name!r} is of no variant of this release")
    if row.accuracy != (variant.accuracy if variant is not None else None):
        raise MalformedMessage(f"manifest: row {row.name!r} states another accuracy than its variant")


def _check_cascade(plan: Plan, manifest: Manifest) -> None:
    """Check that a plan's cascade is of two variants, the first of which has a local row, and that its numbers are."""
    cascade = plan.cascade
    if cascade is None:
        return
    if problem := cascade_problem(cascade):
        raise MalformedMessage(f"manifest: cascade: {problem}")
    if cascade.exit_output:
        _check_exit(cascade, plan, manifest)
        return
    if None in map(manifest.variant, (cascade.first, cascade.second)) or cascade.first == cascade.second:
        raise MalformedMessage(f"manifest: a cascade of {cascade.first!r} and {cascade.second!r}: no two variants")
    if not any(row.is_local for row in plan.rows if row.variant == cascade.first):
        raise MalformedMessage(f"manifest: {cascade.first!r} cannot answer first, as it has no row on the device alone")


def _check_exit(cascade: Cascade, plan: Plan, manifest: Manifest) -> None:
    """Check that an early exit is of one model with one output, and that every row computes it on the device."""
    output = cascade.exit_output
    if manifest.family or len(manifest.outputs) != 1 or (cascade.first, cascade.second) != (EXIT, WHOLE):
        raise MalformedMessage(f"manifest: the early exit {output!r} is not of one model with one output")
    needed = set(manifest.slices_for(output))
    if not needed or needed >= {slice_.name for slice_ in manifest.slices} or manifest.outputs[0].name == output:
        raise MalformedMessage(f"manifest: the early exit {output!r} is not computed by a part of the slices")
    if row := next((row for row in plan.rows if not needed.issubset(row.device)), None):
        raise MalformedMessage(f"manifest: row {row.name!r} does not compute the early exit {output!r} on the device")


def _check_offload(address: str) -> None:
    try:
        ForeignServer.parse(address)
    except UsageError as error:
        raise MalformedMessage(f"manifest: {error}") from error


def _check_hops(row: Row, plan: Plan) -> None:
    """Each further link has a tier of the plan, and the slices beyond it are a subset of those beyond the previous
    link."""
    if len(row.hops) > max(0, len(plan.tiers) - 2):
        raise MalformedMessage(f"manifest: row {row.name!r} goes through more tiers than its plan has")
    # From link to link the set of slices beyond it may only shrink (in the same order), and so may the outputs.
    beyond, outputs = row.remote, row.receives
    for hop in row.hops:
        further = set(hop.remote)
        if tuple(name for name in beyond if name in further) != hop.remote or not set(hop.receives) <= set(outputs):
            raise MalformedMessage(
                f"manifest: row {row.name!r} uses slices or outputs beyond a link that do not cross it"
            )
        if set(hop.sends) & set(plan.private_tensors):
            raise MalformedMessage(f"manifest: row {row.name!r} sends tensors that must stay on the device")
        beyond, outputs = hop.remote, hop.receives


def _check_sealed(owner: str, sealed: EncryptionInfo | None) -> None:
    if sealed is not None:
        try:
            identifiers.sha256_hex(sealed.key_id)
            identifiers.sha256_hex(sealed.commitment)
        except MalformedMessage as error:
            raise MalformedMessage(f"manifest: the key of {owner}: {error}") from error


def _check_file(owner: str, file: SliceFile, sealed: EncryptionInfo | None) -> None:
    identifiers.sha256_hex(file.sha256)
    tag = 0 if sealed is None else TAG_BYTES
    for chunk in file.chunks:
        identifiers.sha256_hex(chunk.sha256)
        if not tag < chunk.bytes <= LIMITS.chunk_bytes + tag:
            raise MalformedMessage(f"manifest: a chunk of {chunk.bytes} bytes in {owner}")
    if sum(chunk.bytes for chunk in file.chunks) != file.bytes or file.bytes > LIMITS.slice_bytes:
        raise MalformedMessage(f"manifest: sizes of {owner}/{file.name} do not add up")
    if (file.plaintext is None) != (sealed is None):
        raise MalformedMessage(f"manifest: {owner}/{file.name} is neither in clear nor encrypted")
    if file.plaintext is not None:
        identifiers.sha256_hex(file.plaintext.digest)
        if file.plaintext.bytes != file.bytes - tag * len(file.chunks):
            raise MalformedMessage(f"manifest: sizes of {owner}/{file.name}, plain and encrypted, do not match")


def remote_slices(manifest: Manifest) -> set[str]:
    """Every slice that some row of some plan does not run on the device."""
    return {name for plan in manifest.plans.values() for row in plan.rows for name in row.remote}


def gateway_slices(manifest: Manifest) -> set[str]:
    """Every remote slice of plans with a gateway: a gateway runs them all itself where the cloud does not answer."""
    gateway_plans = [plan for plan in manifest.plans.values() if plan.has_gateway]
    return {name for plan in gateway_plans for row in plan.rows for name in row.remote}


def device_slices(plan: Plan, manifest: Manifest) -> set[str]:
    """Every slice that any row of the plan runs on the device, and the slices compiled for this device class."""
    compiled = {entry.slice.name for entry in manifest.compiled if entry.device_class == plan.device_class}
    return compiled | {name for row in plan.rows for name in row.device}


warm_up_structs(__name__)
