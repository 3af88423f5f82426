"""A controller's repository and chunks, a device's own folder, and bundles between the two: no broker, no process."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgesplit.mqtt.messages import FetchChunks
from edgesplit.release.agent_release import AGENT_MODEL
from edgesplit.release.manifest import DesiredRelease, Statement, decode_manifest, release_digest
from edgesplit.release_store import open_release
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_agent.updates.bundle.command import apply_without_agent
from edgesplit_provisioning.bundle.build import BundleRequest, make_bundle
from edgesplit_provisioning.bundle.writer import open_sink
from support.agent_versions import AgentRelease
from support.signed_repository import DAY, TrustHarness, sample_release

DEVICE = "cam-1"


class BundleHarness:
    """Also the controller's API, as `make_bundle` sees it."""

    url = "https://cloud:8443"

    def __init__(self, folder: Path, name: str = "fleet") -> None:
        self.folder = folder
        self.world = TrustHarness(folder / name)
        self.manifests: dict[str, bytes] = {}
        self.chunks: dict[str, bytes] = {}
        self.statement = b""
        self.counter = 100
        self.agent = ""

    def deploy(self, version: int, device: str = DEVICE, lasts_s: float = DAY) -> str:
        """A release, and the director's word that the device shall run it."""
        raw, chunks = sample_release(version)
        digest = release_digest(raw)
        if digest not in self.manifests:
            self.world.repository.add_release(raw)
        self.manifests[digest] = raw
        self.chunks.update(chunks)
        self.counter += 1
        self.statement = self.world.repository.sign_statement(
            Statement(device=device, releases=(DesiredRelease("tiny", digest),), counter=self.counter,
                      expires=int(self.world.now + lasts_s))
        )  # fmt: skip
        self.device = device
        self.wanted = digest
        return digest

    def deploy_agent(self, made: AgentRelease, *, beside: str) -> None:
        """A release of the agent, wanted beside a model's."""
        self.world.repository.add_release(made.raw)
        self.agent = made.digest
        self.manifests[made.digest] = made.raw
        self.chunks.update(made.chunks)
        self.counter += 1
        releases = (DesiredRelease("tiny", beside), DesiredRelease(AGENT_MODEL, made.digest))
        self.statement = self.world.repository.sign_statement(
            Statement(device=self.device, releases=releases, counter=self.counter, expires=int(self.world.now + DAY))
        )

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """The papers."""
        carried = [digest for digest in (self.wanted, self.agent) if digest]
        files, ends = self.world.repository.offline_files(carried)
        manifests = {digest: decode_manifest(self.manifests[digest]) for digest in carried}
        text = {path: b64encode(raw).decode() for path, raw in files.items()}
        return {
            "created": int(self.world.now), "valid_until": int(min(ends.values())), "limited_by": "timestamp",
            "files": text, "statements": {self.device: b64encode(self.statement).decode()},
            "devices": {self.device: "pi4"},
            "releases": [{"release": one, "model": "tiny@1", "chunks": list(range(len(manifest.chunk_list())))}
                         for one, manifest in manifests.items()],
        }  # fmt: skip

    def download(self, path: str, **query: Any) -> bytes:
        """Chunks."""
        release = path.split("/")[3]
        listed = list(decode_manifest(self.manifests[release]).chunk_list())
        wish = FetchChunks(release, query["first"], bytes.fromhex(query["bitmap"]))
        return b"".join(self.chunks[listed[place]] for place in wish.indexes)

    def bundle(self, to: Path) -> Path:
        """Made as `edgectl bundle` makes it."""
        with open_sink(to) as opened:
            make_bundle(self, BundleRequest(devices=(DEVICE,)), opened, lambda done, of: None)
        return to

    def device_folder(self, name: str = DEVICE) -> tuple[DataFolder, Identity]:
        """As enrolment leaves it."""
        folder = DataFolder(self.folder / f"device-{name}")
        identity = Identity(
            device=name, device_class="pi4", broker="127.0.0.1:1", offload="", controller=self.url,
            tuf_root=self.world.bootstrap.decode(),
        )  # fmt: skip
        folder.identity.mkdir(parents=True, exist_ok=True)
        for file in (folder.certificate_file, folder.ca_file, folder.key_file):
            file.touch()
        folder.write_identity(identity)
        return folder, identity

    def apply(self, bundle: Path, **options: Any) -> str:
        """Apply a bundle to the device as `edgesplit-agent bundle apply` does where no agent runs."""
        folder, identity = self.device_folder()
        return apply_without_agent(folder, identity, bundle, now=self.world.clock, **options)

    def is_staged(self, release: str) -> bool:
        """Whether the device has that release, whole and verified."""
        folder, identity = self.device_folder()
        return open_release(folder.releases, release, identity.tuf_root.encode()).has_slices(["head", "tail"])


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
