"""Response bodies of the API, for its OpenAPI document (docs/openapi.json): the fields that a client may rely on.

Responses are made by the controller's packages; these models neither filter nor convert them, so that a new field needs
no change here. Tests check every response against the OpenAPI document.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class ResponseModel(BaseModel):
    """An object with at least these fields."""

    model_config = ConfigDict(extra="allow")


class Problem(ResponseModel):
    """An error. `kind` is the class in `edgesplit.errors`."""

    error: str
    kind: str


class Health(ResponseModel):
    """The API is up."""

    status: str
    version: str


class ConditionShape(ResponseModel):
    """Status of the controller process that answers, and the length of its queues."""

    version: str
    time: float
    addresses: dict[str, str]
    waiting: dict[str, float]


class EnrolledShape(ResponseModel):
    """A device certificate, and the addresses of the installation."""

    device: str
    certificate_pem: str
    ca_pem: str
    broker_host: str
    broker_port: int
    offload_url: str


class Certificate(ResponseModel):
    """A certificate."""

    certificate_pem: str


class TensorShape(ResponseModel):
    """An input or output tensor of a model."""

    name: str


class LineageShape(ResponseModel):
    """Where a version that stands in for another comes from; `sentences` says it in words."""

    base: str
    base_sha256: str
    method: str
    samples_sha256: str
    sentences: list[str]


class ModelFields(ResponseModel):
    """A model without its layers."""

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
    lineage: LineageShape | None = None
    output: str | None = None
    batches: dict[str, int] | None = None


class ModelLine(ModelFields):
    """A model in a list, with the number of its layers."""

    layers: int


class LayerShape(ResponseModel):
    """A layer of a model."""

    name: str


class ModelShape(ModelFields):
    """A model with its layers."""

    layers: list[LayerShape]
    measurement: str = ""
    variants: list[str] = []


class ProposalShape(ResponseModel):
    """What a model most likely takes and gives."""

    input: str = ""
    output: str = ""
    reason: str
    question: str = ""


class PushedShape(ModelShape):
    """A model that was pushed."""

    created: bool
    proposal: ProposalShape | None = None


class ClassNamesShape(ResponseModel):
    """Names of classes that were stored, by their digest."""

    names: str


class VariantShape(ModelShape):
    """A version that stands in for another: it passed the gate and is stored."""

    verdict: str
    created: bool


class SampleSetShape(ResponseModel):
    """A set of samples of a model, by the digest of samples and labels."""

    model: str
    set: str
    samples: int
    labelled: int


class FamilyVariantShape(ResponseModel):
    """A variant of a family with its accuracy."""

    name: str
    model: str
    accuracy: float
    least_accuracy: float
    right: int
    answer: str
    labels: list[int]


class FamilyShape(ResponseModel):
    """Models of one task whose answers mean the same."""

    family: str
    samples: int
    reference: str
    created_at: float
    variants: list[FamilyVariantShape]


class VariantAnswersShape(ResponseModel):
    """A variant's answers to a family's samples."""

    labels: list[int]
    right: list[bool]
    scores: dict[str, list[float | None]]


class FamilyAnswersShape(ResponseModel):
    """What the variants of a family answer to its samples."""

    answer: str
    truth: list[int]
    variants: dict[str, VariantAnswersShape]
    reference: str
    differing: dict[str, dict[str, list[int]]]


class JobShape(ResponseModel):
    """A long call of an operator, queued or running."""

    path: str
    state: str
    step: str
    since: float


class SamplesShape(ResponseModel):
    """Number of sample inputs that a model has."""

    model: str
    samples: int


class CostsShape(ResponseModel):
    """A costs file (docs/costs.md)."""

    format: str
    model: str
    layers: list[LayerShape]


class PlanShape(ResponseModel):
    """A plan with its candidates, sensitivity ranges and optimality certificate."""


class OfflineDevice(ResponseModel):
    """A device that is offline now, and when it was last seen (null: never). It gets what is assigned to it when it
    returns."""

    device: str
    last_seen: float | None


class Deployed(ResponseModel):
    """What was planned, and for which devices. With `deployment` its rollout has begun; without it, the release awaits
    a signature."""

    release: str
    model: str
    devices: list[str]
    offline: list[OfflineDevice]
    encrypted: bool
    plans: list[dict[str, Any]]
    signed_by: str
    deployment: int | None = None


class Undeployed(ResponseModel):
    """The devices that lose a model, each with what it runs. Without `rollout` nothing was done."""

    rollout: int | None
    model: str
    devices: list[dict[str, str]]
    supersedes: list[dict[str, int]]


class Removed(ResponseModel):
    """The models and releases that were removed."""

    models: list[str]
    releases: list[str]
    variants: list[str] = []
    """Versions that stood in for one of the models, and stay."""


class FateShape(ResponseModel):
    """A release (by its digest) or a model that goes or stays, and why."""

    name: str
    model: str
    bytes: int
    reason: str


class Collected(ResponseModel):
    """What a garbage collection deleted, or with `dry_run` would delete, and the releases that it keeps. `waiting`:
    blobs that nothing refers to and that were stored too lately."""

    dry_run: bool
    rules: dict[str, float]
    releases: list[FateShape]
    models: list[FateShape]
    kept: list[FateShape]
    rollouts: int
    proposals: int
    unlisted: int
    blobs: int
    blob_bytes: int
    exported: int
    exported_bytes: int
    database_bytes: int
    waiting: int
    waiting_bytes: int


class AgentBuild(ResponseModel):
    """The wheels of one agent version for one Python version and machine type."""

    python: str
    machine: str
    extras: list[str]
    bytes: int
    sha256: str


class AgentVersion(ResponseModel):
    """An agent version."""

    version: str
    model: str
    builds: list[AgentBuild]
    created_at: float


class PushedAgent(AgentVersion):
    """An agent version after a build was uploaded; `created` is true for a new version."""

    created: bool


class AgentShape(AgentVersion):
    """An agent version, and the number of devices that run it."""

    devices: int


class DeploymentShape(ResponseModel):
    """A release and the devices that it was deployed to."""

    id: int
    release: str
    model: str
    targets: list[str]
    devices: list[str]
    created: float


class Drifted(ResponseModel):
    """What the plans of a model assumed, and what devices measured since."""


class Proposal(ResponseModel):
    """A proposed new plan for a model, and what became of the proposal."""


class Policy(ResponseModel):
    """Replanning policy of a model: what may change without an operator."""


class ReleaseShape(ResponseModel):
    """A signed release."""

    release: str
    model: str
    created: float


class HalfShape(ResponseModel):
    """The remote half of one row of a release's plan for one device class."""

    device_class: str
    row: str
    name: str


class HalvesShape(ResponseModel):
    """The remote halves of a release."""

    release: str
    model: str
    encrypted: bool
    halves: list[HalfShape]


class RoleKeys(ResponseModel):
    """The keys of one TUF role."""

    role: str
    keys: list[dict[str, Any]]
    threshold: int
    version: int | None
    expires: int | None


class KeysShape(ResponseModel):
    """The keys of every role, the pending key change, and reminders of what is due."""

    roles: list[RoleKeys]
    pending: dict[str, Any] | None
    notices: list[str]


class Change(ResponseModel):
    """Result of a request for a key change: `done`, or what must be signed."""

    done: bool


class Waiting(ResponseModel):
    """The pending key change, and what must be signed for it."""

    change: dict[str, Any]
    root: str
    targets: str
    next_root: str | None
    next_targets: str | None


class Dropped(ResponseModel):
    """Whether a pending key change was cancelled."""

    dropped: bool


class ClaimShape(ResponseModel):
    """A one-time claim to enrol as a device. `token` is a secret."""

    device: str
    device_class: str
    token: str
    controller_url: str
    ca_pem: str
    tuf_root: str
    expires: int


class Led(ResponseModel):
    """Devices, and the gateway that they offload through from now on."""

    devices: list[str]
    offline: list[OfflineDevice]
    gateway: str | None


class CarriedShape(ResponseModel):
    """A release in a release bundle, and the indices of its chunks that the bundle needs."""

    release: str
    model: str
    chunks: list[int]


class Papers(ResponseModel):
    """Content of a release bundle without its chunks."""

    created: int
    valid_until: int
    limited_by: str
    files: dict[str, str]
    statements: dict[str, str]
    devices: dict[str, str]
    releases: list[CarriedShape]


class DeviceShape(ResponseModel):
    """A device, or an open claim for a device that has not enrolled yet."""

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


class Described(ResponseModel):
    """A device's group and labels after a change."""

    device: str
    group: str
    labels: dict[str, str]


class ProfileShape(ResponseModel):
    """A device profile: the performance of a kind of device, with the source of each figure."""

    name: str
    description: str


class FleetShape(ResponseModel):
    """Counts of devices by state, agent version, class, model, failure cause and condition."""

    at: float
    devices: dict[str, int]
    agents: list[dict[str, Any]]
    classes: list[dict[str, Any]]
    models: list[dict[str, Any]]
    failures: list[dict[str, Any]]
    conditions: list[dict[str, Any]]
    lately_s: float


class HistoryShape(ResponseModel):
    """A device's telemetry aggregated over time, by model."""

    device: str
    span: str
    buckets: dict[str, list[dict[str, Any]]]


class ModelHistoryShape(ResponseModel):
    """A model's telemetry aggregated over time and all devices."""

    model: str
    span: str
    buckets: list[dict[str, Any]]


class PartShape(ResponseModel):
    """Health of a component of the installation: `state` is good, bad or unknown, with its time, and what to do."""

    name: str
    subject: str
    state: str
    text: str
    since: float | None
    at: float | None
    remedy: str


class BundleShape(ResponseModel):
    """A log bundle of a device."""

    id: str
    device: str
    requested_by: str
    requested: float
    state: str
    reason: str
    total: int
    received: int


class DeviceState(ResponseModel):
    """A device and its new state."""

    device: str
    state: str


class TelemetryShape(ResponseModel):
    """A telemetry message of a device."""

    at: float


class EventShape(ResponseModel):
    """An event: which operator or device (`actor`) did what (`action`) to which subject."""

    id: int
    at: float
    actor: str
    action: str
    subject: str
    detail: dict[str, Any]


class SessionShape(ResponseModel):
    """The caller. `groups` null stands for all groups; changes by a browser session need the token in `csrf`."""

    operator: str
    role: str
    groups: list[str] | None
    csrf: str | None


class Ended(ResponseModel):
    """A session that was ended."""

    state: str


class LoginCode(ResponseModel):
    """A secret code that opens one browser session, once."""

    code: str
    expires: float


class OperatorShape(ResponseModel):
    """An operator; an empty `groups` stands for all groups."""

    name: str
    role: str
    groups: list[str]
    state: str
    created: float
    expires: float | None
    last_seen: float | None


class EquippedShape(ResponseModel):
    """New credentials of an operator, returned once. `token` is a secret."""

    operator: str
    token: str
    certificate_pem: str
    expires: float | None
    url: str
    ca_pem: str


class OperatorState(ResponseModel):
    """An operator and its new state."""

    operator: str
    state: str


class AuditLine(ResponseModel):
    """An entry of the audit log."""

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


class Verdict(ResponseModel):
    """Result of checking the audit log: `problem` is empty if no entry was changed or removed."""

    lines: int
    hash: str
    problem: str


class StageShape(ResponseModel):
    """A stage of a rollout, with the number of its devices in each state."""

    number: int
    size: str
    devices: int
    emulated: int
    simulated: int
    began: float | None
    states: dict[str, int]
    succeeded: int
    failures: int
    open: int
    needs_approval: bool


class CauseShape(ResponseModel):
    """Failures with the same cause: their number and some of the devices."""

    kind: str
    count: int
    example: str
    devices: list[str]


class RolloutShape(ResponseModel):
    """A rollout: its state and the reason for it, what it waits for, its stages, and failures by cause. `withdraws`: it
    removes the model from its devices, and `release` is `nothing`. `offline`: number of devices that it waits for and
    that are offline."""

    id: int
    state: str
    reason: str
    offline: int
    waits_for: str
    model: str
    release: str
    withdraws: bool
    targets: list[str]
    created_by: str
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


class RolloutDeviceShape(ResponseModel):
    """State of one device in a rollout. `counts`: whether it counts as failed in its stage's failure threshold.
    `previous`: the release to roll back to; `nothing` if it ran none of the model, null if there is nothing to go back
    to, because it ran this release already."""

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
    assigned_at: float | None
    ran_at: float | None
    rolls_back: bool
    counts: bool
    online: bool
    last_seen: float | None


def json_response(shape: Any) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose successful response is JSON of this model."""
    return {200: {"model": shape}}


def binary_response(media_type: str, description: str) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route whose successful response is not JSON."""
    binary = {"schema": {"type": "string", "contentMediaType": media_type}}
    return {200: {"description": description, "content": {media_type: binary}}}
