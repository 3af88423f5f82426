"""What a bundle needs of the controller: for devices without a network, the papers that it would fetch, its own signed
statement, and which chunks (`edgesplit.release.bundle_format`). Nothing is signed for a bundle that devices on the
network do not get: it lasts as long as its metadata does, and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import localtime, strftime
from typing import Any

from edgesplit.identifiers import ModelRef
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import FetchChunks
from edgesplit.release.agent_release import builds, is_agent
from edgesplit.release.manifest import Manifest, Signed, Statement, decode_manifest, device_slices, gateway_slices
from edgesplit_controller.errors import Conflict
from edgesplit_controller.messaging.delivery import check_wish
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Device
from edgesplit_controller.tuf.repository import Repository


@dataclass(frozen=True, slots=True)
class Offline:
    """Over the repository, the director and the chunks."""

    repository: Repository
    director: Director
    releasing: Releasing
    blobs: BlobStore
    now: Callable[[], float]

    def papers(self, devices: Sequence[Device], models: Sequence[str], valid_s: int) -> dict[str, Any]:
        """For these devices what they shall run (of `models` alone, where some are named), all but the chunks.

        Conflict where nothing is deployed to one of them, or where the papers do not last for `valid_s` more seconds.
        """
        signed = self.director.statements([device.name for device in devices])
        told = {device.name: _statement(signed.get(device.name) or b"", device.name) for device in devices}
        wanted = _wanted(devices, told, frozenset(ModelRef.parse(model).name for model in models))
        files, ends = self.repository.carried(sorted(wanted))
        ends |= {f"statement of {name}": float(statement.expires) for name, statement in told.items()}
        limit = min(ends, key=lambda role: ends[role])
        now = self.now()
        if ends[limit] - now < valid_s - 60:  # a moment ago it was signed
            until = strftime("%Y-%m-%d %H:%M", localtime(ends[limit]))
            raise Conflict(
                f"a bundle made now installs until {until} ({(ends[limit] - now) / 86_400:.1f} days): then its {limit}"
                " ends, which lasts no longer on the network either; ask for less with --valid, and make it anew then"
            )
        manifests = {release: decode_manifest(self.repository.manifest(release)) for release in wanted}
        return {
            "made": int(now),
            "valid_until": int(ends[limit]),
            "limited_by": limit,
            "files": files,
            "statements": {name: signed[name] for name in told},
            "devices": {device.name: device.device_class for device in devices},
            "releases": [
                {"release": release, "model": manifests[release].model, "chunks": _chunks(manifests[release], how)}
                for release, how in wanted.items()
            ],
        }

    def chunks(self, wish: FetchChunks) -> bytes:
        """Those chunks of a release, one after the other."""
        return b"".join(self.blobs.get(chunk) for chunk in check_wish(wish, self.releasing.chunks_of))


@dataclass(slots=True)
class _Use:
    """Who needs a release for what."""

    classes: set[str]
    kept: bool = False
    machines: set[str] = field(default_factory=set)
    """Which builds of the agent fit there; empty for one that did not say."""


def _statement(raw: bytes, device: str) -> Statement:
    if not raw:
        raise Conflict(
            f"nothing is deployed to {device}: `edgectl deploy MODEL --to {device}` first; it need not be online"
        )
    return messages.decode(messages.decode(raw, Signed).payload, Statement)


def _wanted(devices: Sequence[Device], told: Mapping[str, Statement], models: frozenset[str]) -> dict[str, _Use]:
    """Releases by digest, with whom they are for."""
    found: dict[str, _Use] = {}
    for device in devices:
        for one in told[device.name].releases:
            if not models or one.model in models:
                use = found.setdefault(one.release, _Use(set()))
                use.classes.add(device.device_class)
                use.machines.add(str((device.birth or {}).get("built_for", "")))
        for one in told[device.name].keeps:
            if not models or one.model in models:
                found.setdefault(one.release, _Use(set())).kept = True
    if models and not found:
        raise Conflict(
            f"none of these devices shall run {', '.join(sorted(models))}: `edgectl deploy` it to them first"
        )
    return found


def _chunks(manifest: Manifest, use: _Use) -> list[int]:
    """Places in the manifest's list of the chunks that are needed."""
    if is_agent(manifest):
        fitting = [one.slice.name for one in builds(manifest) if one.target.tag in use.machines or "" in use.machines]
        needed = manifest.chunks(set(fitting))
        return [place for place, sha256 in enumerate(manifest.chunk_list()) if sha256 in needed]
    plans = [manifest.plans[kind] for kind in use.classes if kind in manifest.plans]
    slices = {name for plan in plans for name in device_slices(plan, manifest)}
    slices |= gateway_slices(manifest) if use.kept else set()
    needed = {**manifest.chunks(slices), **manifest.golden_chunks()}
    return [place for place, sha256 in enumerate(manifest.chunk_list()) if sha256 in needed]
