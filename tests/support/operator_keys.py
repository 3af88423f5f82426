"""An operator with keys of their own beside the small signed world: what `edgectl keys` does, without a network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from edgesplit.release.manifest import release_digest
from edgesplit.trust.store import TrustStore
from edgesplit_cli.signing import sign_release_list, sign_renewal, signatures_for
from edgesplit_controller.tuf.key_change import KeyChange, PublicKey
from edgesplit_controller.tuf.rotation import ExternalSignature, Rotation
from edgesplit_controller.tuf.signers import make_key_file, public_key
from support.signed_repository import TrustHarness, sample_release

OPERATIONS = ("fsync", "replace", "rename", "unlink")


class Operator:
    """Key files in a folder, and the world whose controller they are to rule."""

    def __init__(self, folder: Path) -> None:
        self.world = TrustHarness(folder)
        self.world.now = time.time()  # what is signed is compared with the clock of the operator's machine
        self.world.repository.renew()
        self.folder = folder / "operator"
        self.rotation = Rotation(self.world.repository)

    def reopened(self) -> None:
        """The controller as a new process sees it."""
        self.world.repository = self.world.reopened()
        self.rotation = Rotation(self.world.repository)

    def key(self, name: str) -> PublicKey:
        """The key of that name, made if there is none."""
        file = self.folder / f"{name}.pem"
        if not file.exists():
            self.folder.mkdir(exist_ok=True)
            make_key_file(file)
        return PublicKey.from_key(public_key(f"file2:{file}"))

    def uri(self, name: str) -> str:
        self.key(name)
        return f"file2:{self.folder / f'{name}.pem'}"

    def change(self, change: KeyChange, *signers: str) -> bool:
        """Ask for a change and sign it with these keys; does it count?"""
        return self.rotation.change(change) or (bool(signers) and self.sign(*signers, asked=change))

    def sign(self, *signers: str, asked: KeyChange | None = None) -> bool:
        """Sign the change that waits."""
        body = signatures_for(self.rotation.to_sign(), asked, [self.uri(name) for name in signers])
        given = {part: [ExternalSignature(**signature) for signature in body[part]] for part in ("root", "targets")}
        return self.rotation.add_signatures(given["root"], given["targets"])

    def offline(self, *, threshold: int = 2, release: bool = True) -> KeyChange:
        """Three root keys, and optionally the release key, outside of the controller."""
        root = tuple(self.key(f"root-{number}") for number in (1, 2, 3))
        return KeyChange(root, threshold, self.key("release") if release else None)

    def move_away(self) -> None:
        """As `edgectl keys init --release-key new` does."""
        assert self.change(self.offline(), "root-1", "root-2", "root-3", "release")

    def add(self, version: int, signer: str = "release") -> str:
        """Sign a release elsewhere and publish it; its digest."""
        raw = sample_release(version)[0]
        answer = self.prepared(raw)
        signed = sign_release_list(answer, [self.uri(signer)])
        self.world.repository.add_signed(signed.encode(), [raw])
        return str(answer["release"])

    def prepared(self, *manifests: bytes) -> dict[str, object]:
        """What the controller sends to be signed."""
        root, targets = self.world.repository.published_metadata()
        return {
            "root": root.decode(),
            "targets": targets.decode(),
            "next_targets": self.world.repository.unsigned_targets(*manifests).decode(),
            "manifests": [raw.decode() for raw in manifests],
            "release": release_digest(manifests[0]) if manifests else "",
        }

    def renew(self) -> None:
        """As `edgectl keys renew --sign-with` does."""
        signed = sign_renewal(self.prepared(), [self.uri("release")])
        self.world.repository.add_signed(signed.encode(), [])

    def device(self, name: str = "cam-1") -> TrustStore:
        """A device that has just refreshed."""
        store = self.world.store(name)
        store.refresh(self.world.fetch)
        return store

    def files(self) -> dict[str, bytes]:
        """Everything that devices can fetch."""
        folder = self.world.folder / "repository"
        return {
            str(file.relative_to(folder)): file.read_bytes()
            for part in ("metadata", "targets")
            for file in (folder / part).rglob("*.json")
        }

    def held(self) -> set[str]:
        """Names of the key files on the controller."""
        return {file.name for file in (self.world.folder / "repository" / "keys").glob("*.pem")}

    def versions(self) -> dict[str, int]:
        """Of each role, as published."""
        return {role: version for role, (version, _) in self.world.repository.store.published().expiries().items()}


def died_at(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch, stop_at: int | None) -> int:
    """Run `call`, dying before its `stop_at`-th fsync, rename or unlink; how many there were.

    A process that is dead does nothing more: every later one fails as well.
    """
    count = 0
    real = {name: getattr(os, name) for name in OPERATIONS}

    def counted(name: str) -> Callable[..., object]:
        def step(*arguments: object, **options: object) -> object:
            nonlocal count
            if stop_at is not None and count >= stop_at:
                raise KeyboardInterrupt
            count += 1
            return real[name](*arguments, **options)

        return step

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, counted(name))
        try:
            call()
        except KeyboardInterrupt:
            assert stop_at is not None
    return count
