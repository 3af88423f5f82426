"""Request bodies of the API with their limits, and their conversion to the types of the controller's packages."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from edgesplit.errors import UsageError
from edgesplit.output_kind import MOST_NAMES
from edgesplit_controller.fleet.devices import CLAIM_S
from edgesplit_controller.fleet.selector import MAX_CHARS
from edgesplit_controller.model_registry.registry import MOST_SAMPLES
from edgesplit_controller.model_registry.variants import GateRequest
from edgesplit_controller.planning.planner_service import OWN_CLASS, PlanOptions
from edgesplit_controller.rollout.gates import MOST_GATES
from edgesplit_controller.rollout.request import RolloutRequest
from edgesplit_controller.rollout.terms import MOST_STAGES
from edgesplit_controller.tuf.key_change import KeyChange, PublicKey
from edgesplit_partitioner.compression.gate import GateTerms
from edgesplit_partitioner.compression.recipe import Method
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest


class Body(BaseModel):
    """A JSON body; unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")


class ProfileBody(Body):
    """Where to measure a model, and what."""

    on: str = Field(default="local", max_length=100)
    """`local`, or the name of a device that runs the model: its own measurements of the last day."""
    codecs: bool = False
    """Also measure the effect of every lossy codec on the results for the model's samples."""
    device: str = OWN_CLASS
    """The device profile whose predicted times are returned beside the measured ones."""


class SampleBody(Body):
    """One sample input, in base64: a JPEG (`frame`), or tensors by name as .npz (`tensors`)."""

    frame: str | None = None
    tensors: str | None = None
    label: int | None = None
    """Index of the class that the sample shows."""


class SamplesBody(Body):
    """Sample inputs of a model."""

    samples: list[SampleBody] = Field(max_length=256)


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SampleSetBody(Body):
    """Stored samples of a model that make a set."""

    samples: list[Digest] = Field(min_length=1, max_length=MOST_SAMPLES)
    """SHA-256 of each, as it was sent: the JPEG, or the .npz."""


class GateBody(Body):
    """What a version must keep of its base, and the samples on which that is seen."""

    samples: Digest
    """A sample set of the base."""
    allowed_accuracy_loss: float | None = Field(default=None, gt=0, lt=1)
    """Largest share of all answers by which accuracy may fall, as in 0.005."""
    least_agreement: float | None = Field(default=None, gt=0, lt=1)
    """Least share of answers that stay as they are, as in 0.99."""
    answer: str = Field(default="", max_length=200)
    """What an answer is: `class`, `class:OUTPUT`, `boxes:LAYOUT[:THRESHOLD]` or `close:0.01`; empty: as the outputs
    say."""

    def to_request(self) -> GateRequest:
        """The gate as `model_registry.variants` takes it; UsageError where nothing must be kept."""
        if self.allowed_accuracy_loss is None and self.least_agreement is None:
            raise UsageError("say what the version must keep: `allowed_accuracy_loss`, `least_agreement`, or both")
        terms = GateTerms(allowed_accuracy_loss=self.allowed_accuracy_loss, least_agreement=self.least_agreement)
        return GateRequest(terms, self.samples, self.answer)


class PushQuery(Body):
    """A model file to be stored, as query parameters."""

    name: str = Field(max_length=100)
    input: str = Field(default="", max_length=2_000)
    """Its input spec; `auto`: as proposed; empty: it takes tensors."""
    preset: str = Field(default="", max_length=40)
    """`imagenet`, `yolo` or `coco-ssd`, in place of `input`."""
    output: str = Field(default="", max_length=500)
    """Its output kind; `auto`: as proposed; `none`: none, also with a preset."""
    names: str = Field(default="", max_length=64)
    """Digest of the names of its classes, as `POST /v1/class-names` returns it."""
    bind: list[str] = Field(default=[], max_length=64)


class ClassNamesBody(Body):
    """Names of a model's classes, by index."""

    names: list[Annotated[str, Field(max_length=200)]] = Field(min_length=1, max_length=MOST_NAMES)


class VariantQuery(GateBody):
    """A model file that stands in for another, as query parameters."""

    name: str = Field(default="", max_length=100)
    """Name to store it under; empty: that of the base."""
    input: str = Field(default="", max_length=2_000)
    """Its input spec; empty: that of the base."""
    bind: list[str] = Field(default=[], max_length=64)


class CompressBody(GateBody):
    """A compression to be made."""

    method: Method


class VariantBody(Body):
    """A variant of a family to be made."""

    model: str = Field(max_length=100)
    """`name`, or `name@version`."""
    labels: list[int] = Field(default=[], max_length=100_000)
    """Label of each class index of its output, -1 for none; empty: the index itself."""
    answer: str = Field(default="", max_length=200)
    """Its answer rule, where it is not the family's."""


class BoxBody(Body):
    """Something that a frame shows."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom, as parts of the frame's width and height."""
    label: int


class FamilySampleBody(SampleBody):
    """One sample input of a family, with a label or with boxes; or with neither, as all others of the family."""

    boxes: list[BoxBody] | None = Field(default=None, max_length=1_000)


class FamilyBody(Body):
    """A family to be made."""

    name: str
    variants: list[VariantBody] = Field(max_length=64)
    samples: list[FamilySampleBody] = Field(max_length=10_000)
    answer: str = Field(default="", max_length=200)
    """What an answer is: `class:OUTPUT`, `boxes:LAYOUT[:THRESHOLD]` or `close:0.01`; empty: the class of the only
    output."""
    reference: str = Field(default="", max_length=100)
    """Without labels: the model that the others are compared with; empty: the last one."""


class CascadeBody(Body):
    """A cascade: a fast variant answers where it is sure, and a more accurate one is asked otherwise."""

    changed: float
    """Share of all answers that the first variant may give and the second one would give differently."""
    scores: list[str] = Field(default=[], max_length=4)
    """How sure an answer is: `probability`, `margin`, `entropy`, `boxes`, `output:NAME`; several are tried. Empty:
    `margin`, of detectors `boxes`."""
    variants: list[str] | None = Field(default=None, min_length=2, max_length=2)
    """The first and the second variant; none: every pair is tried."""
    certainty: float = 0.9
    audit_share: float = 0.01
    exit_output: str = Field(default="", max_length=500)
    """Of one model: its output by which its first layers answer."""

    def to_request(self) -> CascadeRequest:
        """The cascade as the planner takes it."""
        pair = (self.variants[0], self.variants[1]) if self.variants else None
        return CascadeRequest(
            changed=self.changed, scores=tuple(self.scores), variants=pair, certainty=self.certainty,
            audit_share=self.audit_share, exit_output=self.exit_output,
        )  # fmt: skip


class PlanOptionsBody(Body):
    """Options of a plan."""

    model: str
    partition: str = "auto"
    limits: dict[str, Any] = {}
    codecs: list[str] | None = None
    link: str | None = None
    objective: str | dict[str, float] = ""
    """Empty: `latency`, of a family `accuracy`."""
    least_accuracy: float = 0.0
    """Of a family: no request is answered by a variant of less accuracy, 0 to 1."""
    cascade: CascadeBody | None = None
    """Of a family, or of a model with an early exit."""
    offload: str = Field(default="", max_length=500)
    """URL of a third-party inference server that runs the remote halves."""
    answer: str = Field(default="", max_length=500)
    """What an answer is, for the limit `max_changed`: `class:OUTPUT`, `boxes:LAYOUT[:THRESHOLD]`, `close:TOLERANCE`."""

    def to_options(self) -> PlanOptions:
        """The options as the planner takes them."""
        codecs = tuple(self.codecs) if self.codecs else None
        return PlanOptions(
            partition=self.partition,
            limits=self.limits,
            codecs=codecs,
            objective=self.objective,
            offload=self.offload,
            answer=self.answer,
            least_accuracy=self.least_accuracy,
            cascade=self.cascade.to_request() if self.cascade is not None else None,
        )


class PlanBody(PlanOptionsBody):
    """A plan to be made for a device profile."""

    device: str


Text = Annotated[str, Field(max_length=200)]


class RolloutBody(Body):
    """Terms of a rollout (`rollout.request`), each in the command line's notation."""

    stages: list[Text] = Field(default=[], max_length=MOST_STAGES)
    rate: Text = ""
    abort_when_failed: Text = ""
    next_when_succeeded: Text = ""
    device_timeout: Text = ""
    timeouts_count: Text = "heard"
    approve: bool = False
    approve_stages: list[int] = Field(default=[], max_length=MOST_STAGES)
    at: Text = ""
    between: Text = ""
    gates: list[Text] = Field(default=[], max_length=MOST_GATES)
    gate_after: Text = ""
    prefer: str = Field(default="", max_length=MAX_CHARS)
    follow: bool = False
    when_failed: Text = "stay"
    unless_busy: bool = False

    def to_request(self) -> RolloutRequest:
        """The terms as `rollout` takes them."""
        return msgspec.convert(self.model_dump(), RolloutRequest)


class DeployBody(PlanOptionsBody):
    """A deployment to be made."""

    to: list[str] = Field(max_length=10_000)
    now: bool = False
    """Devices fetch it at once, whatever their download window."""
    encrypt: bool = False
    """Slices and golden inputs are sent and stored encrypted."""
    recut: bool = False
    """Sign with the planner's key, as another cut of an existing release."""
    elsewhere: bool = False
    """The release key is on another machine: return what it must sign."""
    rollout: RolloutBody = RolloutBody()

    def to_options(self) -> PlanOptions:
        """The options as planning and releases take them."""
        return msgspec.structs.replace(super().to_options(), encrypt=self.encrypt)


class UndeployBody(Body):
    """The removal of a model from devices."""

    model: str = Field(max_length=100)
    """`name`, or `name@version` for the devices that run this version."""
    targets: list[str] = Field(max_length=10_000)
    rollout: RolloutBody = RolloutBody()
    dry_run: bool = False


class CollectBody(Body):
    """A garbage collection."""

    dry_run: bool = False
    keep_unused_s: float | None = Field(default=None, ge=0, le=1e9)
    """In place of the retention rule, for this one."""


class SignedBody(DeployBody):
    """A deployment that was prepared before, and the signed targets metadata with its release."""

    release: str = Field(max_length=64)
    next_targets: str


class DeployAgentBody(Body):
    """A deployment of a version of the agent."""

    version: str = Field(max_length=40)
    to: list[str]
    now: bool = False
    elsewhere: bool = False
    """The release key is on another machine: return what it must sign."""
    rollout: RolloutBody = RolloutBody()
    release: str = Field(default="", max_length=64)
    next_targets: str = ""
    """Signed targets metadata; with `release`, the result of signing on another machine."""


class PublicKeyBody(Body):
    """The public part of a key."""

    keyid: str = Field(max_length=128)
    public: dict[str, Any]


class KeyChangeBody(Body):
    """A change of the signing keys: new root keys and threshold, a new release key, or roles with new keys."""

    root_keys: list[PublicKeyBody] = Field(default=[], max_length=64)
    threshold: int = Field(default=0, ge=0, le=64)
    release_key: PublicKeyBody | None = None
    anew: list[str] = Field(default=[], max_length=16)

    def to_change(self) -> KeyChange:
        """The change as `tuf.rotation` takes it."""
        release = PublicKey(self.release_key.keyid, self.release_key.public) if self.release_key else None
        root = tuple(PublicKey(key.keyid, key.public) for key in self.root_keys)
        return KeyChange(root, self.threshold, release, tuple(self.anew))


class SignatureBody(Body):
    """A signature that was made on another machine."""

    keyid: str = Field(max_length=128)
    sig: str = Field(max_length=16_384, pattern="^[0-9a-f]+$")


class SignaturesBody(Body):
    """Signatures for the pending key change."""

    root: list[SignatureBody] = Field(default=[], max_length=64)
    targets: list[SignatureBody] = Field(default=[], max_length=64)


class RenewedBody(Body):
    """Signed targets metadata with a later expiry."""

    next_targets: str


class ClaimBody(Body):
    """A claim for a device that is going to enrol."""

    device: str
    device_class: str
    group: str | None = None
    labels: dict[str, str] = {}
    link: str | None = None
    expires_s: int = CLAIM_S
    replace: bool = False
    gateway: str = Field(default="", max_length=300)
    """HOST:PORT at which other devices offload to this one; empty for a device that is not a gateway."""


class DescribeBody(Body):
    """Changes to a device's group and labels."""

    group: str | None = None
    """None: the group does not change."""
    labels: dict[str, str | None] = Field(default={}, max_length=64)
    """Labels to add or change; null removes a label."""


class LeadBody(Body):
    """The gateway that devices offload through."""

    devices: list[str] = Field(max_length=10_000)
    gateway: str
    """Name of a gateway, or `none`."""
    link: str = ""
    """Link of these devices from now on; empty: as it is."""


class PapersBody(Body):
    """What a release bundle is made for."""

    devices: list[str] = Field(min_length=1, max_length=10_000)
    """Names, groups and labels, as for a deployment."""
    models: list[str] = Field(default=[], max_length=256)
    """Only these models; empty: all that the devices shall run."""
    valid_s: int = Field(default=0, ge=0, le=3_700 * 86_400)
    """Shortest validity that the bundle must have, in seconds."""


class GatewayBody(Body):
    """A certificate request of a gateway's server."""

    csr_pem: str = Field(max_length=8_192)


class EnrolBody(Body):
    """Enrolment of a device: claim token, certificate request and encryption key."""

    token: str = Field(max_length=256)
    csr_pem: str = Field(max_length=8_192)
    encryption_key: str = Field(default="", max_length=64)
    """X25519 public key of the device, base64."""
    encryption_signature: str = Field(default="", max_length=256)
    """Signature of the encryption key by the certificate's key, base64."""


class RenewBody(Body):
    """Renewal of a device's certificate."""

    certificate_pem: str = Field(max_length=8_192)
    csr_pem: str = Field(max_length=8_192)
    signature: str = Field(max_length=256)
    """Signature by the old certificate's key, base64."""
