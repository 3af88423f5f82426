"""What the newest accepted statement assigns to this device: the releases that it runs or stores for the devices behind
it, which of their slices are stored, and the content keys for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from edgesplit.crypto.slice_encryption import Keys, needed_keys
from edgesplit.release.agent_release import is_agent_release
from edgesplit.release.manifest import Gateway, Manifest, Statement, device_slices, gateway_slices
from edgesplit.release.privacy_floor import PrivacyFloor
from edgesplit.trust.store import Fetch
from edgesplit_agent.releases.content_keys import ContentKeys
from edgesplit_agent.releases.loaded_release import plan_for
from edgesplit_agent.self_update.manager import VersionManager
from edgesplit_agent.state import slots
from edgesplit_agent.state.activation_store import ActivationStore
from edgesplit_agent.updates.trusted_manifests import TrustedManifests

log = logging.getLogger(__name__)


@dataclass
class Assignment:
    """The accepted statement, as far as fetching, loading and garbage collection depend on it."""

    manifests: TrustedManifests
    activation: ActivationStore
    version_manager: VersionManager
    keys: ContentKeys
    device_class: str
    floor: PrivacyFloor | None = None
    use_gateway: Callable[[Gateway | None], None] = lambda gateway: None
    """Called with each accepted statement's gateway (None: offload to the cloud)."""
    statement: Statement | None = None
    is_from_bundle: bool = False
    """Whether the statement came in a release bundle."""

    def accept(self, raw: bytes, fetch: Fetch, *, from_bundle: bool = False) -> Statement:
        """Verify the statement by fresh metadata, store it for the next start and adopt it; TrustError where it must
        not be trusted."""
        statement = self.manifests.verify_statement(raw, fetch)
        self.is_from_bundle = from_bundle
        was_in_safe_mode = self.activation.current.safe_mode is not None
        self.activation.update(slots.with_statement, raw, statement.counter)
        self.version_manager.on_statement(statement.counter)
        self._adopt(statement)
        if was_in_safe_mode and self.activation.current.safe_mode is None:
            log.warning("safe mode ends: a new statement was accepted")
        return statement

    def restore(self) -> Statement | None:
        """Adopt the statement that was stored by the last run; None where there is none that can be verified."""
        raw = self.activation.current.statement
        statement = self.manifests.verify_stored_statement(raw) if raw else None
        if statement is not None:
            self._adopt(statement)
        return statement

    def _adopt(self, statement: Statement) -> None:
        self.keys.use_statement(statement)
        self.statement = statement
        self.use_gateway(statement.gateway)

    @property
    def _own(self) -> set[str]:
        """Releases that this device shall run itself."""
        return {wanted.release for wanted in self.statement.releases} if self.statement else set()

    @property
    def _kept_for_others(self) -> set[str]:
        """Releases that this device stores for the devices behind it, as their gateway."""
        return {wanted.release for wanted in self.statement.gateway_releases} if self.statement else set()

    @property
    def wanted(self) -> set[str]:
        """All releases that the statement names."""
        return self._own | self._kept_for_others

    @property
    def protected(self) -> set[str]:
        """Releases that are never evicted: in a slot, wanted, or a version of the agent that may start again."""
        return {*self._in_slots, *self.wanted, *self.version_manager.protected}

    @property
    def _in_slots(self) -> set[str]:
        models = self.activation.current.models.values()
        return {release for model in models for release in (model.committed, model.trial)} - {""}

    def is_urgent(self, release: str) -> bool:
        """Whether the release is fetched at any hour."""
        named = (*self.statement.releases, *self.statement.gateway_releases) if self.statement else ()
        return any(wanted.fetch_now for wanted in named if wanted.release == release)

    def is_run_here(self, release: str) -> bool:
        """Whether this device runs the release itself, now or again, rather than storing it for other devices only."""
        return release in self._own or release in self._in_slots or release not in self._kept_for_others

    def slices(self, release: str, manifest: Manifest) -> set[str]:
        """Names of the slices to store: those of this device's class where the release runs here, and the gateway's
        where it is kept for others."""
        if is_agent_release(manifest):
            return self.version_manager.slices(manifest)
        own = self.own_slices(manifest) if self.is_run_here(release) else set()
        return own | (gateway_slices(manifest) if release in self._kept_for_others else set())

    def own_slices(self, manifest: Manifest) -> set[str]:
        """Names of the slices that this device's class runs."""
        return device_slices(plan_for(manifest, self.device_class, self.floor), manifest)

    def own_keys(self, release: str, manifest: Manifest) -> Keys:
        """The content keys of the slices that run here, and of the golden inputs."""
        return self.keys.for_device(release, manifest, self.own_slices(manifest))

    def gateway_keys(self, release: str, manifest: Manifest) -> Keys:
        """The content keys of what this gateway runs for others; empty where the release is not kept for others, or not
        encrypted."""
        return self.keys.for_gateway(release, manifest) if release in self._kept_for_others else {}

    def needs_gateway_keys(self, release: str, manifest: Manifest) -> bool:
        """Whether content keys must lie beside the release for the gateway's server."""
        return release in self._kept_for_others and bool(needed_keys(manifest, gateway_slices(manifest), golden=False))

    def check_usable(self, release: str, manifest: Manifest) -> None:
        """Raise now where the release cannot be used here for lack of a content key, or of a build for this machine."""
        if is_agent_release(manifest):
            self.version_manager.slices(manifest)
        elif self.is_run_here(release):
            self.own_keys(release, manifest)
        self.gateway_keys(release, manifest)
