"""The demo's result per device: from the recorded requests to JSON and to a table. No I/O."""

from __future__ import annotations

import platform
from collections import Counter
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

AUDIT_COUNTS = ("audited", "changed", "unaudited", "alarms")
"""What is told of a cascade's audits, by its names in `CascadeCounts`."""
VERSIONS_OF = ("onnxruntime", "numpy", "tuf", "paho-mqtt", "pillow")


def quantile(values: list[float], fraction: float) -> float | None:
    """The value below which a fraction `fraction` of the values lie (nearest rank); None without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else None


def cuts_over_time(samples: list[Sample]) -> list[dict[str, Any]]:
    """Each change of the row in use, with its time. Races are left out: the row does not change, whichever side answers
    first. So are the answers of a cascade's first variant, for which no row is selected."""
    history: list[dict[str, Any]] = []
    for sample in (one for one in samples if not one.answered_first):
        if not history or (history[-1]["row"] != sample.row and not sample.raced):
            history.append({"at_s": round(sample.at_s, 2), "row": sample.row, "split_after": sample.after})
    return history


def cascade_summary(log: RequestLog, plan: Mapping[str, Any], counts: Mapping[str, Any] | None) -> dict[str, Any]:
    """What became of a cascade: who answered and how many answers changed, as the application saw it, beside the
    promise and the audits. `counts`: what the device counted (`CascadeCounts`); None where nothing was reported."""
    signed, samples = plan["cascade"], log.samples
    return {
        "first": signed["first"],
        "second": signed["second"],
        "planned_escalated": signed["escalated"],
        "promised": signed["changed"]["at_most"],
        "certainty": signed["changed"]["certainty"],
        "answered": dict(Counter(sample.variant for sample in samples)),
        "escalated": sum(sample.escalated for sample in samples),
        "unsure": sum(sample.unsure for sample in samples),
        "changed": sum(sample.changed for sample in samples),
        "audits": {name: counts[name] for name in AUDIT_COUNTS} if counts else None,
    }


def device_summary(
    device: DemoDevice, log: RequestLog, plan: Mapping[str, Any], counts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All figures of one device. `counts` as for `cascade_summary`."""
    samples = log.samples
    planned = [sample for sample in samples if not sample.fallback]
    cuts = cuts_over_time(samples)
    return {
        "device": device.name,
        "profile": device.profile,
        "link": device.link,
        "emulated": True,
        "keep_raw_input": device.keep_raw_input,
        "model": device.model,
        "cascade": cascade_summary(log, plan, counts) if device.has_cascade else None,
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
    counts: Mapping[str, Mapping[str, Any] | None],
) -> dict[str, Any]:
    """The document that `--json` writes. `counts`: by device, as for `cascade_summary`."""
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
        "devices": {
            device.name: device_summary(device, log, plans.get(device.name, {}), counts.get(device.name))
            for device, log in logs.items()
        },
    }


def _of_cascade(figure: Callable[[Mapping[str, Any]], str]) -> Callable[[Mapping[str, Any]], str]:
    """A figure of a device's cascade as one of the device: `-` for a device without one."""
    return lambda device: figure(device["cascade"]) if device["cascade"] else "-"


def _limits(device: Mapping[str, Any]) -> str:
    return "raw input stays" if device["keep_raw_input"] else "none"


def _answered_by(cascade: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(cascade["answered"].items())) or "-"


def _changed(cascade: Mapping[str, Any]) -> str:
    """Measured beside promised."""
    share = f"{100 * cascade['promised']:.3g} %"
    return f"{cascade['changed']} of {sum(cascade['answered'].values())}; promised at most {share}"


def _audits(cascade: Mapping[str, Any]) -> str:
    audits = cascade["audits"]
    return f"{audits['audited']}, {audits['changed']}" if audits else "not reported"


FIGURES: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("device profile (emulated)", lambda device: str(device["profile"])),
    ("link (shaped)", lambda device: str(device["link"])),
    ("model or family", lambda device: str(device["model"])),
    ("limits", _limits),
    ("cuts used", lambda device: ", ".join(device["rows_used"])),
    ("answered / asked", lambda device: f"{device['answered']} / {device['requests']}"),
    ("typed errors", lambda device: ", ".join(f"{name} {n}" for name, n in device["errors"].items()) or "0"),
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
    ("answered by", _of_cascade(_answered_by)),
    ("escalated, unsure", _of_cascade(lambda cascade: f"{cascade['escalated']}, {cascade['unsure']}")),
    ("changed against the whole model", _of_cascade(_changed)),
    ("audited, changed of these", _of_cascade(_audits)),
    ("equal to the variant's whole model", lambda device: f"{device['equal']} / {device['answered']}"),
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


def closing_sentence(summary: Mapping[str, Any]) -> str:
    """What a run without problems has shown. A typed error by the deadline is an outcome too, and is named."""
    devices = list(summary["devices"].values())
    requests, answered = (sum(device[name] for device in devices) for name in ("requests", "answered"))
    if answered == requests:
        sentence = "Every request was answered exactly once, with the result of the whole model that gave it."
    else:
        sentence = (
            f"{answered} of {requests} requests were answered exactly once, with the result of the whole model that"
            f" gave it, and {requests - answered} got a typed error by their deadline."
        )
    for device in devices:
        if cascade := device["cascade"]:
            sentence += f" Changed by {device['device']}'s cascade: {_changed(cascade)}."
    return sentence


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
            and not device[
                "cascade"
            ]  # it asks so rarely that probes may have found the server away before a request did
            and not device["fallbacks"]
            and not device["raced"]  # a race replaces the fallback
            and summary["plans"].get(name, {}).get("best") != "local"
        ):
            missing.append(f"{name}: no fallback although the offload server was away")
        if (cascade := device["cascade"]) and not 0 < cascade["escalated"] < device["answered"]:
            missing.append(f"{name}: {cascade['escalated']} of {device['answered']} answers escalated by its cascade")
    dropped = summary["devices"].get("pi3-lte")
    if dropped and not dropped["switches"]:
        missing.append("pi3-lte: no switch when its link dropped")
    if not any(row.startswith("cut-") for device in summary["devices"].values() for row in device["rows_used"]):
        missing.append("no device was cut inside the model")
    return missing


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else float(ms(seconds))
