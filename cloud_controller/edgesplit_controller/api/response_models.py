"""What the API answers, for its description (docs/openapi.json): the fields that a client may rely on.

Answers are what the modules below make; nothing is filtered or converted by these, so that a field more costs nobody a
change here. That they are true is what the tests against the description hold the answers to.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Shape(BaseModel):
    """An object with at least these fields."""

    model_config = ConfigDict(extra="allow")


class Problem(Shape):
    """Why it was not done. `kind` is the class in `edgesplit.errors`."""

    error: str
    kind: str


class Health(Shape):
    """It answers."""

    status: str
    version: str


class ConditionShape(Shape):
    """The process of the controller that answers, and what waits in it."""

    version: str
    time: float
    addresses: dict[str, str]
    waiting: dict[str, float]


class EnrolledShape(Shape):
    """A certificate, and where everything is."""

    device: str
    certificate_pem: str
    ca_pem: str
    broker_host: str
    broker_port: int
    offload_url: str


class Certificate(Shape):
    """A certificate."""

    certificate_pem: str


class TensorShape(Shape):
    """An input or an output of a model."""

    name: str


class ModelLine(Shape):
    """A model in a list."""

    model: str
    name: str
    version: int
    sha256: str
    optimised_sha256: str
    bytes: int
    input: str | None
    bindings: dict[str, int]
    created_at: float
    inputs: list[TensorShape]
    outputs: list[TensorShape]
    layers: int


class LayerShape(Shape):
    """A layer of a model."""

    name: str


class ModelShape(Shape):
    """A model with its layers."""

    model: str
    name: str
    version: int
    sha256: str
    optimised_sha256: str
    bytes: int
    input: str | None
    bindings: dict[str, int]
    created_at: float
    inputs: list[TensorShape]
    outputs: list[TensorShape]
    layers: list[LayerShape]


class SamplesShape(Shape):
    """How many sample inputs a model has."""

    model: str
    samples: int


class CostsShape(Shape):
    """A costs file (docs/costs.md)."""

    format: str
    model: str
    layers: list[LayerShape]


class PlanShape(Shape):
    """A plan for people: candidates, ranges, certificate."""


class Deployed(Shape):
    """What was planned for whom; with `deployment`, also told to them, and without, waiting for a signature."""

    release: str
    model: str
    devices: list[str]
    encrypted: bool
    plans: list[dict[str, Any]]
    signed_by: str
    deployment: int | None = None


class AgentBuild(Shape):
    """The wheels of one version of the agent for one Python and machine."""

    python: str
    machine: str
    extras: list[str]
    bytes: int
    sha256: str


class PushedAgent(Shape):
    """A version of the agent, after a build of it came."""

    version: str
    model: str
    builds: list[AgentBuild]
    created_at: float
    created: bool


class AgentShape(Shape):
    """A version of the agent, and how many devices are of it."""

    version: str
    model: str
    builds: list[AgentBuild]
    created_at: float
    devices: int


class DeploymentShape(Shape):
    """A release on its way to chosen devices."""

    id: int
    release: str
    model: str
    targets: list[str]
    devices: list[str]
    created: float


class Drifted(Shape):
    """What plans of a model assumed, and what was measured since."""


class Proposal(Shape):
    """Another table that was proposed, and what became of it."""


class Policy(Shape):
    """What may become of a model's plans by itself."""


class ReleaseShape(Shape):
    """A signed release."""

    release: str
    model: str
    created: float


class HalfShape(Shape):
    """One far half of a release."""

    device_class: str
    row: str
    name: str


class HalvesShape(Shape):
    """The far halves of a release."""

    release: str
    model: str
    encrypted: bool
    halves: list[HalfShape]


class RoleKeys(Shape):
    """The keys of one role."""

    role: str
    keys: list[dict[str, Any]]
    threshold: int
    version: int | None
    expires: int | None


class KeysShape(Shape):
    """Every role's keys, what waits for signatures, what is due."""

    roles: list[RoleKeys]
    pending: dict[str, Any] | None
    notices: list[str]


class Change(Shape):
    """A change of the keys that is done, or what is to be signed for it."""

    done: bool


class Waiting(Shape):
    """A change of the keys that waits, and what is to be signed for it."""

    change: dict[str, Any]
    root: str
    targets: str
    next_root: str | None
    next_targets: str | None


class Dropped(Shape):
    """A change of the keys that was given up."""

    dropped: bool


class ClaimShape(Shape):
    """A one-time right to enrol as one device. `token` is a secret."""

    device: str
    device_class: str
    token: str
    controller_url: str
    ca_pem: str
    tuf_root: str
    expires: int


class Led(Shape):
    """Devices, and the gateway that they offload through from now on."""

    devices: list[str]
    gateway: str | None


class CarriedShape(Shape):
    """A release in a bundle, and which of its chunks, by their places in its list."""

    release: str
    model: str
    chunks: list[int]


class Papers(Shape):
    """All of a bundle but its chunks."""

    made: int
    valid_until: int
    limited_by: str
    files: dict[str, str]
    statements: dict[str, str]
    devices: dict[str, str]
    releases: list[CarriedShape]


class DeviceShape(Shape):
    """A device, or a claim for one that has not come yet."""

    name: str
    state: str
    device_class: str
    group: str
    labels: dict[str, str]
    link: str
    emulated: bool
    desired: list[dict[str, Any]]
    models: list[dict[str, Any]]
    telemetry: dict[str, Any] | None
    last_seen: float | None
    session: int | None
    local_url: str | None


class Described(Shape):
    """What a device is found by from now on."""

    device: str
    group: str
    labels: dict[str, str]


class ProfileShape(Shape):
    """A device profile: what a kind of device can do, and where each figure comes from."""

    name: str
    description: str


class FleetShape(Shape):
    """How many devices are how."""

    at: float
    devices: dict[str, int]
    agents: list[dict[str, Any]]
    classes: list[dict[str, Any]]
    models: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    conditions: list[dict[str, Any]]
    lately_s: float


class HistoryShape(Shape):
    """What a device told, added up; by model."""

    device: str
    span: str
    buckets: dict[str, list[dict[str, Any]]]


class ModelHistoryShape(Shape):
    """What all devices told of a model, added up."""

    model: str
    span: str
    buckets: list[dict[str, Any]]


class PartShape(Shape):
    """How a part of the installation is: `state` good, bad or unknown, since when, and what to do."""

    name: str
    subject: str
    state: str
    text: str
    since: float | None
    at: float | None
    do: str


class BundleShape(Shape):
    """A device's log bundle."""

    id: str
    device: str
    who: str
    asked: float
    state: str
    why: str
    total: int
    received: int


class DeviceState(Shape):
    """What has become of a device."""

    device: str
    state: str


class TelemetryShape(Shape):
    """What a device told of itself at a time."""

    at: float


class EventShape(Shape):
    """Who did what to what, and when."""

    id: int
    at: float
    who: str
    what: str
    subject: str
    detail: dict[str, Any]


class SessionShape(Shape):
    """Who calls; `groups` None stands for all, `csrf` is what changes by this session need."""

    operator: str
    role: str
    groups: list[str] | None
    csrf: str | None


class Ended(Shape):
    """A session that is over."""

    state: str


class LoginCode(Shape):
    """A secret that lets in one browser, once."""

    code: str
    expires: float


class OperatorShape(Shape):
    """An operator; no `groups` stands for all."""

    name: str
    role: str
    groups: list[str]
    state: str
    made: float
    expires: float | None
    last_seen: float | None


class EquippedShape(Shape):
    """What an operator is told once. `token` is a secret."""

    operator: str
    token: str
    certificate_pem: str
    expires: float | None
    url: str
    ca_pem: str


class OperatorState(Shape):
    """What has become of an operator."""

    operator: str
    state: str


class AuditLine(Shape):
    """A line of the audit log."""

    number: int
    at: float
    operator: str
    serial: str
    address: str
    request: str
    what: str
    subject: str
    outcome: str
    detail: dict[str, str | int]
    previous: str
    hash: str


class Verdict(Shape):
    """Whether the audit log is what was written: `problem` is empty if so."""

    lines: int
    hash: str
    problem: str


class StageShape(Shape):
    """A stage of a rollout: how many of its devices are in which state."""

    number: int
    asked: str
    devices: int
    emulated: int
    simulated: int
    began: float | None
    states: dict[str, int]
    succeeded: int
    failures: int
    open: int
    needs_approval: bool


class CauseShape(Shape):
    """What failures have in common, and a few of the devices."""

    kind: str
    count: int
    example: str
    devices: list[str]


class RolloutShape(Shape):
    """A release on its way: `state`, why, what it waits for, its stages, failures by cause."""

    id: int
    state: str
    why: str
    waits_for: str
    model: str
    release: str
    targets: list[str]
    who: str
    created: float
    began: float | None
    ended: float | None
    changed: float
    following: bool
    superseded_by: int | None
    stage: int
    devices: int
    emulated: int
    simulated: int
    states: dict[str, int]
    stages: list[StageShape]
    failures: list[CauseShape]
    terms: dict[str, Any]


class RolloutDeviceShape(Shape):
    """Where a device of a rollout stands. `counts`: as failed, in its stage's threshold."""

    device: str
    emulated: bool
    simulated: bool
    position: int
    stage: int
    state: str
    cause: str
    kind: str
    previous: str | None
    counter: int
    told_at: float | None
    ran_at: float | None
    goes_back: bool
    counts: bool


def answers(shape: Any) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: a good answer has this shape."""
    return {200: {"model": shape}}


def answers_with(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: a good answer is no JSON."""
    binary = {"schema": {"type": "string", "contentMediaType": media_type}}
    return {200: {"description": description, "content": {media_type: binary}}}
