"""Generator of docs/metrics.md: `python -m edgesplit.observability.metrics_reference`. A test compares its output with
the file."""

from __future__ import annotations

import sys

from edgesplit.observability.histogram import SECONDS_BOUNDS
from edgesplit.observability.metrics import FAMILIES, MetricFamily
from edgesplit.observability.registry import MAX_SERIES, OTHER_LABEL

_BOUNDS = ", ".join(f"{bound:g}" for bound in SECONDS_BOUNDS)
_INTRODUCTION = f"""# Metrics

Every metric that edgesplit exports for Prometheus. Addresses, access and example queries:
[operations](operations.md#what-is-seen). `python -m edgesplit.observability.metrics_reference` generates this page.

All values are in seconds and bytes. Histograms of seconds have the bounds {_BOUNDS}.
Label values are names of deployed things or one of a few fixed words, never content of a request. A metric has at most
{MAX_SERIES} series; further ones are counted together under `{OTHER_LABEL}`. `model` is `name@version`. Every sample
of an emulated agent carries `emulated="true"`. Each page ends with prometheus_client's `process_*`: memory, processor
time and open files of the process that answers.
"""
_SECTIONS = (
    ("edgesplit_agent_", "The agent"),
    ("edgesplit_offload_", "The offload server"),
    ("edgesplit_controller_", "The controller"),
)


def render_page() -> str:
    """The text of the whole page."""
    sections = [
        "\n".join(
            [f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|", *_table_rows(prefix)]
        )
        for prefix, title in _SECTIONS
    ]
    return "\n".join([_INTRODUCTION, "\n\n".join(sections), ""])


def _table_rows(prefix: str) -> list[str]:
    return [_table_row(family) for family in FAMILIES if family.name.startswith(prefix)]


def _table_row(family: MetricFamily) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    bounds = ""
    if family.kind == "histogram" and family.bounds is not SECONDS_BOUNDS:
        bounds = f" Bounds: {', '.join(f'{bound:g}' for bound in family.bounds)}."
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help}{bounds} |"


if __name__ == "__main__":
    sys.stdout.write(render_page())
