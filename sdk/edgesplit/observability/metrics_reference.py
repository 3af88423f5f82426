"""`python -m edgesplit.observability.metrics_reference`: docs/metrics.md, made of the code. A test compares."""

from __future__ import annotations

import sys

from edgesplit.observability.histogram import SECONDS
from edgesplit.observability.metrics import FAMILIES, Family
from edgesplit.observability.registry import MOST_SERIES, OTHER

_HEAD = f"""# Metrics

Every metric that edgesplit shows to Prometheus. Where the pages are, who may read them and what to watch:
[operations](operations.md#what-is-seen). This page is made by `python -m edgesplit.observability.metrics_reference`.

Seconds and bytes throughout. Histograms of seconds have the bounds {", ".join(f"{bound:g}" for bound in SECONDS)}.
Labels hold what was deployed or one of a few words, nothing of a request; beyond {MOST_SERIES} series of a metric,
further ones are counted together under `{OTHER}`. `model` is `name@version`. Every sample of an emulated agent carries
`emulated="true"`. Each page ends with prometheus_client's `process_*`: memory, processor time and open files of the
process that answers.
"""
_ROOMS = (
    ("edgesplit_agent_", "The agent"),
    ("edgesplit_offload_", "The offload server"),
    ("edgesplit_controller_", "The controller"),
)


def page() -> str:
    """The whole page."""
    sections = [
        "\n".join([f"## {title}", "", "| metric | kind | labels | what |", "|---|---|---|---|", *_lines(prefix)])
        for prefix, title in _ROOMS
    ]
    return "\n".join([_HEAD, "\n\n".join(sections), ""])


def _lines(prefix: str) -> list[str]:
    return [_line(family) for family in FAMILIES if family.name.startswith(prefix)]


def _line(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    bounds = ""
    if family.kind == "histogram" and family.bounds is not SECONDS:
        bounds = f" Bounds: {', '.join(f'{bound:g}' for bound in family.bounds)}."
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help}{bounds} |"


if __name__ == "__main__":
    sys.stdout.write(page())
