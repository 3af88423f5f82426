"""The demo's result per device: from the recorded requests to JSON and to a table. No I/O."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import pairwise
from statistics import fmean
from typing import Any

from edgesplit import __version__
from edgesplit.quantities import format_size
from edgesplit_cli.demo.application import RequestLog, Sample
from edgesplit_cli.demo.scenario import DemoDevice, Event
from edgesplit_cli.output import ms, table

VERSIONS_OF = ("onnxruntime", "numpy", "tuf", "paho-mqtt", "pillow")


def quantile(values: list[float], fraction: float) -> float | None:
    """The value below which a fraction `fraction` of the values lie (nearest rank); None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


def cuts_over_time(samples: list[Sample]) -> list[dict[str, Any]]:
    """Each change of the row in use, with its time. Races are left out: the row does not change, whichever side answers
    first."""
    history: list[dict[str, Any]] = []
    for sample in samples:
        if not history or (history[-1]["row"] != sample.row and not sample.raced):
            history.append({"at_s": round(sample.at_s, 2), "row": sample.row, "split_after": sample.after})
    return history


def device_summary(device: DemoDevice, log: RequestLog) -> dict[str, Any]:
    """All figures of one device."""
    samples = log.samples
    planned = [sample for sample in samples if not sample.fallback]
    cuts = cuts_over_time(samples)
    return {
        "device": device.name,
        "profile": device.profile,
        "link": device.link,
        "emulated": True,
        "keep_raw_input": device.keep_raw_input,
        "requests": log.requests,
        "answered": len(samples),
        "errors": dict(log.failed),
        "lost": log.lost,
        "duplicated": log.duplicated,
        "wrong": sum(not sample.same_top1 for sample in samples),
        "equal": sum(sample.equals_reference for sample in samples),
        "accuracy": fmean(sample.matches_label for sample in samples) if samples else None,
        "fallbacks": sum(sample.fallback for sample in samples),
        "raced": sum(sample.raced for sample in samples),
        "switches": sum(1 for _ in pairwise(cuts)),
        "cuts": cuts,
        "rows_used": sorted({sample.row for sample in samples}),
        "emulation_overruns": sum(sample.emulation_overrun for sample in samples),
        "bytes_up": sum(sample.up_bytes for sample in samples),
        "predicted_p50_ms": _ms(quantile([sample.predicted_s for sample in planned], 0.5)),
        "predicted_p95_ms": _ms(quantile([sample.predicted_s for sample in planned], 0.95)),
        "measured_p50_ms": _ms(quantile([sample.latency_s for sample in samples], 0.5)),
        "measured_p95_ms": _ms(quantile([sample.latency_s for sample in samples], 0.95)),
    }


def demo_summary(
    logs: Mapping[DemoDevice, RequestLog],
    events: tuple[Event, ...],
    plans: Mapping[str, Any],
    restarts: Mapping[str, int],
) -> dict[str, Any]:
    """The document that `--json` writes."""
    return {
        "emulated": True,
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "processor": platform.machine(),
        },
        "versions": {"edgesplit": __version__} | {name: metadata.version(name) for name in VERSIONS_OF},
        "events": [{"at_s": event.at_s, "kind": event.kind, "text": event.text} for event in events],
        "restarts": dict(restarts),
        "plans": dict(plans),
        "devices": {device.name: device_summary(device, log) for device, log in logs.items()},
    }


FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("device profile (emulated)", lambda device: str(device["profile"])),
    ("link (shaped)", lambda device: str(device["link"])),
    ("limits", lambda device: "raw input stays" if device["keep_raw_input"] else "none"),
    ("cuts used", lambda device: ", ".join(device["rows_used"])),
    ("answered / asked", lambda device: f"{device['answered']} / {device['requests']}"),
    (
        "latency p50, predicted / measured",
        lambda device: f"{device['predicted_p50_ms']} / {device['measured_p50_ms']} ms",
    ),
    (
        "latency p95, predicted / measured",
        lambda device: f"{device['predicted_p95_ms']} / {device['measured_p95_ms']} ms",
    ),
    ("sent up", lambda device: format_size(device["bytes_up"])),
    ("switches", lambda device: str(device["switches"])),
    ("fallbacks", lambda device: str(device["fallbacks"])),
    ("races with the cloud, as planned", lambda device: str(device["raced"])),
    ("equal to the whole model", lambda device: f"{device['equal']} / {device['answered']}"),
    ("accuracy against the labels", lambda device: "-" if device["accuracy"] is None else f"{device['accuracy']:.1%}"),
    ("emulation overruns", lambda device: str(device["emulation_overruns"])),
    ("lost", lambda device: str(device["lost"])),
    ("answered twice", lambda device: str(device["duplicated"])),
    ("wrong (other top-1)", lambda device: str(device["wrong"])),
)


def summary_table(summary: Mapping[str, Any]) -> Any:
    """A table with one column per device."""
    devices = list(summary["devices"].values())
    rows = [(name, *(figure(device) for device in devices)) for name, figure in FIGURES]
    return table(("", *(f">{device['device']}" for device in devices)), rows)


def problems(summary: Mapping[str, Any]) -> list[str]:
    """What the demo should have shown and this run did not."""
    missing = []
    for device in summary["devices"].values():
        name = device["device"]
        missing += [f"{name}: {device[kind]} {kind}" for kind in ("lost", "duplicated", "wrong") if device[kind]]
        if not device["answered"]:
            missing.append(f"{name}: no answers")
        if (
            set(device["rows_used"]) - {"local"}
            and not device["fallbacks"]
            and not device["raced"]  # a race replaces the fallback
            and summary["plans"].get(name, {}).get("best") != "local"
        ):
            missing.append(f"{name}: no fallback although the offload server was away")
    dropped = summary["devices"].get("pi3-lte")
    if dropped and not dropped["switches"]:
        missing.append("pi3-lte: no switch when its link dropped")
    if not any(row.startswith("cut-") for device in summary["devices"].values() for row in device["rows_used"]):
        missing.append("no device was cut inside the model")
    return missing


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(ms(seconds))
