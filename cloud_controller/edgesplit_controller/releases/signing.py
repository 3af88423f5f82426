"""What an operator does about keys, as plain calls: show, change, sign, renew. The audit trail of it is kept here.

Leaves to others: which metadata may follow which (`key_changes.py`), and the writing of it (`repository.py`,
`rotation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.trust.store import DIRECTOR
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database, record
from edgesplit_controller.tuf.key_change import KeyChange
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import GivenSignature, Rotation


class Tell(Protocol):
    """How devices learn that they were told something new."""

    def tell(self, devices: Collection[str]) -> None:
        """State soon what these devices shall run."""
        ...


class Signing:
    """The keys of one controller, and everybody who must follow when they change."""

    def __init__(
        self,
        repository: Repository,
        rotation: Rotation,
        database: Database,
        releasing: Releasing,
        director: Director,
        tell: Tell,
        *,
        offload_root: Path,
        now: Callable[[], float],
    ) -> None:
        self._repository = repository
        self._rotation = rotation
        self._database = database
        self._releasing = releasing
        self._director = director
        self._tell = tell
        self._offload_root = offload_root
        self._now = now

    @property
    def root_text(self) -> str:
        """The newest root: what a new device begins to trust with."""
        return self._repository.root_bytes.decode()

    @property
    def signs_releases(self) -> bool:
        """Does the release key lie here?"""
        return self._repository.signs_releases

    def releases(self) -> list[str]:
        """Digests of all signed releases."""
        return self._repository.releases()

    def to_sign(self, *raw_manifests: bytes) -> dict[str, Any]:
        """What the release key must sign for these releases, and what it is to be compared with."""
        root, targets = self._repository.published()
        return {
            "root": root.decode(),
            "targets": targets.decode(),
            "next_targets": self._repository.unsigned(*raw_manifests).decode(),
            "manifests": [raw.decode() for raw in raw_manifests],
        }

    def shown(self) -> dict[str, Any]:
        """Every role, what waits, what is due."""
        return self._rotation.shown()

    def notices(self) -> list[str]:
        """What an operator should know without having asked."""
        told: list[str] = self._rotation.shown()["notices"]
        return told

    def change(self, change: KeyChange) -> dict[str, Any]:
        """Begin a change of the keys, or go on with it."""
        subject = ",".join(change.anew) or ("root" if change.root_keys else "targets" if change.release_key else "root")
        keys = [one.keyid for one in (*change.root_keys, *([change.release_key] if change.release_key else []))]
        done = self._rotation.change(change)
        self._record("keys.change", subject, threshold=change.threshold, keys=keys)
        return self._followed(done)

    def waiting(self) -> dict[str, Any]:
        """The change that waits, as it must be signed."""
        return self._rotation.to_sign()

    def add_signatures(self, root: Sequence[GivenSignature], targets: Sequence[GivenSignature]) -> dict[str, Any]:
        """Add signatures to the change that waits."""
        done = self._rotation.add_signatures(root, targets)
        self._record("keys.sign", "root", keys=sorted({one.keyid for one in (*root, *targets)}))
        return self._followed(done)

    def drop(self) -> dict[str, Any]:
        """Give up the change that waits."""
        self._rotation.drop()
        self._record("keys.drop", "root")
        return {"dropped": True}

    def renew(self) -> dict[str, Any]:
        """Give the list of releases a later end; where its key lies elsewhere, what that must sign."""
        if not self._repository.signs_releases:
            return {"done": False, **self.to_sign()}
        self._repository.renew()
        self._record("keys.renew", "targets")
        return {"done": True}

    def renewed(self, signed: bytes) -> dict[str, Any]:
        """Publish a list of releases that has a later end, signed elsewhere."""
        self._repository.add_signed(signed, [])
        self._record("keys.renew", "targets")
        return {"done": True}

    def catch_up(self) -> None:
        """At a start: what followed the keys when the last controller was killed may be behind."""
        if not self._offload_root.is_file() or self._offload_root.read_bytes() != self._repository.root_bytes:
            self._follow()
        else:
            self._tell.tell(self._director.restate(signed_by=self._repository.delegated_keys(DIRECTOR)))

    def come_back(self) -> None:
        """At the first start after a restore: the offload server has what it had. Devices are told nothing: they may
        have been told something newer."""
        self._releasing.shelve_all()
        write_durably(self._offload_root, self._repository.root_bytes)

    def _followed(self, done: bool) -> dict[str, Any]:
        """What there is to say to whoever asked; once the keys have changed, everybody is told."""
        if not done:
            return {"done": False, **self._rotation.to_sign()}
        self._follow()
        root = self._repository.trusted_root()
        self._record("keys.changed", "root", version=root.version, keys=list(root.roles["root"].keyids))
        return {"done": True, "root": self.root_text}

    def _follow(self) -> None:
        """The offload server's folder is proved by the new root; devices hear of it with a new statement."""
        self._releasing.follow_keys()
        write_durably(self._offload_root, self._repository.root_bytes)
        self._tell.tell(self._director.restate())

    def _record(self, what: str, subject: str, /, **detail: Any) -> None:
        with self._database.write() as session:
            record(session, self._now(), "operator", what, subject, **msgspec.to_builtins(detail))
