"""`demo.svg`: latency and cut over time for each device, with the events marked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgesplit_cli.demo.application import RequestLog, Sample
from edgesplit_cli.demo.scenario import KILLED_DEVICE, SLOWED_DEVICE, DemoDevice, Event
from edgesplit_partitioner.presentation.picture import GRID, INK, INSIDE, LOCAL, PAPER, REMOTE

FALLBACK = "#c53030"
FIRST = "#8a63b8"
LABELS = {
    FIRST: "student, where sure",
    LOCAL: "all on the device",
    INSIDE: "cut inside the model",
    REMOTE: "all in the cloud",
    FALLBACK: "cloud late or away, finished locally",
}
BANDS = (
    ("link-drop", "link-back", "LTE link at a tenth", "#f6e7c8"),
    ("offload-killed", "offload-back", "offload server dead", "#f8d7d7"),
)


def colour_of(sample: Sample) -> str:
    """Colour of a sample by where it was answered; an escalated one has that of the second variant's row."""
    if sample.fallback or sample.unsure:
        return FALLBACK
    if sample.answered_first:
        return FIRST
    return {"local": LOCAL, "remote": REMOTE}.get(sample.row, INSIDE)


def draw(books: Mapping[DemoDevice, RequestLog], events: tuple[Event, ...], file: Path) -> None:
    """Write the picture as SVG, or in another format of matplotlib by the file's ending."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "edgesplit",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
    }
    with pyplot.rc_context(
        {**style, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GRID}
    ):
        figure, axes = pyplot.subplots(
            len(books), 1, figsize=(11, 2.35 * len(books) + 0.9), sharex=True, facecolor=PAPER
        )
        for axis, (device, log) in zip(axes, books.items(), strict=True):
            _panel(axis, device, log.samples, events)
        axes[-1].set_xlabel("seconds")
        _legend(figure)
        figure.tight_layout(rect=(0, 0, 1, 0.94))
        figure.savefig(file, facecolor=PAPER, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=110)
        pyplot.close(figure)


def _panel(axis: Any, device: DemoDevice, samples: list[Sample], events: tuple[Event, ...]) -> None:
    """One device: a dot per answer, the plan's prediction as a line, the cut in use as a strip below."""
    times, latencies = [sample.at_s for sample in samples], [sample.latency_s * 1000 for sample in samples]
    axis.scatter(times, latencies, s=11, c=[colour_of(sample) for sample in samples], linewidths=0, zorder=3)
    # A line for each variant of a cascade, which would else go up and down with every escalation.
    for answered_first in (True, False):
        part = [sample for sample in samples if sample.answered_first == answered_first]
        predicted_ms = [sample.predicted_s * 1000 for sample in part]
        axis.plot([sample.at_s for sample in part], predicted_ms, color=INK, lw=0.8, alpha=0.45, zorder=2)
    axis.set_yscale("log")
    low, high = _bounds(latencies)
    axis.set_ylim(low, high)
    axis.set_xlim(0, events[-1].at_s)
    steps = (base * 10**power for power in range(5) for base in (1, 2, 5))
    axis.set_yticks([step for step in steps if low < step < high])
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_title(f"{device.title} (emulated)", loc="left", fontsize=10.5, color=INK)
    axis.set_ylabel("latency, ms")
    axis.grid(axis="y", color=GRID, lw=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    _strip(axis, samples, events[-1].at_s)
    _marks(axis, device, events)


def _bounds(latencies: list[float]) -> tuple[float, float]:
    ordered = sorted(latencies) or [1.0, 1000.0]
    return max(1.0, ordered[0] * 0.45), ordered[-1] * 2.3


def _strip(axis: Any, samples: list[Sample], end_s: float) -> None:
    """The rows in use as a coloured strip along the bottom edge, with a gap where no request was made for over a
    second."""
    edges = [*[sample.at_s for sample in samples], end_s]
    runs: list[tuple[float, float, str]] = []
    for sample, next_at in zip(samples, edges[1:], strict=True):
        end = min(next_at, sample.at_s + 1.0)
        if runs and runs[-1][2] == colour_of(sample) and runs[-1][1] >= sample.at_s:
            runs[-1] = (runs[-1][0], end, runs[-1][2])
        else:
            runs.append((sample.at_s, end, colour_of(sample)))
    for start, end, colour in runs:
        axis.axvspan(start, end, ymax=0.045, color=colour, lw=0)


def _marks(axis: Any, device: DemoDevice, events: tuple[Event, ...]) -> None:
    """Mark the events of this device: a band for those that last, a line for those that do not."""
    times: dict[str, float] = {event.kind: event.at_s for event in events}
    for first, last, text, colour in BANDS:
        if first == "link-drop" and device.name != SLOWED_DEVICE:
            continue
        axis.axvspan(times[first], times[last], color=colour, lw=0, zorder=0)
        _label(axis, times[first], text)
    if device.name == KILLED_DEVICE:
        axis.axvline(times["agent-killed"], color=INK, lw=0.9, ls=(0, (3, 3)))
        _label(axis, times["agent-killed"], "agent killed, restarted")


def _label(axis: Any, at_s: float, text: str) -> None:
    axis.text(at_s + 0.2, 0.97, text, transform=axis.get_xaxis_transform(), va="top", fontsize=8, color=INK)


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    dots = [Line2D([], [], marker="o", ls="", ms=5, color=colour, label=text) for colour, text in LABELS.items()]
    line = Line2D([], [], color=INK, lw=0.8, alpha=0.6, label="predicted")
    figure.legend(
        handles=[*dots, line], ncols=6, loc="upper center", frameon=False, fontsize=8.5, bbox_to_anchor=(0.5, 0.955)
    )
    figure.suptitle(
        "One task, three devices, a day with faults: the latency of each answer",
        x=0.5,
        y=0.985,
        fontsize=12,
        color=INK,
    )
