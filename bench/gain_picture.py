"""The picture of `gain`: the gains of all cells in their order, a line for each allowance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = ("#999999", "#64b5cd", "#4c72b0", "#c44e52")


def draw_gains(gains: Mapping[float, Sequence[float]], file: Path) -> None:
    """Draw the gains by allowance, the largest first."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 8, "svg.hashsalt": "edgesplit", "svg.fonttype": "none"}):
        figure, axis = plt.subplots(figsize=(7.2, 3.0))
        for (allowed, values), colour in zip(sorted(gains.items()), COLOURS, strict=False):
            label = "lossless" if not allowed else f"{allowed:.0%} of answers changed"
            axis.plot(sorted(values, reverse=True), color=colour, linewidth=1.4, label=label)
        axis.axhline(1.0, color="#555555", linewidth=0.8, linestyle=":")
        axis.set_yscale("log", base=2)
        axis.set_yticks([1, 1.5, 2, 3, 4], ["1", "1.5", "2", "3", "4"])
        axis.set_ylabel("times the better pure mode")
        axis.set_xlabel("cells of model, input, device profile and link, ordered by gain (predicted)")
        axis.legend(frameon=False)
        figure.tight_layout()
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)
