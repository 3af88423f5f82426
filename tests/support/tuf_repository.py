"""A TUF repository that may misbehave, behind a real mosquitto, and the agent's own client before it, for tests.

The repository answers `fetch` messages on the controller's side of the broker; the client is the agent's
`MetadataFetcher` and the SDK's `TrustStore` over an MQTT session, as on a device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner, Signer
from tuf.api.metadata import DelegatedRole, Delegations, Metadata, MetaFile, Root, Snapshot, TargetFile, Targets
from tuf.api.metadata import Timestamp as TimestampRole

from edgesplit.errors import EdgeError, TrustError
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import FetchMetadata, decode, encode, topic
from edgesplit.release import manifest as release
from edgesplit.release.manifest import Statement
from edgesplit.trust.store import TrustStore
from edgesplit.trust.verification import DIRECTOR, TARGETS_FILE, target_path
from edgesplit_agent.control.fetcher import REQUEST_TIMEOUTS_S as ROUNDS_S
from edgesplit_agent.control.fetcher import MetadataFetcher
from edgesplit_controller.messaging.delivery import pieces
from support.mosquitto import PATIENCE_S, BrokerHarness
from support.signed_repository import DAY, START, sample_release

DEVICE = "cam-1"
TOP = ("root", "targets", "snapshot", "timestamp")
Role = Root | Targets | Snapshot | TimestampRole
Answer = Callable[[FetchMetadata], Iterable[messages.FetchReply] | None]


class Simulator:
    """A repository of four roles and a director. What it serves is in `files`, by path; a test may spoil all of it."""

    def __init__(self) -> None:
        self.now = START
        self.signers: dict[str, list[Signer]] = {role: [new_key()] for role in (*TOP, DIRECTOR)}
        self.root = Root(expires=self.after(3650), consistent_snapshot=True)
        for role in TOP:
            self.root.add_key(self.signers[role][0].public_key, role)
        key = self.signers[DIRECTOR][0].public_key
        director = DelegatedRole(DIRECTOR, [key.keyid], 1, terminating=False, paths=["director/*"])
        self.targets = Targets(expires=self.after(365), delegations=Delegations({key.keyid: key}, {DIRECTOR: director}))
        self.snapshot = Snapshot(expires=self.after(90), meta={TARGETS_FILE: MetaFile(1)})
        self.timestamp = TimestampRole(expires=self.after(7), snapshot_meta=MetaFile(1))
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.answer: Answer | None = None
        """What to say instead; None from it is silence."""
        self.put("root")
        self.link()

    def after(self, days: float) -> datetime:
        """So many days from now, by this world's clock."""
        return datetime.fromtimestamp(self.now + days * DAY, timezone.utc)

    def clock(self) -> float:
        return self.now

    def role(self, name: str) -> Role:
        """The role's metadata as it will be signed next."""
        found: Role = getattr(self, name)
        return found

    def signed(self, name: str, signers: Iterable[Signer] | None = None, *, of: Role | None = None) -> bytes:
        """The role's metadata, signed by these or by the role's own keys."""
        metadata: Metadata[Any] = Metadata(of if of is not None else self.role(name))
        for signer in self.signers[name] if signers is None else signers:
            metadata.sign(signer, append=True)
        return metadata.to_bytes()

    def path(self, name: str, version: int | None = None) -> str:
        """Where that role's file is asked for."""
        number = self.role(name).version if version is None else version
        return "metadata/timestamp.json" if name == "timestamp" else f"metadata/{number}.{name}.json"

    def put(self, name: str, signers: Iterable[Signer] | None = None) -> bytes:
        """Serve the role as it is now."""
        raw = self.signed(name, signers)
        self.files[self.path(name)] = raw
        return raw

    def link(self) -> None:
        """Serve targets, snapshot and timestamp, each naming the one before by version, length and hash."""
        self.snapshot.meta[TARGETS_FILE] = MetaFile.from_data(self.targets.version, self.put("targets"), ["sha256"])
        self.timestamp.snapshot_meta = MetaFile.from_data(self.snapshot.version, self.put("snapshot"), ["sha256"])
        self.put("timestamp")

    def publish(self, *names: str) -> None:
        """New versions of these roles (all but root, where none is named), and the links between them."""
        for name in names or ("targets", "snapshot", "timestamp"):
            self.role(name).version += 1
        self.link()

    def publish_root(self, *also: list[Signer]) -> None:
        """The next root, signed by its keys and by further ones (of the root before)."""
        self.root.version += 1
        extra = [signer for signers in also for signer in signers]
        self.put("root", {signer.public_key.keyid: signer for signer in [*self.signers["root"], *extra]}.values())

    def rotate(self, *names: str) -> None:
        """New keys for these roles, in a new root."""
        old_root = list(self.signers["root"])
        for name in names:
            for signer in self.signers[name]:
                self.root.revoke_key(signer.public_key.keyid, name)
            self.signers[name] = [new_key()]
            self.root.add_key(self.signers[name][0].public_key, name)
        self.publish_root(old_root)

    def add(self, version: int = 1) -> str:
        """A release more in the targets (not published yet); its digest."""
        raw = sample_release(version)[0]
        digest = release.release_digest(raw)
        self.targets.targets[target_path(digest)] = TargetFile.from_data(target_path(digest), raw, ["sha256"])
        self.files[f"targets/{target_path(digest)}"] = raw
        return digest

    def statement(self, counter: int, signers: Iterable[Signer] | None = None, device: str = DEVICE) -> bytes:
        """The director's word."""
        payload = encode(Statement(device=device, releases=(), counter=counter, expires=int(self.now + DAY)))
        made = [signer.sign(payload) for signer in (self.signers[DIRECTOR] if signers is None else signers)]
        return encode(release.Signed(payload, tuple(release.Signature(one.keyid, one.signature) for one in made)))

    def said(self, wish: FetchMetadata) -> Iterable[messages.FetchReply]:
        """The answer to one request."""
        self.asked.append(wish.path)
        if self.answer is not None:
            return self.answer(wish) or ()
        return pieces(wish.path, self.files.get(wish.path))


def new_key() -> CryptoSigner:
    """A fresh Ed25519 key."""
    return CryptoSigner.generate_ed25519()


class Case:
    """One test's repository, and one device that trusts its first root."""

    def __init__(self, folder: Path, simulator: Simulator, fetcher: MetadataFetcher) -> None:
        self.sim = simulator
        self.folder = folder / "trust"
        self.bootstrap = simulator.files["metadata/1.root.json"]
        self.fetcher = fetcher
        self.store = self.restarted()

    def restarted(self) -> TrustStore:
        """The store as a new process of the device makes it."""
        self.store = TrustStore(self.folder, self.bootstrap, now=self.sim.clock)
        return self.store

    def refresh(self) -> dict[str, int]:
        """Refresh over MQTT; the versions that are trusted then."""
        self.store.refresh(self.fetcher.fetch)
        return self.versions()

    def versions(self) -> dict[str, int]:
        """The versions in the device's own durable record, by role."""
        file = self.folder / "counters.json"
        return {k: v["version"] for k, v in json.loads(file.read_bytes())["roles"].items()} if file.exists() else {}

    def refused(self, why: str, error: type[EdgeError] = TrustError) -> None:
        """A refresh is refused for that reason, and everything believed before is believed still, nothing more."""
        before = self.versions(), self.proof()
        with pytest.raises(error, match=why):
            self.store.refresh(self.fetcher.fetch)
        assert (self.versions(), self.proof()) == before

    def proof(self) -> dict[str, bytes] | None:
        """What proves releases offline; None before the first refresh."""
        try:
            return self.store.proof()
        except EdgeError:
            return None

    def manifest(self, digest: str) -> bytes:
        """A manifest over MQTT."""
        return self.store.manifest(digest, self.fetcher.fetch)


class TufHarness:
    """One broker, the controller's session that a simulator answers on, and a device's session."""

    def __init__(self, folder: Path) -> None:
        self._broker = BrokerHarness(folder)
        self._broker.broker.start()
        self.simulator = Simulator()
        self._controller = self._broker.controller()
        self._controller.session._callbacks = (self._asked, None, None)
        subscribed = threading.Event()
        self._controller.session._client.on_subscribe = lambda *_: subscribed.set()
        self._controller.session.subscribe([topic("+", "fetch")])
        assert subscribed.wait(PATIENCE_S)
        self._device = self._broker.device(DEVICE, topic(DEVICE, "fetch_reply"))

    def _asked(self, name: str, payload: bytes, correlation: bytes | None) -> None:
        for piece in self.simulator.said(decode(payload, FetchMetadata)):
            self._controller.session.publish(
                name.replace("/fetch", "/fetch_reply"), encode(piece), correlation=correlation
            )

    def case(self, folder: Path, rounds_s: tuple[float, ...] = ROUNDS_S) -> Case:
        """A fresh repository and a fresh device, on the same connections."""
        self.simulator = Simulator()
        fetcher = MetadataFetcher(self._device.session, DEVICE, rounds_s)
        self._device.session._callbacks = (lambda _, payload, tag: fetcher.on_message(payload, tag), None, None)
        return Case(folder, self.simulator, fetcher)

    def close(self) -> None:
        self._broker.close()
