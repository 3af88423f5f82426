"""Key management as operators use it: show, change, sign, renew. Writes the audit trail of it.

Leaves to others: which metadata may follow which (`tuf.key_change`), and writing it (`tuf.repository`, `tuf.rotation`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from edgesplit.atomic_files import write_durably
from edgesplit.trust.verification import DIRECTOR
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.tuf.key_change import KeyChange
from edgesplit_controller.tuf.repository import Repository
from edgesplit_controller.tuf.rotation import ExternalSignature, Rotation


class StatementNotifier(Protocol):
    """Publishes statements to devices."""

    def publish_statements(self, devices: Collection[str]) -> None:
        """Publish the statements of these devices, soon."""
        ...


class KeyManagement:
    """The keys of one controller, and the components that must follow when they change."""

    def __init__(
        self, repository: Repository, rotation: Rotation, database: Database, releasing: ReleaseBuilder,
        director: Director, notifier: StatementNotifier, *, offload_root: Path, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._repository = repository
        self._rotation = rotation
        self._database = database
        self._releasing = releasing
        self._director = director
        self._notifier = notifier
        self._offload_root = offload_root
        self._now = now

    @property
    def root_text(self) -> str:
        """The newest root metadata, with which a new device bootstraps trust."""
        return self._repository.root_bytes.decode()

    @property
    def signs_releases(self) -> bool:
        """Whether the release key is on this controller."""
        return self._repository.signs_releases

    def releases(self) -> list[str]:
        """Digests of all releases signed with the release key."""
        return self._repository.releases()

    def to_sign(self, *raw_manifests: bytes) -> dict[str, Any]:
        """What the release key must sign for these releases, and the published metadata to compare it with."""
        root, targets = self._repository.published_metadata()
        return {
            "root": root.decode(),
            "targets": targets.decode(),
            "next_targets": self._repository.unsigned_targets(*raw_manifests).decode(),
            "manifests": [raw.decode() for raw in raw_manifests],
        }

    def view(self) -> dict[str, Any]:
        """Every role, the pending change, and what is due, as JSON."""
        return self._rotation.view()

    def notices(self) -> list[str]:
        """Warnings about keys that an operator should see without having asked."""
        notices: list[str] = self._rotation.view()["notices"]
        return notices

    def change(self, change: KeyChange) -> dict[str, Any]:
        """Begin a key change, or continue it."""
        subject = ",".join(change.anew) or ("root" if change.root_keys else "targets" if change.release_key else "root")
        keys = [key.keyid for key in (*change.root_keys, *([change.release_key] if change.release_key else []))]
        done = self._rotation.change(change)
        self._record("keys.change", subject, threshold=change.threshold, keys=keys)
        return self._change_response(done)

    def pending_change(self) -> dict[str, Any]:
        """The pending key change, as it must be signed. NotFound if there is none."""
        return self._rotation.to_sign()

    def add_signatures(self, root: Sequence[ExternalSignature], targets: Sequence[ExternalSignature]) -> dict[str, Any]:
        """Add signatures to the pending key change."""
        done = self._rotation.add_signatures(root, targets)
        self._record("keys.sign", "root", keys=sorted({signature.keyid for signature in (*root, *targets)}))
        return self._change_response(done)

    def drop_change(self) -> dict[str, Any]:
        """Abandon the pending key change."""
        self._rotation.drop()
        self._record("keys.drop", "root")
        return {"dropped": True}

    def renew(self) -> dict[str, Any]:
        """Extend the expiry of the targets metadata; if its key is elsewhere, return what must be signed."""
        if not self._repository.signs_releases:
            return {"done": False, **self.to_sign()}
        self._repository.renew()
        self._record("keys.renew", "targets")
        return {"done": True}

    def publish_renewed(self, signed: bytes) -> dict[str, Any]:
        """Publish targets metadata with a later expiry that was signed elsewhere."""
        self._repository.add_signed(signed, [])
        self._record("keys.renew", "targets")
        return {"done": True}

    def resume(self) -> None:
        """At a start: repeat the steps after a key change that a crash may have prevented."""
        if not self._offload_root.is_file() or self._offload_root.read_bytes() != self._repository.root_bytes:
            self._update_dependents()
        else:
            self._notifier.publish_statements(
                self._director.resign_all(signed_by=self._repository.delegated_keys(DIRECTOR))
            )

    def after_restore(self) -> None:
        """At the first start after a restore: complete the offload server's folder. Devices receive no statement,
        because they may have a newer one."""
        self._releasing.export_missing()
        write_durably(self._offload_root, self._repository.root_bytes)

    def _change_response(self, done: bool) -> dict[str, Any]:
        """The response to a key change; once it is complete, the components that depend on the keys are updated."""
        if not done:
            return {"done": False, **self._rotation.to_sign()}
        self._update_dependents()
        root = self._repository.store.root()
        self._record("keys.changed", "root", version=root.version, keys=list(root.roles["root"].keyids))
        return {"done": True, "root": self.root_text}

    def _update_dependents(self) -> None:
        """Rewrite the proofs in the offload server's folder under the new root, and sign new statements, by which
        devices learn of it."""
        self._releasing.refresh_proofs()
        write_durably(self._offload_root, self._repository.root_bytes)
        self._notifier.publish_statements(self._director.resign_all())

    def _record(self, what: str, subject: str, /, **detail: Any) -> None:
        with self._database.write() as session:
            record_event(session, self._now(), "operator", what, subject, **msgspec.to_builtins(detail))
