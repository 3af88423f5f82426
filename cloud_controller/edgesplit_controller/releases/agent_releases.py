"""Releases of the agent itself: wheels of installation kits, one build per kind of machine, and the release made of
them.

A version is stored as a model of the reserved name `AGENT`, so that releases, deployments and rollouts work for it as
for models. Archives are cut into chunks at the boundaries of wheels, so a device that has a wheel from the previous
version does not receive it again. Only the release key signs an agent release.
"""

from __future__ import annotations

import hashlib
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from edgesplit.errors import NotFound, UsageError
from edgesplit.file_hash import file_sha256
from edgesplit.limits import LIMITS
from edgesplit.release.agent_release import AGENT_MODEL, WHEELS_FILE, Target, agent_builds, build_name, public_version
from edgesplit.release.manifest import Chunk, Manifest, Slice, SliceFile
from edgesplit_controller.errors import Conflict, not_found
from edgesplit_controller.model_registry.registry import next_model_version
from edgesplit_controller.releases.build import ReleaseBuilder
from edgesplit_controller.storage.blob_interface import Blobs
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Device, Model

MOST_WHEELS = 200
"""Wheels in one archive, at most."""


class AgentReleases:
    """The agent's versions in one database."""

    def __init__(
        self, database: Database, blobs: Blobs, releasing: ReleaseBuilder, *, now: Callable[[], float]
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._releasing = releasing
        self._now = now

    def push(self, part: Path, version: str, target: Target, extras: Sequence[str] = ()) -> dict[str, Any]:
        """Heavy (run in the job queue). Store the wheels at `part` (which is removed) as that version's build for
        `target`.

        Pushing the same wheels again changes nothing; Conflict for others, because a version is immutable.
        """
        try:
            name = build_name(version, target)
            pieces = list(chunk_runs(part, version))
            chunks = tuple(self._store_chunk(part, offset, size) for offset, size in pieces)
            whole = file_sha256(part)
        finally:
            part.unlink(missing_ok=True)
        file_ = SliceFile(WHEELS_FILE, sum(chunk.bytes for chunk in chunks), whole, chunks)
        build = self._blobs.put(msgspec.json.encode(Slice(name, "agent", (), (), (), (file_,))))
        build_view = {
            "python": target.python, "machine": target.machine, "extras": sorted(extras), "bytes": file_.bytes,
            "sha256": whole, "build": build,
        }  # fmt: skip
        with self._database.write() as session:
            model = _find_version(session, version) or _add_version(session, version, self._now())
            platform = (build_view["python"], build_view["machine"])
            existing = [build for build in model.shown["builds"] if (build["python"], build["machine"]) == platform]
            if existing and existing[0]["sha256"] != whole:
                raise Conflict(
                    f"agent {version} for {target} exists already, with other wheels: a version is immutable,"
                    " so give this one another number"
                )
            if not existing:
                model.shown = {**model.shown, "builds": [*model.shown["builds"], build_view]}
                model.bytes += file_.bytes
                record_event(session, self._now(), "operator", "agent.pushed", version, build=name, sha256=whole)
            session.flush()
            return {**agent_view(model), "created": not existing}

    def all(self) -> list[dict[str, Any]]:
        """Every version, the oldest first, with the number of devices that run it."""
        with self._database.read() as session:
            rows = session.scalars(select(Model).where(Model.name == AGENT_MODEL).order_by(Model.version)).all()
            running_version = Device.birth["agent_version"].as_string()
            query = select(running_version, func.count()).where(Device.revoked.is_(None)).group_by(running_version)
            devices = Counter[str]()
            for version, count in session.execute(query):
                devices[public_version(version or "")] += count
        return [{**agent_view(row), "devices": devices[row.shown["agent"]]} for row in rows]

    def get(self, version: str) -> Model:
        """The version's model row; NotFound lists near matches."""
        with self._database.read() as session:
            model = _find_version(session, version)
            if model is None:
                known = session.scalars(select(Model).where(Model.name == AGENT_MODEL)).all()
                if not known:
                    raise NotFound("no version of the agent is registered yet: `edgectl agent push` registers its kit")
                raise not_found("version of the agent", version, (row.shown["agent"] for row in known))
            return model

    def prepare(self, model: Model) -> tuple[str, Manifest]:
        """Digest and manifest of that version's release, to be signed. The same builds give the same release."""
        slices = tuple(
            msgspec.json.decode(self._blobs.get(entry["build"]), type=Slice)
            for entry in sorted(model.shown["builds"], key=lambda entry: (entry["python"], entry["machine"]))
        )
        digest_of_all = hashlib.sha256(
            "".join(file.sha256 for entry in slices for file in entry.files).encode()
        ).hexdigest()
        manifest = Manifest(
            model=model.ref, model_sha256=digest_of_all, created="", input_spec=None, inputs=(), outputs=(),
            slices=slices, plans={},
        )  # fmt: skip
        agent_builds(manifest)
        return self._releasing.prepare_stored(model, manifest)

    def check_fit(self, manifest: Manifest, devices: Sequence[Device]) -> None:
        """Raise Conflict naming devices that reported a platform for which the release has no build. Devices that
        reported none are accepted."""
        fitting = {build.target.tag for build in agent_builds(manifest)}
        reported = {device.name: str((device.birth or {}).get("build_tag", "")) for device in devices}
        unfit = sorted(f"{name} ({tag})" for name, tag in reported.items() if tag and tag not in fitting)
        if unfit:
            raise Conflict(
                f"agent {agent_builds(manifest)[0].version} has no build for {', '.join(unfit[:8])}"
                f"{' and others' if len(unfit) > 8 else ''}: push one for that Python and machine, or choose others"
            )

    def _store_chunk(self, part: Path, offset: int, size: int) -> Chunk:
        with part.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        return Chunk(self._blobs.put(data), len(data))


def agent_view(model: Model) -> dict[str, Any]:
    """A version as JSON."""
    builds_ = [{key: value for key, value in build.items() if key != "build"} for build in model.shown["builds"]]
    return {"version": model.shown["agent"], "model": model.ref, "builds": builds_, "created_at": model.created}


def chunk_runs(archive: Path, version: str) -> Iterator[tuple[int, int]]:
    """Chunk boundaries of an archive of wheels: (offset, bytes) of each chunk, which together are the whole archive.

    A wheel's bytes begin and end at a boundary, so they give the same chunks in every archive. UsageError if the file
    is no archive of wheels, or has no wheel of edgesplit itself of that version.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members = tar.getmembers()
    except tarfile.TarError as error:
        raise UsageError(f"the wheels are no tar archive: {error}") from error
    for member in members:
        if not member.isreg() or not re.fullmatch(r"(?:[^/]+/)?[A-Za-z0-9][^/]*\.whl", member.name):
            raise UsageError(f"{member.name[:80]!r} in the archive of wheels is no wheel")
    if len(members) > MOST_WHEELS:
        raise UsageError(f"{len(members)} wheels, at most {MOST_WHEELS}")
    names = [member.name.rpartition("/")[2] for member in members]
    if not any(name.startswith((f"edgesplit-{version}-", f"edgesplit-{version}+")) for name in names):
        raise UsageError(f"the archive has no wheel of edgesplit {version}: is it the kit of another version?")
    boundaries = {offset for member in members for offset in (member.offset_data, member.offset_data + member.size)}
    for begin, end in pairwise(sorted({0, archive.stat().st_size, *boundaries})):
        for offset in range(begin, end, LIMITS.chunk_bytes):
            yield offset, min(LIMITS.chunk_bytes, end - offset)


def _find_version(session: Session, version: str) -> Model | None:
    rows = session.scalars(select(Model).where(Model.name == AGENT_MODEL)).all()
    return next((row for row in rows if row.shown["agent"] == version), None)


def _add_version(session: Session, version: str, now: float) -> Model:
    model = Model(
        name=AGENT_MODEL, version=next_model_version(session, AGENT_MODEL), sha256="", optimised_sha256="", bytes=0,
        input_text="", bindings={}, shown={"agent": version, "builds": []}, created=now,
    )  # fmt: skip
    session.add(model)
    session.flush()
    return model
