"""Picture of a family's plan: accuracy against predicted latency on the planned link, with the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from edgesplit_partitioner.presentation.picture import FAINT, INSIDE, LOCAL, PAPER, REMOTE, STYLE


def render_frontier(plan: Mapping[str, Any], into: IO[bytes], kind: str) -> None:
    """Draw a plan as `FamilyResult.to_builtins` returns it; `kind` is `svg`, `png` or `pdf`.

    Each variant is a point at its best cut's milliseconds; the frontier is the line through those that none at least as
    accurate beats. A cascade is a point of its own, at its mean. The deadline and the floor are lines where there
    are some.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(9, 5.5), facecolor=PAPER)
        _draw(axes, plan)
        figure.tight_layout()
        plain = {"Date": None} if kind == "svg" else None
        try:
            figure.savefig(into, format=kind, facecolor=PAPER, metadata=plain, dpi=130)
        finally:
            pyplot.close(figure)


def _draw(axes: Any, plan: Mapping[str, Any]) -> None:
    from matplotlib import ticker

    accuracies = plan["accuracies"]
    own = {name: variant["seconds"] * 1e3 for name, variant in plan["variants"].items()}
    on_frontier = [(own[point["variant"]], point["accuracy"] * 100) for point in plan["frontier"]]
    axes.plot(
        *zip(*sorted(on_frontier), strict=True), marker="o", color=LOCAL, label="frontier", drawstyle="steps-post"
    )
    for name, seconds_ms in own.items():
        axes.scatter([seconds_ms], [accuracies[name] * 100], marker="x", color=FAINT, zorder=3)
        axes.annotate(name, (seconds_ms, accuracies[name] * 100), textcoords="offset points", xytext=(6, -10))
    best = plan["best"]
    axes.scatter(
        [best["seconds"] * 1e3], [best["accuracy"] * 100], s=120, facecolors="none", edgecolors=REMOTE, zorder=4
    )
    if plan.get("cascade"):
        way = plan["cascade"]["way"]
        place = (way["figures"]["seconds"] * 1e3, way["accuracy"] * 100)
        axes.scatter(*place, marker="D", color=REMOTE, zorder=4, label="cascade, mean")
        axes.annotate(way["name"], place, textcoords="offset points", xytext=(6, 6))
    if plan["deadline_s"]:
        axes.axvline(plan["deadline_s"] * 1e3, linestyle="--", color=INSIDE, label="deadline")
    if plan["least_accuracy"]:
        axes.axhline(plan["least_accuracy"] * 100, linestyle=":", color=REMOTE, label="least accuracy")
    axes.set_xscale("log")
    axes.margins(x=0.12, y=0.12)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")  # powers of ten would be drawn as TeX
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel("predicted latency, ms (log)")
    reference = plan.get("reference")
    axes.set_ylabel(f"agreement with {reference}, %" if reference else "accuracy, %")
    axes.set_title(f"{plan['model']}: chosen {best['row']}")
    axes.legend(loc="lower right")
