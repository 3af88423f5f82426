"""Contents of a release bundle, for devices without a network: the TUF metadata they would fetch, their signed
statements, and the chunks they need (`edgesplit.release.bundle_format`). Nothing is signed for a bundle that devices on
the network do not receive too, so a bundle is valid as long as its metadata and no longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import localtime, strftime
from typing import Any

from edgesplit.identifiers import ModelRef
from edgesplit.mqtt import messages
from edgesplit.mqtt.messages import FetchChunks
from edgesplit.release.agent_release import agent_builds, is_agent_release
from edgesplit.release.manifest import Manifest, Signed, Statement, decode_manifest, device_slices, gateway_slices
from edgesplit_controller.errors import Conflict
from edgesplit_controller.messaging.delivery import check_chunk_request
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.releases.director import Director
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.tables.core import Device
from edgesplit_controller.tuf.repository import Repository


@dataclass(frozen=True, slots=True)
class ReleaseBundler:
    """Reads what a release bundle needs from the repository, the director and the blob store."""

    repository: Repository
    director: Director
    releasing: ReleaseBuilder
    blobs: Blobs
    now: Callable[[], float]

    def metadata_for(self, devices: Sequence[Device], models: Sequence[str], valid_s: int) -> dict[str, Any]:
        """Everything in a bundle for these devices except the chunks (for `models` alone, where some are named).

        Conflict if nothing is deployed to one of the devices, or if the metadata expires within the next `valid_s`
        seconds.
        """
        signed = self.director.statements([device.name for device in devices])
        statements = {device.name: _statement(signed.get(device.name) or b"", device.name) for device in devices}
        uses = _uses(devices, statements, frozenset(ModelRef.parse(model).name for model in models))
        files, expiries = self.repository.offline_files(sorted(uses))
        expiries |= {f"statement of {name}": float(statement.expires) for name, statement in statements.items()}
        first_to_expire = min(expiries, key=lambda role: expiries[role])
        now = self.now()
        if expiries[first_to_expire] - now < valid_s - 60:  # tolerates the minute in which it was signed
            until = strftime("%Y-%m-%d %H:%M", localtime(expiries[first_to_expire]))
            raise Conflict(
                f"a bundle made now installs until {until} ({(expiries[first_to_expire] - now) / 86_400:.1f} days):"
                f" then its {first_to_expire} ends, which lasts no longer on the network either; ask for less with"
                " --valid, and make it anew then"
            )
        manifests = {release: decode_manifest(self.repository.manifest(release)) for release in uses}
        return {
            "created": int(now),
            "valid_until": int(expiries[first_to_expire]),
            "limited_by": first_to_expire,
            "files": files,
            "statements": {name: signed[name] for name in statements},
            "devices": {device.name: device.device_class for device in devices},
            "releases": [
                {
                    "release": release,
                    "model": manifests[release].model,
                    "chunks": _needed_chunks(manifests[release], use),
                }
                for release, use in uses.items()
            ],
        }

    def chunks(self, request: FetchChunks) -> bytes:
        """The requested chunks of a release, concatenated."""
        return b"".join(self.blobs.get(chunk) for chunk in check_chunk_request(request, self.releasing.chunks_of))


@dataclass(slots=True)
class _Use:
    """Devices that need a release, by what they need of it."""

    classes: set[str]
    is_stored_by_gateway: bool = False
    """Some gateway stores it for the devices behind it."""
    platforms: set[str] = field(default_factory=set)
    """Platforms that builds of the agent must fit; an empty name for a device that did not report one."""


def _statement(raw: bytes, device: str) -> Statement:
    if not raw:
        raise Conflict(
            f"nothing is deployed to {device}: `edgectl deploy MODEL --to {device}` first; it need not be online"
        )
    return messages.decode(messages.decode(raw, Signed).payload, Statement)


def _uses(devices: Sequence[Device], statements: Mapping[str, Statement], models: frozenset[str]) -> dict[str, _Use]:
    """What the devices need of each release, by its digest. Conflict if none of them is assigned one of `models`."""
    uses: dict[str, _Use] = {}
    for device in devices:
        for wanted in statements[device.name].releases:
            if not models or wanted.model in models:
                use = uses.setdefault(wanted.release, _Use(set()))
                use.classes.add(device.device_class)
                use.platforms.add(str((device.birth or {}).get("build_tag", "")))
        for wanted in statements[device.name].gateway_releases:
            if not models or wanted.model in models:
                uses.setdefault(wanted.release, _Use(set())).is_stored_by_gateway = True
    if models and not uses:
        raise Conflict(
            f"none of these devices shall run {', '.join(sorted(models))}: `edgectl deploy` it to them first"
        )
    return uses


def _needed_chunks(manifest: Manifest, use: _Use) -> list[int]:
    """Indexes, in the manifest's chunk list, of the chunks that are needed."""
    if is_agent_release(manifest):
        fitting = [
            build.slice.name
            for build in agent_builds(manifest)
            if build.target.tag in use.platforms or "" in use.platforms
        ]
        needed = manifest.chunk_sizes(set(fitting))
        return [index for index, sha256 in enumerate(manifest.chunk_list()) if sha256 in needed]
    plans = [manifest.plans[kind] for kind in use.classes if kind in manifest.plans]
    slices = {name for plan in plans for name in device_slices(plan, manifest)}
    slices |= gateway_slices(manifest) if use.is_stored_by_gateway else set()
    needed = {**manifest.chunk_sizes(slices), **manifest.golden_chunk_sizes()}
    return [index for index, sha256 in enumerate(manifest.chunk_list()) if sha256 in needed]
