"""The releases at hand: opened on first use, each slice loaded once, however many rows of however many plans run it.

Trust is not decided here: whatever `open_release` returns was verified by it, and `slice_folder` verifies the files of
a slice at the moment of loading. A release that was not used for longest is let go when there are too many; requests
that still run on it keep what they need.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from edgesplit import codecs, names, oip
from edgesplit.errors import MalformedMessage, ModelRefused, NotFound
from edgesplit.plan import Row
from edgesplit.release import Manifest, TensorSpec
from edgesplit.runtime import Program, Runtime
from edgesplit.runtime.load import load_slice
from edgesplit.sealed import SliceSource

log = logging.getLogger(__name__)

MOST_RELEASES = 16
VERSION = "1"
"""The only version of each of our models: another release is another model."""


class OpenRelease(Protocol):
    """A release whose manifest is trusted: `edgesplit.releases.Release`, or a test's own."""

    @property
    def manifest(self) -> Manifest:
        """What it promises."""
        ...

    @property
    def digest(self) -> str:
        """Its name."""
        ...

    def slice_folder(self, name: str) -> SliceSource:
        """That slice's verified files: their folder, or memory where they are encrypted."""
        ...


Opener = Callable[[str], OpenRelease]
"""The release of that digest; NotFound if there is none, TrustError if it must not be believed."""


@dataclass(frozen=True)
class RemoteModel:
    """The far half of one row, as a model of its own: the row's `sends` in, its `receives` out."""

    name: str
    row: Row
    inputs: tuple[TensorSpec, ...]
    """As its slices take them: what travels is `wire_inputs`."""
    outputs: tuple[TensorSpec, ...]
    through_gateway: bool
    """Its plan knows a tier between device and cloud."""
    _shared: _Opened

    @property
    def wire_inputs(self) -> tuple[TensorSpec, ...]:
        """What a request brings, each tensor by the row's codec; each may come raw as well."""
        codec_of = self.row.codecs
        return tuple(
            one for spec in self.inputs for one in codecs.wire_specs(spec, codec_of.get(spec.name, codecs.RAW))
        )

    @property
    def served(self) -> str:
        """The model that it is a part of, as `name@version`."""
        return self._shared.release.manifest.model

    def part(self, row: Row) -> RemoteModel:
        """A half of this row, by the name under which the next tier is asked for it."""
        digest, device_class, _ = oip.parse_remote_name(self.name)
        return _as_model(oip.remote_name(digest, device_class, row.name), row, self._shared, self.through_gateway)

    def programs(self) -> Mapping[str, Program]:
        """Its slices, loaded now where they were not."""
        return self._shared.load(self.row.remote)


class _Opened:
    """One release and the programs of its slices so far."""

    def __init__(self, release: OpenRelease, runtime: Runtime) -> None:
        self.release = release
        self._runtime = runtime
        self._loading = threading.Lock()
        self._programs: dict[str, Program] = {}

    def load(self, wanted: Iterable[str]) -> Mapping[str, Program]:
        """Programs of these slices (and perhaps of others), each loaded once, by one thread at a time."""
        missing = [name for name in wanted if name not in self._programs]
        if missing:
            with self._loading:
                for name in missing:
                    if name not in self._programs:
                        log.info("loading slice %s of release %s", name, self.release.digest[:12])
                        manifest = self.release.manifest
                        folder = self.release.slice_folder
                        self._programs[name] = load_slice(manifest, manifest.slice(name), folder, self._runtime)
        return self._programs


class Shelf:
    """Models by name, from releases that are opened on first use."""

    def __init__(self, open_release: Opener, runtime: Runtime, most_releases: int = MOST_RELEASES) -> None:
        self._open_release = open_release
        self._runtime = runtime
        self._most = most_releases
        self._lock = threading.Lock()
        self._opening: dict[str, threading.Lock] = {}
        self._opened: OrderedDict[str, _Opened] = OrderedDict()

    def model(self, name: str) -> RemoteModel:
        """The model of that name (see `oip.remote_name`); NotFound if no release here has such a row."""
        try:
            digest, device_class, row_name = oip.parse_remote_name(name)
            opened = self._release(names.sha256_hex(digest))
        except MalformedMessage as error:
            raise NotFound(f"unknown model: {error}") from error
        try:
            plan = opened.release.manifest.plans[device_class]
            row = plan.row(row_name)
        except KeyError as error:
            raise NotFound(
                f"release {digest[:12]} has no row {row_name!r} for device class {device_class!r}"
            ) from error
        return _as_model(name, row, opened, plan.has_gateway)

    def model_names(self) -> list[str]:
        """Names of all models of the releases that are open."""
        with self._lock:
            opened = list(self._opened.items())
        return [
            oip.remote_name(digest, device_class, row.name)
            for digest, one in opened
            for device_class, plan in one.release.manifest.plans.items()
            for row in plan.rows
            if not row.is_local
        ]

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
                opened = _Opened(self._open_release(digest), self._runtime)
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
        with self._lock:
            self._opened[digest] = opened
            while len(self._opened) > self._most:
                gone, _ = self._opened.popitem(last=False)
                log.info("let go of release %s", gone[:12])


def _as_model(name: str, row: Row, opened: _Opened, through_gateway: bool) -> RemoteModel:
    """The row's far half; ModelRefused where this server cannot run it."""
    if row.is_local:
        raise NotFound(f"row {row.name!r} has no far half")
    if foreign := set(row.codecs.values()) - set(codecs.CODECS):
        raise ModelRefused(f"row {row.name!r} needs codecs {sorted(foreign)}, which this server does not speak")
    specs = _specs(opened.release.manifest)
    try:
        inputs = tuple(specs[tensor] for tensor in row.sends)
        outputs = tuple(specs[tensor] for tensor in row.receives)
    except KeyError as error:
        raise ModelRefused(f"row {row.name!r} names the tensor {error}, which no slice has") from error
    return RemoteModel(name, row, inputs, outputs, through_gateway, opened)


def _specs(manifest: Manifest) -> dict[str, TensorSpec]:
    """Every tensor of the release by name."""
    specs = {spec.name: spec for one in manifest.slices for spec in (*one.inputs, *one.outputs)}
    return {**specs, **{spec.name: spec for spec in (*manifest.inputs, *manifest.outputs)}}
