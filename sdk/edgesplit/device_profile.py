"""Device profiles: what a kind of device can do, each figure with its source. YAML in `edgesplit_device_profiles`.

This module is the schema; docs/device-profiles.md explains it, and how the shipped figures were derived. Promises a
profile whose every figure is present, positive and sourced, or a UsageError that says what is wrong. How a time
follows from the rates is `edgesplit_partitioner.costs.predict`'s business. YAML is read by safe_load only, and PyYAML
is imported only when a profile is read: the agent never needs it.
"""

from __future__ import annotations

import difflib
import math
import re
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from edgesplit.errors import UsageError
from edgesplit.msgspec_warmup import settle
from edgesplit.runtime.providers import check_names

FORMAT = "edgesplit.device-profile/1"
NAME = re.compile(r"[a-z0-9][a-z0-9+_-]{0,62}")
"""No dots: a class name stands between dots in the names of remote models."""
MAX_BYTES = 262_144
"""A calibrated profile holds some nine hundred measured points."""
SHIPPED = "edgesplit_device_profiles"

UNITS = {
    "dense_conv_flops_per_s": "flop/s",
    "depthwise_flops_per_s": "flop/s",
    "gemm_flops_per_s": "flop/s",
    "elementwise_per_s": "elements/s",
    "memory_bytes_per_s": "B/s",
    "weight_load_bytes_per_s": "B/s",
    "jpeg_pixels_per_s": "pixels/s",
    "memory_bytes": "B",
    "operator_overhead_s": "s",
    "runtime_factor": "times",
    "zstd_slowdown": "times",
    "idle_watts": "W",
    "active_watts": "W",
}

Basis = Literal["measured", "published", "derived", "assumption"]
"""measured: by us, on such a device. published: by others, as cited. derived: computed from published or measured
figures by the formula given. assumption: nothing public; the source gives the reasoning."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A number and where it comes from."""

    value: Annotated[float, msgspec.Meta(gt=0)]
    basis: Basis
    source: Annotated[str, msgspec.Meta(min_length=12)]
    """What document and table, with its date; the formula, where it is derived; the reasoning, where it is assumed."""


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Between which factors of a prediction the truth lies."""

    low: Annotated[float, msgspec.Meta(gt=0, le=1)]
    high: Annotated[float, msgspec.Meta(ge=1)]
    coverage: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """How often it does."""
    basis: Basis
    source: Annotated[str, msgspec.Meta(min_length=12)]


class OperatorFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one family of operators over its sizes: a plane through the logarithms, bent towards measured points.

    With z = (log(size) - centre) / scale by column, log(seconds) = trend . (1, z) + sum over the points p of
    bends[p] * m(|z - z(points[p])| / width), m(d) = (1 + sqrt(3) d) exp(-sqrt(3) d) (Matern 3/2).
    """

    family: str
    """As in `edgesplit_partitioner.onnx_format.operator_features`; `class:conv` and the like serve operators without a
    family."""
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    lowest: tuple[float, ...]
    """Sizes below are taken for this one."""
    highest: tuple[float, ...]
    """Sizes beyond are taken for this one, and the seconds grow in proportion where the work does."""
    trend: tuple[float, ...]
    width: float = 1.0
    points: tuple[tuple[float, ...], ...] = ()
    """Sizes, column by column."""
    bends: tuple[float, ...] = ()
    low: Annotated[float, msgspec.Meta(gt=0)]
    """5 % of the points, each left out of the fit in turn, took less than this factor of their prediction."""
    high: Annotated[float, msgspec.Meta(gt=0)]
    """5 % took more."""


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `edgectl calibrate` found on one machine. Plain numbers; nothing in it is ever run."""

    runtime: str
    """Engine and version, as in `onnxruntime 1.31.1`."""
    machine: str
    taken: str
    """Date."""
    run_s: Annotated[float, msgspec.Meta(ge=0)]
    """Of one run of a slice, on top of its operators."""
    tensor_s: Annotated[float, msgspec.Meta(ge=0)]
    """Of each input and output of a slice beyond the first ones."""
    correction: Annotated[float, msgspec.Meta(gt=0)]
    """What small whole networks took, relative to the sum over their operators; predictions are multiplied by it."""
    cached_bytes: Annotated[float, msgspec.Meta(ge=0)]
    """Weights beyond so many do not stay in the caches from one run to the next."""
    uncached_s_per_byte: Annotated[float, msgspec.Meta(ge=0)]
    """What each byte of weights then costs more."""
    whole: Interval
    """Of whole networks and slices of many operators."""
    operators: tuple[OperatorFit, ...]


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast each class of operator runs, with all the device's cores at work on one inference."""

    dense_conv_flops_per_s: Figure
    """Dense convolutions, 2 x multiply-accumulates."""
    depthwise_flops_per_s: Figure
    gemm_flops_per_s: Figure
    """Matrix products; a batch of one is bound by `memory_bytes_per_s` instead, through its weights."""
    elementwise_per_s: Figure
    """Simple operations, one per element."""
    memory_bytes_per_s: Figure
    """Bytes read plus bytes written."""
    weight_load_bytes_per_s: Figure
    """From storage, when a slice is loaded."""
    jpeg_pixels_per_s: Figure
    """Baseline JPEG to 8-bit planes."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of device. Its name is the device class in plans and releases."""

    format: Literal["edgesplit.device-profile/1"]
    name: str
    description: str
    threads: Annotated[int, msgspec.Meta(ge=1)]
    """Cores that the rates count on."""
    memory_bytes: Figure
    rates: Rates
    operator_overhead_s: Figure
    """Per operator that is not fused into the one before it."""
    runtime_factor: Figure
    """How much slower the runtime that really runs is than the one behind the rates: divides those of dense
    convolutions and matrix products."""
    zstd_slowdown: Figure
    """Compressing and decompressing take so many times longer than on the machine of `generic-x86`."""
    idle_watts: Figure
    active_watts: Figure
    """Of the whole board, while all `threads` compute."""
    providers: tuple[str, ...] = ()
    """Accelerators of onnxruntime that such a device may have, in the order in which to try them: names of
    `edgesplit.runtime.providers`. The figures are the CPU's all the same: measured times replace them."""
    host: str = ""
    """The shipped profile of the computer that an accelerator is attached to: what runs a model that it cannot."""
    error: Interval | None = None
    """Of predictions from the rates above. Left out: nobody has compared them with anything."""
    fit: Fit | None = None
    """Seconds are predicted from it where it is there, and from the rates where it knows nothing of an operator."""

    def named_figures(self) -> dict[str, Figure]:
        """Every figure by its field's name, the rates first."""
        rates = {name: getattr(self.rates, name) for name in self.rates.__struct_fields__}
        others = {name: getattr(self, name) for name in self.__struct_fields__}
        return {**rates, **{name: figure for name, figure in others.items() if isinstance(figure, Figure)}}

    def figures(self) -> list[tuple[str, str, str, str, str]]:
        """Every figure as people read it: name, value, unit, basis, source."""
        return [
            (name, _readable(figure.value), UNITS[name], figure.basis, figure.source.strip())
            for name, figure in self.named_figures().items()
        ]


def _readable(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:.3e}"


def list_profiles() -> list[str]:
    """Names of the profiles that ship with edgesplit, sorted."""
    folder = resources.files(SHIPPED)
    return sorted(entry.name[: -len(".yaml")] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def is_path(name: str | Path) -> bool:
    """Whether it names a file and not a profile that ships."""
    text = str(name)
    return isinstance(name, Path) or "/" in text or text.endswith((".yaml", ".yml", ".json"))


def load_profile(name: str | Path) -> DeviceProfile:
    """The shipped profile of that name, or the one in a file of the user's own (a path: it has a '/' or ends with
    .yaml, .yml or .json). UsageError lists near names, or says what the file lacks."""
    text = str(name)
    if is_path(name):
        return _from_file(Path(text))
    if text not in list_profiles():
        raise UsageError(_unknown(text))
    return parse_profile(resources.files(SHIPPED).joinpath(f"{text}.yaml").read_text("utf-8"), f"{text}.yaml")


def parse_profile(text: str, origin: str) -> DeviceProfile:
    """The profile that this YAML spells; `origin` names it in errors."""
    import yaml  # only here: the agent runs without PyYAML

    if len(text) > MAX_BYTES:
        raise UsageError(f"device profile {origin}: larger than {MAX_BYTES} bytes")
    try:
        fields: Any = _json(text) or _yaml(text)
        profile = msgspec.convert(fields, DeviceProfile, strict=False)  # YAML 1.1 reads 24e9 as text
    except msgspec.ValidationError as error:
        raise UsageError(f"device profile {origin}: {error} (the schema is in docs/device-profiles.md)") from error
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError) as error:  # the last two: 2026-13-45, !!int x
        raise UsageError(f"device profile {origin}: neither YAML nor JSON: {error}") from error
    _check(profile, origin)
    return profile


def _json(text: str) -> Any:
    """What the text spells as JSON, which reads a calibrated profile's numbers a hundred times faster; else None."""
    try:
        return msgspec.json.decode(text) if text.lstrip().startswith("{") else None
    except (msgspec.DecodeError, UnicodeError):
        return None


_MOST_NESTS = 1_000
"""Lists and tables in one profile: PyYAML takes milliseconds for each."""


def _yaml(text: str) -> Any:
    """What the text spells as YAML, plain values only. No aliases: a few of them can stand for any amount of memory."""
    import yaml

    if sum(text.count(opening) for opening in ("[", "{", "- ", "? ")) > _MOST_NESTS:
        raise yaml.YAMLError(f"more than {_MOST_NESTS} lists and tables: a profile has a few dozen")
    for token in yaml.scan(text) if "*" in text else ():
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError(f"aliases (*{token.value}) are not taken: write the value again")
    return yaml.safe_load(text)


def _check(profile: DeviceProfile, origin: str) -> None:
    """What the types cannot say: the name's form, finite numbers, sources that say something, and that work costs more
    power than rest."""
    if not NAME.fullmatch(profile.name):
        raise UsageError(f"device profile {origin}: not a name: {profile.name[:80]!r} (a-z, 0-9, '+', '-', '_')")
    for name, figure in profile.named_figures().items():
        if not math.isfinite(figure.value):
            raise UsageError(f"device profile {origin}: {name} is not a finite number")
        if len(figure.source.split()) < 2:
            raise UsageError(f"device profile {origin}: {name} has no source: say where the figure comes from")
    if profile.host and (profile.host == profile.name or profile.host not in list_profiles()):
        raise UsageError(f"device profile {origin}: host {profile.host[:80]!r} is no other profile that ships")
    try:
        check_names(profile.providers)
    except UsageError as error:
        raise UsageError(f"device profile {origin}: {error}") from error
    if profile.active_watts.value < profile.idle_watts.value:
        raise UsageError(f"device profile {origin}: active_watts is below idle_watts")
    ranges = [one for one in (profile.error, profile.fit.whole if profile.fit else None) if one is not None]
    if not all(math.isfinite(one.high) for one in ranges):
        raise UsageError(f"device profile {origin}: an interval has no end")
    if profile.fit is None:
        return
    fit = profile.fit
    if not all(
        map(math.isfinite, (fit.run_s, fit.tensor_s, fit.correction, fit.cached_bytes, fit.uncached_s_per_byte))
    ):
        raise UsageError(f"device profile {origin}: the fit has numbers that cannot be")
    for one in profile.fit.operators:
        _check_fit(one, origin)


def _check_fit(one: OperatorFit, origin: str) -> None:
    """Columns of one length, points with a bend each, finite numbers only, and sizes of which there are logarithms."""
    columns = len(one.centre)
    lengths = {len(values) for values in (one.scale, one.lowest, one.highest, *one.points)} | {len(one.trend) - 1}
    if (lengths - {columns}) or len(one.points) != len(one.bends):
        raise UsageError(f"device profile {origin}: the fit of {one.family[:40]!r} does not hang together")
    numbers = [*one.centre, *one.scale, *one.lowest, *one.highest, *one.trend, one.width, *one.bends, one.low, one.high]
    numbers += [value for point in one.points for value in point]
    above = [one.width, *one.scale, *one.lowest, *one.highest, *(value for point in one.points for value in point)]
    if not all(map(math.isfinite, numbers)) or min(above) <= 0 or one.low > one.high:
        raise UsageError(f"device profile {origin}: the fit of {one.family[:40]!r} has numbers that cannot be")


def _from_file(path: Path) -> DeviceProfile:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read device profile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"device profile {path}: not UTF-8 text") from error
    return parse_profile(text, str(path))


def _unknown(name: str) -> str:
    known = list_profiles()
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"no device profile {name[:80]!r}; {hint} (a YAML file of your own works too: ./my-board.yaml)"


settle(__name__)
