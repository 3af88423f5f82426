"""Repository of the models in the releases at hand: opened on first use, each slice loaded once for all rows and plans.

Trust is not decided here: what `open_release` returns was verified by it, and `slice_folder` verifies a slice's files
when it is loaded. When too many releases are open, the least recently used one is closed; requests that still run on it
keep what they need.
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
from edgesplit.plan import Plan, Row
from edgesplit.release import boundary_codecs
from edgesplit.release.manifest import TensorSpec
from edgesplit.runtime import Runtime
from edgesplit_offload.models.fast_codec import FastCodec
from edgesplit_offload.models.remote_half import OpenRelease, RemoteHalf
from edgesplit_offload.models.slice_cache import SliceCache

log = logging.getLogger(__name__)

MAX_RELEASES = 16
JSON_HEAD_BYTES = 1 << 20
JSON_NUMBER_BYTES = 32
"""Most bytes of a number in JSON tensor data, spaces included."""
VERSION = "1"
"""The only version of each model: another release is another model."""

Opener = Callable[[str], OpenRelease]
"""Opens the release with a digest. NotFound if there is none, TrustError if its verification fails."""


@dataclass(frozen=True)
class RemoteModel:
    """The remote half of one row, served as a model: the row's `sends` are its inputs, its `receives` the outputs."""

    name: str
    served: str
    """The model that it is a part of, as `name@version`."""
    row: Row
    inputs: tuple[TensorSpec, ...]
    """Inputs of its slices; what a request brings is `wire_inputs`."""
    outputs: tuple[TensorSpec, ...]
    through_gateway: bool
    """Whether its plan has a tier between device and cloud."""
    half: RemoteHalf
    codec: FastCodec
    """Fast codec of its requests and answers."""
    _opened: _OpenedRelease
    is_part: bool = False
    """Whether it is only a part of a row, made by this server: no other process has a model of this name."""

    @property
    def wire_inputs(self) -> tuple[TensorSpec, ...]:
        """The tensors of a request, each as encoded by the row's codec; a raw tensor is accepted too."""
        codec_of = self.row.codecs
        return tuple(
            wire_spec
            for spec in self.inputs
            for wire_spec in boundary_codecs.wire_specs(spec, codec_of.get(spec.name, boundary_codecs.RAW))
        )

    @property
    def max_body_bytes(self) -> int | None:
        """Upper bound of a request's body in bytes, in any encoding of its tensors; None if the inputs have no fixed
        size."""
        if any(-1 in spec.shape or spec.datatype == "BYTES" for spec in self.inputs):
            return None
        return JSON_HEAD_BYTES + JSON_NUMBER_BYTES * sum(math.prod(spec.shape) for spec in self.inputs)

    def part(self, row: Row) -> RemoteModel:
        """A part of the row (its near or remote side), under the name by which the next tier serves it."""
        digest, device_class, _ = oip.parse_remote_name(self.name)
        name = oip.remote_name(digest, device_class, row.name)
        return self._opened.part(name, row, self.through_gateway)


class _OpenedRelease:
    """An open release, and the models of it that were requested so far."""

    def __init__(self, release: OpenRelease, runtime: Runtime, cache: SliceCache, wide: Runtime | None) -> None:
        self.release = release
        self._wide = wide
        self._runtime = runtime
        self._cache = cache
        self._lock = threading.Lock()
        self._models: dict[str, RemoteModel] = {}
        self._halves: dict[tuple[tuple[str, ...], ...], RemoteHalf] = {}

    def model(self, name: str, device_class: str, row_name: str) -> RemoteModel:
        """The remote half of that row; NotFound if there is none, ModelRefused if this server cannot run it."""
        with self._lock:
            if name not in self._models:
                plan = self._plan(device_class, row_name)
                self._models[name] = self._build(name, plan.row(row_name), plan.has_gateway)
            return self._models[name]

    def part(self, name: str, row: Row, through_gateway: bool) -> RemoteModel:
        """A part of a row, which the manifest does not list as a row."""
        with self._lock:
            return replace(self._build(name, row, through_gateway), is_part=True)

    def loaded(self) -> set[str]:
        """Names of the models that could run at once."""
        with self._lock:
            return {name for name, model in self._models.items() if model.half.is_loaded}

    def _plan(self, device_class: str, row_name: str) -> Plan:
        """The plan with that row. NotFound if there is none."""
        try:
            plan = self.release.manifest.plans[device_class]
            plan.row(row_name)
            return plan
        except KeyError as error:
            digest = self.release.digest[:12]
            raise NotFound(f"release {digest} has no row {row_name!r} for device class {device_class!r}") from error

    def _build(self, name: str, row: Row, through_gateway: bool) -> RemoteModel:
        if row.is_local:
            raise NotFound(f"row {row.name!r} has no remote half")
        if unknown := set(row.codecs.values()) - set(boundary_codecs.CODECS):
            raise ModelRefused(f"row {row.name!r} needs codecs {sorted(unknown)}, which this server does not support")
        try:
            specs = self.release.manifest.tensors_of(row.variant)
            inputs = tuple(specs[tensor] for tensor in row.sends)
            outputs = tuple(specs[tensor] for tensor in row.receives)
        except KeyError as error:
            raise ModelRefused(f"row {row.name!r} names the tensor {error}, which no slice has") from error
        key = (row.remote, row.sends, row.receives)
        if key not in self._halves:
            ends = (inputs, outputs)
            self._halves[key] = RemoteHalf(self.release, row.remote, ends, self._runtime, self._cache, self._wide)
        half, served = self._halves[key], self.release.manifest.model
        words = FastCodec(name, VERSION, inputs, outputs)
        return RemoteModel(name, served, row, inputs, outputs, through_gateway, half, words, self)


class ModelRepository:
    """Models by name, from releases that are opened on first use. Thread-safe."""

    def __init__(
        self,
        open_release: Opener,
        runtime: Runtime,
        cache: SliceCache | None = None,
        most_releases: int = MAX_RELEASES,
        wide: Runtime | None = None,
    ) -> None:
        """`wide`: the engine for batches with several threads."""
        self._wide = wide
        self._open_release = open_release
        self._runtime = runtime
        self._cache = cache or SliceCache()
        self._max_releases = most_releases
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._opened: OrderedDict[str, _OpenedRelease] = OrderedDict()
        self._recent: dict[str, RemoteModel] = {}
        """Models requested since the last release was opened; all of them belong to open releases."""

    def model(self, name: str) -> RemoteModel:
        """The model called `name` (see `oip.remote_name`), opening its release if needed; NotFound if no release here
        has such a row."""
        try:
            digest, device_class, row_name = oip.parse_remote_name(name)
            opened = self._release(identifiers.sha256_hex(digest))
        except MalformedMessage as error:
            raise NotFound(f"unknown model: {error}") from error
        return opened.model(name, device_class, row_name)

    def open_model(self, name: str) -> RemoteModel | None:
        """The model called `name` without blocking: None if its release is not open yet. NotFound for a name that
        cannot be a model's."""
        with self._lock:
            model_known = self._recent.get(name)
            if model_known is not None:
                self._opened.move_to_end(model_known.half.digest)
                return model_known
        try:
            digest, device_class, row_name = oip.parse_remote_name(name)
        except MalformedMessage as error:
            raise NotFound(f"unknown model: {error}") from error
        opened = self._open_release_of(digest)
        if opened is None:
            return None
        model = opened.model(name, device_class, row_name)
        with self._lock:
            if self._opened.get(digest) is opened:
                self._recent[name] = model
        return model

    def close(self, digest: str) -> None:
        """Close a release that was removed from disk, and free its memory. Requests that still run keep what they
        need."""
        with self._lock:
            closed = self._opened.pop(digest, None)
            self._recent.clear()
        if closed is not None:
            log.info("closed release %s, which was removed", digest[:12])
            self._cache.evict(digest)

    def remote_halves(self, digest: str) -> list[RemoteHalf]:
        """Every remote half of the release that this server can run. NotFound or TrustError if it cannot be opened."""
        opened = self._release(digest)
        halves: dict[str, RemoteHalf] = {}
        for device_class, plan in opened.release.manifest.plans.items():
            for row in (row for row in plan.rows if not row.is_local):
                with suppress(ModelRefused, NotFound):
                    half = opened.model(oip.remote_name(digest, device_class, row.name), device_class, row.name).half
                    halves[half.kind] = half
        return list(halves.values())

    def models(self) -> dict[str, bool]:
        """All models of the open releases, and whether each could run without loading."""
        with self._lock:
            opened = list(self._opened.items())
        names = [
            (oip.remote_name(digest, device_class, row.name), release)
            for digest, release in opened
            for device_class, plan in release.release.manifest.plans.items()
            for row in plan.rows
            if not row.is_local
        ]
        loaded = {name for _, release in opened for name in release.loaded()}
        return {name: name in loaded for name, _ in names}

    def _release(self, digest: str) -> _OpenedRelease:
        """The release, opened by one thread while others that need it wait."""
        if known := self._open_release_of(digest):
            return known
        with self._lock:
            opening = self._opening.setdefault(digest, threading.Lock())
        try:
            with opening:
                if known := self._open_release_of(digest):
                    return known
                opened = _OpenedRelease(self._open_release(digest), self._runtime, self._cache, self._wide)
                log.info("opened release %s", digest[:12])
                self._add(digest, opened)
                return opened
        finally:
            with self._lock:
                self._opening.pop(digest, None)

    def _open_release_of(self, digest: str) -> _OpenedRelease | None:
        with self._lock:
            if digest in self._opened:
                self._opened.move_to_end(digest)
            return self._opened.get(digest)

    def _add(self, digest: str, opened: _OpenedRelease) -> None:
        closed: list[str] = []
        with self._lock:
            self._opened[digest] = opened
            self._recent.clear()
            while len(self._opened) > self._max_releases:
                closed.append(self._opened.popitem(last=False)[0])
        for closed_digest in closed:
            log.info("closed release %s", closed_digest[:12])
            self._cache.evict(closed_digest)
