"""Device profiles: the performance of a class of devices, each figure with its source. YAML files in
`edgesplit_device_profiles`.

This module is the schema; docs/device-profiles.md explains it and how the shipped figures were derived. Every figure of
a loaded profile is present, positive and sourced; otherwise a UsageError describes what is wrong. Predicting run times
from the rates is in `edgesplit_partitioner.costs.predict`. YAML is read by safe_load only, and PyYAML is imported only
when a profile is read: the agent never needs it.
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
from edgesplit.msgspec_warmup import warm_up_structs
from edgesplit.runtime.options import EngineOptions
from edgesplit.runtime.providers import check_names

FORMAT = "edgesplit.device-profile/1"
NAME = re.compile(r"[a-z0-9][a-z0-9+_-]{0,62}")
"""Pattern of a profile name. No dots: names of remote models contain the device class between dots."""
MAX_BYTES = 2 << 20
"""Largest profile file. A calibrated profile holds about 900 measured points for each of its fits: 0.8 MB as JSON."""
MAX_YAML_BYTES = 512 << 10
"""Largest profile file in YAML, whose parser is slow. A calibrated profile has 0.25 MB."""
PROFILE_PACKAGE = "edgesplit_device_profiles"
"""Package that contains the shipped profiles."""

UNITS = {
    "dense_conv_flops_per_s": "flop/s", "depthwise_flops_per_s": "flop/s", "gemm_flops_per_s": "flop/s",
    "elementwise_per_s": "elements/s", "memory_bytes_per_s": "B/s", "weight_load_bytes_per_s": "B/s",
    "dense_conv_int8_flops_per_s": "op/s", "depthwise_int8_flops_per_s": "op/s", "gemm_int8_flops_per_s": "op/s",
    "jpeg_pixels_per_s": "pixels/s", "memory_bytes": "B", "operator_overhead_s": "s", "runtime_factor": "times",
    "zstd_slowdown": "times", "idle_watts": "W", "active_watts": "W",
}  # fmt: skip
"""Unit of each figure, by field name."""

Basis = Literal["measured", "published", "derived", "assumption"]
"""measured: by us, on such a device. published: by others, as cited. derived: computed from published or measured
figures by the formula given. assumption: nothing public; the source gives the reasoning."""


class Figure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A positive number and its source."""

    value: Annotated[float, msgspec.Meta(gt=0)]
    basis: Basis
    source: Annotated[str, msgspec.Meta(min_length=12)]
    """Document and table with its date; the formula where the figure is derived; the reasoning where it is assumed."""


class Interval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prediction interval: the true value lies between `low` and `high` times the predicted one."""

    low: Annotated[float, msgspec.Meta(gt=0, le=1)]
    high: Annotated[float, msgspec.Meta(ge=1)]
    coverage: Annotated[float, msgspec.Meta(gt=0, lt=1)]
    """Fraction of cases in which it does."""
    basis: Basis
    source: Annotated[str, msgspec.Meta(min_length=12)]


class OperatorFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fitted run time of one family of operators as a function of its sizes: a plane in log space plus a kernel
    correction towards measured points.

    With z = (log(size) - centre) / scale by column, log(seconds) = trend . (1, z) + sum over the points p of bends[p] *
    m(|z - z(points[p])| / width), m(d) = (1 + sqrt(3) d) exp(-sqrt(3) d) (Matern 3/2).
    """

    family: str
    """Family name, as in `edgesplit_partitioner.onnx_format.operator_features`; `class:conv` and the like are for
    operators without a family."""
    centre: tuple[float, ...]
    scale: tuple[float, ...]
    lowest: tuple[float, ...]
    """Smaller sizes are clamped to this one."""
    highest: tuple[float, ...]
    """Larger sizes are clamped to this one, and the seconds scale in proportion to the operator's work."""
    trend: tuple[float, ...]
    width: float = 1.0
    points: tuple[tuple[float, ...], ...] = ()
    """Sizes of the measured points, one tuple per point, by column."""
    bends: tuple[float, ...] = ()
    """Kernel weight of each point."""
    low: Annotated[float, msgspec.Meta(gt=0)]
    """5th percentile of measured / predicted seconds in leave-one-out cross-validation."""
    high: Annotated[float, msgspec.Meta(gt=0)]
    """95th percentile of measured / predicted seconds in leave-one-out cross-validation."""


class CalibrationFit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of `edgectl calibrate` on one machine. It contains plain numbers only and no code."""

    runtime: str
    """Engine and version, for example `onnxruntime 1.31.1`."""
    machine: str
    taken: str
    """Date of the calibration."""
    run_s: Annotated[float, msgspec.Meta(ge=0)]
    """Fixed seconds per run of a slice, in addition to its operators."""
    tensor_s: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds per input or output tensor of a slice beyond the first input and the first output."""
    correction: Annotated[float, msgspec.Meta(gt=0)]
    """Measured time of small whole networks relative to the sum over their operators; predictions are multiplied by it.
    """
    cached_bytes: Annotated[float, msgspec.Meta(ge=0)]
    """Weights beyond this size do not stay in the CPU caches between runs."""
    uncached_s_per_byte: Annotated[float, msgspec.Meta(ge=0)]
    """Additional seconds per byte of weights that is not cached."""
    whole: Interval
    """Prediction interval for whole networks and for slices of many operators."""
    operators: tuple[OperatorFit, ...]
    setup: EngineOptions | None = None
    """Engine options with which it was measured. None: written by an earlier version, which measured slices as they
    were cut (`exact`) on the profile's `threads`."""


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Throughput of each class of operator when all cores of the device work on one inference. A class without a rate
    for 8-bit integers is taken to be as fast in them as in float."""

    dense_conv_flops_per_s: Figure
    """Dense convolutions; one multiply-accumulate counts as 2."""
    depthwise_flops_per_s: Figure
    gemm_flops_per_s: Figure
    """Matrix products. A batch of one is bound by `memory_bytes_per_s` instead, through its weights."""
    elementwise_per_s: Figure
    """Simple operations, one per element."""
    memory_bytes_per_s: Figure
    """Bytes read plus bytes written."""
    weight_load_bytes_per_s: Figure
    """Reading weights from storage when a slice is loaded."""
    jpeg_pixels_per_s: Figure
    """Decoding baseline JPEG to 8-bit planes."""
    dense_conv_int8_flops_per_s: Figure | None = None
    """Dense convolutions of 8-bit integers."""
    depthwise_int8_flops_per_s: Figure | None = None
    gemm_int8_flops_per_s: Figure | None = None


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of devices. The profile's name is the device class in plans and releases."""

    format: Literal["edgesplit.device-profile/1"]
    name: str
    description: str
    threads: Annotated[int, msgspec.Meta(ge=1)]
    """Number of cores that the rates assume."""
    memory_bytes: Figure
    rates: Rates
    operator_overhead_s: Figure
    """Seconds per operator that is not fused into the preceding one."""
    runtime_factor: Figure
    """Slow-down of the runtime in use relative to the one that the rates were taken with: divides the rates of dense
    convolutions and matrix products."""
    zstd_slowdown: Figure
    """Factor by which zstd compression and decompression are slower than on the machine of `generic-x86`."""
    idle_watts: Figure
    active_watts: Figure
    """Power of the whole board while all `threads` compute."""
    providers: tuple[str, ...] = ()
    """Accelerators (onnxruntime execution providers) that such a device may have, in order of preference: names of
    `edgesplit.runtime.providers`. The figures are still the CPU's; measured times replace them."""
    host: str = ""
    """The shipped profile of the computer that an accelerator is attached to; it runs the models that the accelerator
    cannot."""
    error: Interval | None = None
    """Prediction interval of run times computed from the rates above. None: the predictions were never compared with
    measurements."""
    setup: EngineOptions | None = None
    """Engine options that the rates describe. None: slices as they were cut (`exact`), on `threads` threads."""
    fit: CalibrationFit | None = None
    """Calibration result for slices as they were cut (`exact`). Where present, run times are predicted from it, and
    from the rates only for operators that it does not cover."""
    tuned: tuple[CalibrationFit, ...] = ()
    """Calibration results for the engine options among which agents choose by measurement, fewest threads first."""

    @property
    def priced_setup(self) -> EngineOptions:
        """The engine options whose run times this profile predicts: those of its fit, otherwise of its rates."""
        stated = self.fit.setup if self.fit is not None else self.setup
        return stated or EngineOptions(threads=self.threads)

    def named_figures(self) -> dict[str, Figure]:
        """Every figure by field name, the rates first."""
        fields = {name: getattr(part, name) for part in (self.rates, self) for name in part.__struct_fields__}
        return {name: figure for name, figure in fields.items() if isinstance(figure, Figure)}

    def figure_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Every figure as a table row for display: name, value, unit, basis, source."""
        return [
            (name, _format_value(figure.value), UNITS[name], figure.basis, figure.source.strip())
            for name, figure in self.named_figures().items()
        ]


def _format_value(value: float) -> str:
    return f"{value:.4g}" if value < 1e4 else f"{value:.3e}"


def list_profiles() -> list[str]:
    """Names of the profiles that ship with edgesplit, sorted."""
    folder = resources.files(PROFILE_PACKAGE)
    return sorted(entry.name[: -len(".yaml")] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def is_path(name: str | Path) -> bool:
    """True if `name` is a path to a profile file rather than the name of a shipped profile."""
    text = str(name)
    return isinstance(name, Path) or "/" in text or text.endswith((".yaml", ".yml", ".json"))


def load_profile(name: str | Path) -> DeviceProfile:
    """Load the shipped profile called `name`, or the profile in a user's file (a path: it contains a '/' or ends with
    .yaml, .yml or .json). UsageError lists similar names, or what the file lacks."""
    text = str(name)
    if is_path(name):
        return _load_profile_file(Path(text))
    if text not in list_profiles():
        raise UsageError(_unknown_profile_message(text))
    return parse_profile(resources.files(PROFILE_PACKAGE).joinpath(f"{text}.yaml").read_text("utf-8"), f"{text}.yaml")


def parse_profile(text: str, origin: str) -> DeviceProfile:
    """Parse a profile from YAML or JSON text; `origin` names the text in errors. UsageError where it is not a valid
    profile."""
    import yaml  # only here: the agent runs without PyYAML

    if len(text) > MAX_BYTES:
        raise UsageError(f"device profile {origin}: larger than {MAX_BYTES} bytes")
    try:
        fields: Any = _parse_json(text) or _parse_yaml(text)
        profile = msgspec.convert(fields, DeviceProfile, strict=False)  # YAML 1.1 reads 24e9 as text
    except msgspec.ValidationError as error:
        raise UsageError(f"device profile {origin}: {error} (the schema is in docs/device-profiles.md)") from error
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError) as error:  # last two: 2026-13-45, !!int x
        raise UsageError(f"device profile {origin}: neither YAML nor JSON: {error}") from error
    _check_profile(profile, origin)
    return profile


def _parse_json(text: str) -> Any:
    """The text parsed as JSON, or None if it is not JSON. JSON parses a calibrated profile a hundred times faster than
    YAML."""
    try:
        return msgspec.json.decode(text) if text.lstrip().startswith("{") else None
    except (msgspec.DecodeError, UnicodeError):
        return None


_MAX_COLLECTIONS = 12_000
"""Maximum number of lists and tables in one profile: PyYAML takes up to 0.1 ms for each. A calibrated profile has about
1,300 for each of its fits: one for each measured point, and a few for each family of operators."""


def _parse_yaml(text: str) -> Any:
    """The text parsed as YAML with plain values only. Aliases are refused: a few of them can expand to any amount of
    memory."""
    import yaml

    if len(text) > MAX_YAML_BYTES:
        raise yaml.YAMLError(f"larger than {MAX_YAML_BYTES} bytes; JSON may have {MAX_BYTES}")
    if sum(text.count(opening) for opening in ("[", "{", "- ", "? ")) > _MAX_COLLECTIONS:
        raise yaml.YAMLError(f"more than {_MAX_COLLECTIONS} lists and tables: a calibrated profile has about 7,000")
    for token in yaml.scan(text) if "*" in text else ():
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError(f"aliases (*{token.value}) are not supported: repeat the value")
    return yaml.safe_load(text)


def _check_profile(profile: DeviceProfile, origin: str) -> None:
    """Constraints that the types cannot express: the form of the name, finite numbers, meaningful sources, and active
    power not below idle power. UsageError."""
    if not NAME.fullmatch(profile.name):
        raise UsageError(f"device profile {origin}: not a name: {profile.name[:80]!r} (a-z, 0-9, '+', '-', '_')")
    for name, figure in profile.named_figures().items():
        if not math.isfinite(figure.value):
            raise UsageError(f"device profile {origin}: {name} is not a finite number")
        if len(figure.source.split()) < 2:
            raise UsageError(f"device profile {origin}: {name} has no source: say where the figure comes from")
    if profile.host and (profile.host == profile.name or profile.host not in list_profiles()):
        raise UsageError(f"device profile {origin}: host {profile.host[:80]!r} is not another shipped profile")
    try:
        check_names(profile.providers)
    except UsageError as error:
        raise UsageError(f"device profile {origin}: {error}") from error
    if profile.active_watts.value < profile.idle_watts.value:
        raise UsageError(f"device profile {origin}: active_watts is below idle_watts")
    fits = [fit for fit in (profile.fit, *profile.tuned) if fit is not None]
    intervals = [interval for interval in (profile.error, *(fit.whole for fit in fits)) if interval is not None]
    if not all(math.isfinite(interval.high) for interval in intervals):
        raise UsageError(f"device profile {origin}: an interval has no end")
    for fit in fits:
        numbers = (fit.run_s, fit.tensor_s, fit.correction, fit.cached_bytes, fit.uncached_s_per_byte)
        if not all(map(math.isfinite, numbers)):
            raise UsageError(f"device profile {origin}: the fit has impossible numbers")
        for operator_fit in fit.operators:
            _check_operator_fit(operator_fit, origin)


def _check_operator_fit(fit: OperatorFit, origin: str) -> None:
    """UsageError unless all columns have one length, each point has a weight, all numbers are finite, and sizes are
    positive (their logarithm is taken)."""
    columns = len(fit.centre)
    lengths = {len(values) for values in (fit.scale, fit.lowest, fit.highest, *fit.points)} | {len(fit.trend) - 1}
    if (lengths - {columns}) or len(fit.points) != len(fit.bends):
        raise UsageError(f"device profile {origin}: the fit of {fit.family[:40]!r} is inconsistent")
    numbers = [*fit.centre, *fit.scale, *fit.lowest, *fit.highest, *fit.trend, fit.width, *fit.bends, fit.low, fit.high]
    numbers += [value for point in fit.points for value in point]
    above = [fit.width, *fit.scale, *fit.lowest, *fit.highest, *(value for point in fit.points for value in point)]
    if not all(map(math.isfinite, numbers)) or min(above) <= 0 or fit.low > fit.high:
        raise UsageError(f"device profile {origin}: the fit of {fit.family[:40]!r} has impossible numbers")


def _load_profile_file(path: Path) -> DeviceProfile:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read device profile {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"device profile {path}: not UTF-8 text") from error
    return parse_profile(text, str(path))


def _unknown_profile_message(name: str) -> str:
    known = list_profiles()
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"no device profile {name[:80]!r}; {hint} (a YAML file of your own works too: ./my-board.yaml)"


warm_up_structs(__name__)
