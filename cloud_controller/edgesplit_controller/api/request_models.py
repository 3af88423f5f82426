"""What the API takes in: each body with its bounds, and how it becomes what the controller's modules take."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from edgesplit_controller.fleet.devices import CLAIM_S
from edgesplit_controller.fleet.selector import MOST_LETTERS
from edgesplit_controller.planning.planner_service import OWN_CLASS, Wish
from edgesplit_controller.rollout.gates import MOST_GATES
from edgesplit_controller.rollout.request import Asked
from edgesplit_controller.rollout.terms import MOST_STAGES
from edgesplit_controller.tuf.key_change import KeyChange, PublicKey


class Body(BaseModel):
    """A JSON body: what is not known is refused."""

    model_config = ConfigDict(extra="forbid")


class ProfileBody(Body):
    """Where to measure."""

    on: str = Field(default="local", max_length=100)
    """`local`, or a device that runs the model: what it measured at work in the last day."""
    codecs: bool = False
    """Also what every lossy codec does to the answers for the model's samples."""
    device: str = OWN_CLASS
    """The device profile whose predictions stand beside what is measured."""


class SampleBody(Body):
    """One sample: a JPEG, or tensors by name as .npz; base64."""

    frame: str | None = None
    tensors: str | None = None
    label: int | None = None
    """The class that it shows, as the model counts them."""


class SamplesBody(Body):
    """Sample inputs."""

    samples: list[SampleBody] = Field(max_length=256)


class WishBody(Body):
    """What is asked of a plan."""

    model: str
    partition: str = "auto"
    limits: dict[str, Any] = {}
    codecs: list[str] | None = None
    link: str | None = None
    objective: str | dict[str, float] = "latency"
    offload: str = Field(default="", max_length=500)
    """A server that is not ours, where the far halves run."""

    def wish(self) -> Wish:
        """As planning takes it."""
        codecs = tuple(self.codecs) if self.codecs else None
        return Wish(
            partition=self.partition,
            limits=self.limits,
            codecs=codecs,
            objective=self.objective,
            offload=self.offload,
        )


class PlanBody(WishBody):
    """A plan to be made."""

    device: str


Text = Annotated[str, Field(max_length=200)]


class RolloutBody(Body):
    """On what terms a release goes out (`rollout.asked.Asked`): each as the command line spells it."""

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
    prefer: str = Field(default="", max_length=MOST_LETTERS)
    follow: bool = False
    when_failed: Text = "stay"
    unless_busy: bool = False

    def asked(self) -> Asked:
        """As rollouts take it."""
        return msgspec.convert(self.model_dump(), Asked)


class DeployBody(WishBody):
    """A deployment to be made."""

    to: list[str] = Field(max_length=10_000)
    now: bool = False
    """Fetched at once, whatever hours devices keep for fetching."""
    encrypt: bool = False
    """Slices and golden inputs travel and are kept as ciphertext."""
    recut: bool = False
    """Signed by the planner, as another cut of a release."""
    elsewhere: bool = False
    """The release key lies elsewhere: answer what it must sign."""
    rollout: RolloutBody = RolloutBody()

    def wish(self) -> Wish:
        """As planning and releasing take it."""
        return msgspec.structs.replace(super().wish(), encrypt=self.encrypt)


class SignedBody(DeployBody):
    """A deployment that was prepared, and the list of releases with it, signed."""

    release: str = Field(max_length=64)
    next_targets: str


class DeployAgentBody(Body):
    """A version of the agent for some devices."""

    version: str = Field(max_length=40)
    to: list[str]
    now: bool = False
    elsewhere: bool = False
    """The release key lies elsewhere: answer what it must sign."""
    rollout: RolloutBody = RolloutBody()
    release: str = Field(default="", max_length=64)
    next_targets: str = ""
    """Both: signed elsewhere."""


class PublicKeyBody(Body):
    """A key without its private part."""

    keyid: str = Field(max_length=128)
    public: dict[str, Any]


class KeyChangeBody(Body):
    """What shall become of the keys (`key_changes.KeyChange`)."""

    root_keys: list[PublicKeyBody] = Field(default=[], max_length=64)
    threshold: int = Field(default=0, ge=0, le=64)
    release_key: PublicKeyBody | None = None
    anew: list[str] = Field(default=[], max_length=16)

    def change(self) -> KeyChange:
        """As `rotation` takes it."""
        release = PublicKey(self.release_key.keyid, self.release_key.public) if self.release_key else None
        root = tuple(PublicKey(one.keyid, one.public) for one in self.root_keys)
        return KeyChange(root, self.threshold, release, tuple(self.anew))


class SignatureBody(Body):
    """A signature that was made elsewhere."""

    keyid: str = Field(max_length=128)
    sig: str = Field(max_length=16_384, pattern="^[0-9a-f]+$")


class SignaturesBody(Body):
    """Signatures for the change that waits."""

    root: list[SignatureBody] = Field(default=[], max_length=64)
    targets: list[SignatureBody] = Field(default=[], max_length=64)


class RenewedBody(Body):
    """A list of releases with a later end, signed."""

    next_targets: str


class ClaimBody(Body):
    """A device to come."""

    device: str
    device_class: str
    group: str | None = None
    labels: dict[str, str] = {}
    link: str | None = None
    expires_s: int = CLAIM_S
    replace: bool = False
    gateway: str = Field(default="", max_length=300)
    """HOST:PORT at which it finishes inferences for others; empty for a device like any other."""


class DescribeBody(Body):
    """What a device is found by."""

    group: str | None = None
    """None: as it is."""
    labels: dict[str, str | None] = Field(default={}, max_length=64)
    """Beside those that it has; null takes one away."""


class LeadBody(Body):
    """Through whom devices offload."""

    devices: list[str] = Field(max_length=10_000)
    gateway: str
    """A gateway's name, or `none`."""
    link: str = ""
    """Theirs from now on."""


class PapersBody(Body):
    """For whom a bundle is."""

    devices: list[str] = Field(min_length=1, max_length=10_000)
    """Names, groups and labels, as for a deployment."""
    models: list[str] = Field(default=[], max_length=256)
    """Only these; empty: all that they shall run."""
    valid_s: int = Field(default=0, ge=0, le=3_700 * 86_400)
    """It must be good for so long at least."""


class GatewayBody(Body):
    """A gateway's server that wants a certificate."""

    csr_pem: str = Field(max_length=8_192)


class EnrolBody(Body):
    """A device that has come."""

    token: str = Field(max_length=256)
    csr_pem: str = Field(max_length=8_192)
    encryption_key: str = Field(default="", max_length=64)
    """Base64."""
    encryption_signature: str = Field(default="", max_length=256)
    """Base64."""


class RenewBody(Body):
    """A device whose certificate grows old."""

    certificate_pem: str = Field(max_length=8_192)
    csr_pem: str = Field(max_length=8_192)
    signature: str = Field(max_length=256)
    """Base64."""
