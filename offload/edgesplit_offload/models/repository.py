"""The releases at hand: opened on first use, each slice loaded once, however many rows of however many plans run it.

Trust is not decided here: whatever `open_release` returns was verified by it, and `slice_folder` verifies the files of
a slice at the moment of loading. A release that was not used for longest is let go when there are too many; requests
that still run on it keep what they need.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from edgesplit import identifiers
from edgesplit.errors import MalformedMessage, ModelRefused, NotFound
from edgesplit.oip import protocol as oip
from edgesplit.oip.fast_codec import Words
from edgesplit.plan import Plan, Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import Manifest, TensorSpec
from edgesplit.runtime import Runtime
from edgesplit_offload.models.remote_half import FarHalf, OpenRelease
from edgesplit_offload.models.slice_cache import Memory

log = logging.getLogger(__name__)

MOST_RELEASES = 16
JSON_HEAD_BYTES = 1 << 20
JSON_NUMBER_BYTES = 32
"""What a number takes where tensors travel as JSON, spaces included."""
VERSION = "1"
"""The only version of each of our models: another release is another model."""

Opener = Callable[[str], OpenRelease]
"""The release of that digest; NotFound if there is none, TrustError if it must not be believed."""


@dataclass(frozen=True)
class RemoteModel:
    """The far half of one row, as a model of its own: the row's `sends` in, its `receives` out."""

    name: str
    served: str
    """The model that it is a part of, as `name@version`."""
    row: Row
    inputs: tuple[TensorSpec, ...]
    """As its slices take them: what travels is `wire_inputs`."""
    outputs: tuple[TensorSpec, ...]
    through_gateway: bool
    """Its plan knows a tier between device and cloud."""
    half: FarHalf
    words: Words
    """Its commonest requests and answers."""
    _opened: _Opened
    is_part: bool = False
    """Of a row, made here: no other process knows it by this name."""

    @property
    def wire_inputs(self) -> tuple[TensorSpec, ...]:
        """What a request brings, each tensor by the row's codec; each may come raw as well."""
        codec_of = self.row.codecs
        return tuple(
            one
            for spec in self.inputs
            for one in boundary_codecs.wire_specs(spec, codec_of.get(spec.name, boundary_codecs.RAW))
        )

    @property
    def most_body_bytes(self) -> int | None:
        """No request for it is longer, however its tensors are written; None where a length is known only then."""
        if any(-1 in spec.shape or spec.datatype == "BYTES" for spec in self.inputs):
            return None
        return JSON_HEAD_BYTES + JSON_NUMBER_BYTES * sum(math.prod(spec.shape) for spec in self.inputs)

    def part(self, row: Row) -> RemoteModel:
        """A half of this row, by the name under which the next tier is asked for it."""
        digest, device_class, _ = oip.parse_remote_name(self.name)
        name = oip.remote_name(digest, device_class, row.name)
        return self._opened.part(name, row, self.through_gateway)


class _Opened:
    """One release, and what of it was asked for so far."""

    def __init__(self, release: OpenRelease, runtime: Runtime, memory: Memory, wide: Runtime | None) -> None:
        self.release = release
        self._wide = wide
        self._runtime = runtime
        self._memory = memory
        self._specs = _specs(release.manifest)
        self._lock = threading.Lock()
        self._models: dict[str, RemoteModel] = {}
        self._halves: dict[tuple[tuple[str, ...], ...], FarHalf] = {}

    def model(self, name: str, device_class: str, row_name: str) -> RemoteModel:
        """That row's far half; NotFound where there is none, ModelRefused where this server cannot run it."""
        with self._lock:
            if name not in self._models:
                plan = self._plan(device_class, row_name)
                self._models[name] = self._made(name, plan.row(row_name), plan.has_gateway)
            return self._models[name]

    def part(self, name: str, row: Row, through_gateway: bool) -> RemoteModel:
        """A half of a row, which the manifest does not list as such."""
        with self._lock:
            return replace(self._made(name, row, through_gateway), is_part=True)

    def loaded(self) -> set[str]:
        """Names of the models that could run at once."""
        with self._lock:
            return {name for name, model in self._models.items() if model.half.is_loaded}

    def _plan(self, device_class: str, row_name: str) -> Plan:
        """The plan that has that row."""
        try:
            plan = self.release.manifest.plans[device_class]
            plan.row(row_name)
            return plan
        except KeyError as error:
            digest = self.release.digest[:12]
            raise NotFound(f"release {digest} has no row {row_name!r} for device class {device_class!r}") from error

    def _made(self, name: str, row: Row, through_gateway: bool) -> RemoteModel:
        if row.is_local:
            raise NotFound(f"row {row.name!r} has no far half")
        if foreign := set(row.codecs.values()) - set(boundary_codecs.CODECS):
            raise ModelRefused(f"row {row.name!r} needs codecs {sorted(foreign)}, which this server does not speak")
        try:
            inputs = tuple(self._specs[tensor] for tensor in row.sends)
            outputs = tuple(self._specs[tensor] for tensor in row.receives)
        except KeyError as error:
            raise ModelRefused(f"row {row.name!r} names the tensor {error}, which no slice has") from error
        key = (row.remote, row.sends, row.receives)
        if key not in self._halves:
            ends = (inputs, outputs)
            self._halves[key] = FarHalf(self.release, row.remote, ends, self._runtime, self._memory, self._wide)
        half, served = self._halves[key], self.release.manifest.model
        words = Words(name, VERSION, inputs, outputs)
        return RemoteModel(name, served, row, inputs, outputs, through_gateway, half, words, self)


class Shelf:
    """Models by name, from releases that are opened on first use."""

    def __init__(
        self,
        open_release: Opener,
        runtime: Runtime,
        memory: Memory | None = None,
        most_releases: int = MOST_RELEASES,
        wide: Runtime | None = None,
    ) -> None:
        """`wide`: for stacks."""
        self._wide = wide
        self._open_release = open_release
        self._runtime = runtime
        self._memory = memory or Memory()
        self._most = most_releases
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._opened: OrderedDict[str, _Opened] = OrderedDict()
        self._recent: dict[str, RemoteModel] = {}
        """Asked for since a release was opened; all of releases that are open."""

    def model(self, name: str) -> RemoteModel:
        """The model of that name (see `oip.remote_name`); NotFound if no release here has such a row."""
        try:
            digest, device_class, row_name = oip.parse_remote_name(name)
            opened = self._release(identifiers.sha256_hex(digest))
        except MalformedMessage as error:
            raise NotFound(f"unknown model: {error}") from error
        return opened.model(name, device_class, row_name)

    def known(self, name: str) -> RemoteModel | None:
        """The same without waiting: None where its release is not open yet."""
        with self._lock:
            found = self._recent.get(name)
            if found is not None:
                self._opened.move_to_end(found.half.digest)
                return found
        try:
            digest, device_class, row_name = oip.parse_remote_name(name)
        except MalformedMessage as error:
            raise NotFound(f"unknown model: {error}") from error
        opened = self._known(digest)
        if opened is None:
            return None
        model = opened.model(name, device_class, row_name)
        with self._lock:
            if self._opened.get(digest) is opened:
                self._recent[name] = model
        return model

    def halves(self, digest: str) -> list[FarHalf]:
        """Every far half of that release that this server can run; NotFound, TrustError, as for a model of it."""
        opened = self._release(digest)
        halves: dict[str, FarHalf] = {}
        for device_class, plan in opened.release.manifest.plans.items():
            for row in (row for row in plan.rows if not row.is_local):
                with suppress(ModelRefused, NotFound):
                    half = opened.model(oip.remote_name(digest, device_class, row.name), device_class, row.name).half
                    halves[half.kind] = half
        return list(halves.values())

    def models(self) -> dict[str, bool]:
        """All models of the releases that are open, and which of them could run without loading anything."""
        with self._lock:
            opened = list(self._opened.items())
        every = [
            (oip.remote_name(digest, device_class, row.name), one)
            for digest, one in opened
            for device_class, plan in one.release.manifest.plans.items()
            for row in plan.rows
            if not row.is_local
        ]
        loaded = {name for _, one in opened for name in one.loaded()}
        return {name: name in loaded for name, _ in every}

    def _release(self, digest: str) -> _Opened:
        """The release, opened by one thread while others that want it wait."""
        if found := self._known(digest):
            return found
        with self._lock:
            opening = self._opening.setdefault(digest, threading.Lock())
        try:
            with opening:
                if found := self._known(digest):
                    return found
                opened = _Opened(self._open_release(digest), self._runtime, self._memory, self._wide)
                log.info("opened release %s", digest[:12])
                self._keep(digest, opened)
                return opened
        finally:
            with self._lock:
                self._opening.pop(digest, None)

    def _known(self, digest: str) -> _Opened | None:
        with self._lock:
            if digest in self._opened:
                self._opened.move_to_end(digest)
            return self._opened.get(digest)

    def _keep(self, digest: str, opened: _Opened) -> None:
        gone: list[str] = []
        with self._lock:
            self._opened[digest] = opened
            self._recent.clear()
            while len(self._opened) > self._most:
                gone.append(self._opened.popitem(last=False)[0])
        for one in gone:
            log.info("let go of release %s", one[:12])
            self._memory.let_go(one)


def _specs(manifest: Manifest) -> dict[str, TensorSpec]:
    """Every tensor of the release by name."""
    specs = {spec.name: spec for one in manifest.slices for spec in (*one.inputs, *one.outputs)}
    return {**specs, **{spec.name: spec for spec in (*manifest.inputs, *manifest.outputs)}}
