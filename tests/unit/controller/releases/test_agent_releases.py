"""Releases of the agent: kits pushed, chunked, released, and judged in a rollout."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from edgesplit.errors import NotFound, UsageError
from edgesplit.release.agent_release import AGENT_MODEL, Target, build_for
from edgesplit.release.manifest import Manifest, encode_manifest
from edgesplit_cli.signing import release_summary
from edgesplit_controller.errors import Conflict
from edgesplit_controller.model_registry.registry import Registry
from edgesplit_controller.planning.planner_service import PlanningService, PlanOptions
from edgesplit_controller.releases.agent_releases import AgentReleases, chunk_runs
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.content_keys import load_or_make_content_keys
from edgesplit_controller.rollout.gates import Evidence
from edgesplit_controller.rollout.release_health import combined, evidence_of_members
from edgesplit_controller.rollout.request import RolloutRequest, parse_terms
from edgesplit_controller.rollout.states import Member, Rollout
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, Model
from edgesplit_controller.storage.tables.device_state import RunningRow
from edgesplit_controller.tuf.repository import Repository
from support.wheels import archive, small_agent, wheel

PI, LAPTOP = Target("3.11", "aarch64"), Target("3.12", "x86_64")
LARGE = wheel("large", "1.0", {"large.py": "x = 1\n" * 60_000})


class AgentReleaseHarness:
    """The parts of a controller that agent releases go through."""

    def __init__(self, folder: Path) -> None:
        self.now = 1_800_000_000.0
        self.database = Database(f"sqlite:///{folder / 'controller.db'}")
        self.blobs = BlobStore(folder / "blobs")
        self.registry = Registry(self.database, self.blobs, now=lambda: self.now)
        self.repository = Repository(folder / "tuf", now=lambda: self.now)
        self.releasing = ReleaseBuilder(
            self.database, self.blobs, self.registry, PlanningService(self.database, self.registry, now=lambda:
            self.now), self.repository, offload_releases=folder / "offload",
            content_keys=load_or_make_content_keys(folder / "content.key"), now=lambda: self.now,
        )  # fmt: skip
        self.agents = AgentReleases(self.database, self.blobs, self.releasing, now=lambda: self.now)

    def push(self, content: bytes, version: str, target: Target = PI) -> dict[str, object]:
        part = self.blobs.incoming_file()
        part.write_bytes(content)
        try:
            return self.agents.push(part, version, target, ["tflite"])
        finally:
            assert not part.exists()

    def release(self, version: str) -> tuple[str, Manifest]:
        model = self.agents.get(version)
        digest, manifest = self.agents.prepare(model)
        self.releasing.publish(model, digest, PlanOptions(partition="device"))
        return digest, manifest


@pytest.fixture
def shop(tmp_path: Path) -> AgentReleaseHarness:
    return AgentReleaseHarness(tmp_path)


def test_builds_of_one_version_form_one_release(shop: AgentReleaseHarness) -> None:
    """Two kits of one version are two builds; the release names each of their bytes, is signed by the release key, and
    is identical when created again."""
    first = archive(small_agent("0.3.0"), LARGE)
    assert shop.push(first, "0.3.0")["created"] is True
    assert shop.push(archive(small_agent("0.3.0")), "0.3.0", LAPTOP)["created"] is True
    assert shop.push(first, "0.3.0")["created"] is False

    digest, manifest = shop.release("0.3.0")
    shop.now += 60

    assert digest in shop.repository.releases() and shop.agents.prepare(shop.agents.get("0.3.0"))[0] == digest
    file = build_for(manifest, PI).slice.files[0]
    whole = b"".join(shop.blobs.get(chunk.sha256) for chunk in file.chunks)
    assert whole == first and hashlib.sha256(whole).hexdigest() == file.sha256
    assert [build["machine"] for build in shop.agents.all()[0]["builds"]] == ["aarch64", "x86_64"]
    assert not list((shop.blobs.path(digest).parents[2] / "offload").glob("*")), "the offload server runs no part of it"


def test_an_unchanged_wheel_keeps_its_chunks(shop: AgentReleaseHarness, tmp_path: Path) -> None:
    """Wherever a wheel lies in the archive, its bytes are chunked alike: an update sends only what changed."""

    def chunks(content: bytes, version: str) -> set[bytes]:
        part = tmp_path / "wheels.tar"
        part.write_bytes(content)
        return {content[at : at + size] for at, size in chunk_runs(part, version)}

    old = chunks(archive(small_agent("0.3.0"), LARGE), "0.3.0")
    more = wheel("new", "1.0", {"new.py": "y = 2"})
    new = chunks(archive(more, small_agent("0.4.0", problem="longer"), LARGE), "0.4.0")
    assert sum(map(len, new - old)) < 10_000 < len(LARGE[1]) < sum(map(len, new & old)) + 10_000


def test_a_published_version_is_immutable(shop: AgentReleaseHarness) -> None:
    """Other wheels under the same number are refused; what was pushed stays."""
    shop.push(archive(small_agent("0.3.0")), "0.3.0")
    before = shop.agents.all()
    with pytest.raises(Conflict, match="immutable"):
        shop.push(archive(small_agent("0.3.0"), LARGE), "0.3.0")
    assert shop.agents.all() == before


@pytest.mark.parametrize(
    ("content", "version", "why"),
    [
        (b"nothing", "0.3.0", "no tar archive"),
        (archive(("x.txt", b"")), "0.3.0", "is no wheel"),
        (archive(LARGE), "0.3.0", "no wheel of edgesplit 0.3.0"),
        (archive(small_agent("0.3.0")), "0.4.0", "no wheel of edgesplit 0.4.0"),
        (archive(small_agent("0.3.0")), "0.3.0/../x", "no agent release"),
    ],
)
def test_an_invalid_kit_is_refused(shop: AgentReleaseHarness, content: bytes, version: str, why: str) -> None:
    """The error gives the reason, and nothing is stored."""
    with pytest.raises(UsageError, match=why):
        shop.push(content, version)
    assert shop.agents.all() == []


def test_the_agents_name_is_reserved(shop: AgentReleaseHarness, tmp_path: Path) -> None:
    """No model can have it, and the agent is not listed among the models."""
    part = tmp_path / "model"
    part.write_bytes(b"")
    with pytest.raises(UsageError, match="edgectl agent push"):
        shop.registry.push(part, AGENT_MODEL)
    shop.push(archive(small_agent("0.3.0")), "0.3.0")
    assert shop.registry.all() == []
    with pytest.raises(UsageError, match="edgectl agent"):
        shop.registry.get(f"{AGENT_MODEL}@1")


def test_an_unknown_agent_version_lists_the_known_ones(shop: AgentReleaseHarness) -> None:
    """Without any version the error explains how to push one."""
    with pytest.raises(NotFound, match="agent push"):
        shop.agents.get("0.3.0")
    shop.push(archive(small_agent("0.3.0")), "0.3.0")
    with pytest.raises(NotFound, match=r"did you mean 0\.3\.0"):
        shop.agents.get("0.3.1")


def test_devices_without_a_matching_build_are_named(shop: AgentReleaseHarness) -> None:
    """By the platform in their birth message; a device without one is admitted."""
    shop.push(archive(small_agent("0.3.0")), "0.3.0")
    _, manifest = shop.release("0.3.0")
    pi, old = Device(name="pi", birth={"build_tag": PI.tag}), Device(name="old", birth=None)
    shop.agents.check_fit(manifest, [pi, old])
    with pytest.raises(Conflict, match=r"laptop \(cp312-x86_64\)"):
        shop.agents.check_fit(manifest, [pi, Device(name="laptop", birth={"build_tag": LAPTOP.tag})])


def test_agent_gates_combine_all_served_models() -> None:
    """Requests of its models are added up; of other figures the worst counts."""
    one = Evidence(model="a", release="r", requests=40, failed=1, fallbacks=0, latency_p95_s=0.1, memory_bytes=100)
    two = Evidence(model="b", release="r", requests=10, failed=0, fallbacks=2, latency_p95_s=0.3, celsius=70.0)
    found = combined("x", [one, two])
    assert (found.requests, found.failed, found.fallbacks) == (50, 1, 2)
    assert (found.latency_p95_s, found.memory_bytes, found.celsius, found.joules) == (0.3, 100, 70.0, None)
    assert combined("x", []) == Evidence(model=AGENT_MODEL, release="x")


def test_agent_gates_use_only_telemetry_of_the_running_version(shop: AgentReleaseHarness) -> None:
    """Requests under the version before count neither for nor against the new one."""
    names = ("fresh", "stale", "waits")
    with shop.database.write() as session:
        for name, at in zip(names, (200.0, 100.0, 200.0), strict=True):
            device = Device(
                name=name, device_class="pi4", group="", labels={}, link="wifi", certificate_serial="1",
                public_key_sha256="", enrolled=0.0,
            )  # fmt: skip
            session.add(device)
            session.flush()
            health = {"model": "m", "release": "r", "requests": 60, "failed": 3}
            session.add(RunningRow(device=name, model="m", health=health, health_at=at))
            session.add(RunningRow(device=name, model=AGENT_MODEL, state="trial"))
    members = [Member(name=name, stage=0, position=0, ran_at=0.0 if name == "waits" else 150.0) for name in names]
    rollout = Rollout(id=1, model=AGENT_MODEL, release="v", terms=parse_terms(RolloutRequest(), 0.0), state="running")
    with shop.database.read() as session:
        found = evidence_of_members(session, rollout, members)
    assert {name: (one.requests, one.failed) for name, one in found.items()} == {
        "fresh": (60, 3), "stale": (None, None), "waits": (None, None),
    }  # fmt: skip


def test_agent_versions_are_rows_that_releases_reference(shop: AgentReleaseHarness) -> None:
    """Each version is a row of the reserved name, numbered in the order of arrival."""
    shop.push(archive(small_agent("0.4.0")), "0.4.0")
    shop.push(archive(small_agent("0.3.0")), "0.3.0")
    with shop.database.read() as session:
        assert [(row.ref, row.shown["agent"]) for row in session.query(Model).order_by(Model.id)] == [
            ("edgesplit-agent@1", "0.4.0"), ("edgesplit-agent@2", "0.3.0"),
        ]  # fmt: skip


def test_the_signer_is_shown_the_kits_description(shop: AgentReleaseHarness) -> None:
    """Before a release key elsewhere is used, version, machine and digest of the wheels are shown."""
    content = archive(small_agent("0.3.0"))
    shop.push(content, "0.3.0")
    digest, manifest = shop.agents.prepare(shop.agents.get("0.3.0"))
    told = "\n".join(release_summary({"release": digest, "manifests": [encode_manifest(manifest).decode()]}))
    assert digest in told and "agent 0.3.0 for Python 3.11 on aarch64" in told
    assert hashlib.sha256(content).hexdigest() in told
