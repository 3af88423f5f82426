"""Versions of the agent: kits' wheels taken in, one build for each kind of machine, and the release that they make.

A version is kept as a model of the reserved name, so that releases, deployments and rollouts are what they are for
models. Wheels are cut into chunks where one ends and the next begins: a device that has a wheel already, from the
version before, is not sent it again. Only the release key signs one.
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
from edgesplit.limits import LIMITS
from edgesplit.release.agent_release import AGENT, WHEELS_FILE, Target, build_name, builds, released
from edgesplit.release.manifest import Chunk, Manifest, Slice, SliceFile
from edgesplit_controller.errors import Conflict, unknown
from edgesplit_controller.releases.build import Releasing
from edgesplit_controller.storage.blobs import BlobStore
from edgesplit_controller.storage.database import Database, Device, Model, record

WHEELS = 200


class AgentReleases:
    """The agent's versions in one database."""

    def __init__(self, database: Database, blobs: BlobStore, releasing: Releasing, *, now: Callable[[], float]) -> None:
        self._database = database
        self._blobs = blobs
        self._releasing = releasing
        self._now = now

    def push(self, part: Path, version: str, target: Target, extras: Sequence[str] = ()) -> dict[str, Any]:
        """Heavy. Keep the wheels at `part` (it is removed) as that version's build for `target`.

        The same wheels again change nothing; Conflict for others, for a version is never changed.
        """
        try:
            name = build_name(version, target)
            pieces = list(runs(part, version))
            chunks = tuple(self._keep(part, offset, size) for offset, size in pieces)
            with part.open("rb") as file:
                whole = hashlib.file_digest(file, "sha256").hexdigest()
        finally:
            part.unlink(missing_ok=True)
        file_ = SliceFile(WHEELS_FILE, sum(one.bytes for one in chunks), whole, chunks)
        build = self._blobs.put(msgspec.json.encode(Slice(name, "agent", (), (), (), (file_,))))
        told = {
            "python": target.python, "machine": target.machine, "extras": sorted(extras), "bytes": file_.bytes,
            "sha256": whole, "build": build,
        }  # fmt: skip
        with self._database.write() as session:
            model = _of(session, version) or _new(session, version, self._now())
            same = (told["python"], told["machine"])
            there = [one for one in model.shown["builds"] if (one["python"], one["machine"]) == same]
            if there and there[0]["sha256"] != whole:
                raise Conflict(
                    f"agent {version} for {target} is here already, with other wheels: a version is never changed,"
                    " so give this one another number"
                )
            if not there:
                model.shown = {**model.shown, "builds": [*model.shown["builds"], told]}
                model.bytes += file_.bytes
                record(session, self._now(), "operator", "agent.pushed", version, build=name, sha256=whole)
            session.flush()
            return {**shown_agent(model), "created": not there}

    def all(self) -> list[dict[str, Any]]:
        """Every version, the oldest first, and how many devices run it."""
        with self._database.read() as session:
            rows = session.scalars(select(Model).where(Model.name == AGENT).order_by(Model.version)).all()
            counted = Device.birth["version"].as_string()
            alive = select(counted, func.count()).where(Device.revoked.is_(None)).group_by(counted)
            devices = Counter[str]()
            for version, count in session.execute(alive):
                devices[released(version or "")] += count
        return [{**shown_agent(row), "devices": devices[row.shown["agent"]]} for row in rows]

    def get(self, version: str) -> Model:
        """The version, with near matches in the error."""
        with self._database.read() as session:
            found = _of(session, version)
            if found is None:
                known = session.scalars(select(Model).where(Model.name == AGENT)).all()
                if not known:
                    raise NotFound("no version of the agent is here yet: `edgectl agent push` takes a kit of it")
                raise unknown("version of the agent", version, (row.shown["agent"] for row in known))
            return found

    def prepare(self, model: Model) -> tuple[str, Manifest]:
        """The release of that version as it is to be signed: the same builds are the same release."""
        slices = tuple(
            msgspec.json.decode(self._blobs.get(one["build"]), type=Slice)
            for one in sorted(model.shown["builds"], key=lambda one: (one["python"], one["machine"]))
        )
        whole = hashlib.sha256("".join(file.sha256 for one in slices for file in one.files).encode()).hexdigest()
        made = Manifest(
            model=model.ref, model_sha256=whole, created="", input_spec=None, inputs=(), outputs=(), slices=slices,
            plans={},
        )  # fmt: skip
        builds(made)
        return self._releasing.take(model, made)

    def check_fit(self, manifest: Manifest, devices: Sequence[Device]) -> None:
        """Conflict that names devices which said that no build of the release fits them. Who said nothing may come."""
        fitting = {one.target.tag for one in builds(manifest)}
        said = {device.name: str((device.birth or {}).get("built_for", "")) for device in devices}
        wrong = sorted(f"{name} ({tag})" for name, tag in said.items() if tag and tag not in fitting)
        if wrong:
            raise Conflict(
                f"agent {builds(manifest)[0].version} has no build for {', '.join(wrong[:8])}"
                f"{' and others' if len(wrong) > 8 else ''}: push one for that Python and machine, or choose others"
            )

    def _keep(self, part: Path, offset: int, size: int) -> Chunk:
        with part.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        return Chunk(self._blobs.put(data), len(data))


def shown_agent(model: Model) -> dict[str, Any]:
    """A version, for people."""
    builds_ = [{key: value for key, value in one.items() if key != "build"} for one in model.shown["builds"]]
    return {"version": model.shown["agent"], "model": model.ref, "builds": builds_, "created_at": model.created}


def runs(archive: Path, version: str) -> Iterator[tuple[int, int]]:
    """Where the archive of wheels is cut: (offset, bytes) of each chunk, which together are the whole.

    A wheel's bytes begin and end at a cut, so they are the same chunks in every archive. UsageError where it is no
    archive of wheels, or has none of edgesplit itself of that version.
    """
    try:
        with tarfile.open(archive, "r:") as tar:
            members = tar.getmembers()
    except tarfile.TarError as error:
        raise UsageError(f"the wheels are no tar archive: {error}") from error
    for one in members:
        if not one.isreg() or not re.fullmatch(r"(?:[^/]+/)?[A-Za-z0-9][^/]*\.whl", one.name):
            raise UsageError(f"{one.name[:80]!r} in the archive of wheels is no wheel")
    if len(members) > WHEELS:
        raise UsageError(f"{len(members)} wheels, at most {WHEELS}")
    names = [one.name.rpartition("/")[2] for one in members]
    if not any(name.startswith((f"edgesplit-{version}-", f"edgesplit-{version}+")) for name in names):
        raise UsageError(f"the archive has no wheel of edgesplit {version}: is it the kit of another version?")
    edges = {at for one in members for at in (one.offset_data, one.offset_data + one.size)}
    for begin, end in pairwise(sorted({0, archive.stat().st_size, *edges})):
        for at in range(begin, end, LIMITS.chunk_bytes):
            yield at, min(LIMITS.chunk_bytes, end - at)


def _of(session: Session, version: str) -> Model | None:
    rows = session.scalars(select(Model).where(Model.name == AGENT)).all()
    return next((row for row in rows if row.shown["agent"] == version), None)


def _new(session: Session, version: str, now: float) -> Model:
    newest = session.scalar(select(func.max(Model.version)).where(Model.name == AGENT)) or 0
    model = Model(
        name=AGENT, version=newest + 1, sha256="", optimised_sha256="", bytes=0, input_text="", bindings={},
        shown={"agent": version, "builds": []}, created=now,
    )  # fmt: skip
    session.add(model)
    session.flush()
    return model
