"""`edgectl model compress`: a smaller version of a model that keeps what it is told to keep."""

from __future__ import annotations

from pathlib import Path

import click

from edgesplit.quantities import format_size
from edgesplit_cli.options.completion import complete_models
from edgesplit_cli.options.gate import GateOptions, gate_options
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.progress import controller_progress
from edgesplit_cli.sample_upload import send_sample_set
from edgesplit_cli.settings import connect, segment

LONG_CALL_S = 4_000.0
"""Longest silence of the controller in a compression, which it ends after 3,000 seconds."""


@click.command()
@click.argument("reference", metavar="NAME[@VERSION]", shell_complete=complete_models)
@click.option(
    "--method", type=click.Choice(["int8", "int8-dynamic", "fp16", "auto"]), default="auto", show_default=True,
    help="int8: weights and activations, by ranges measured on samples. int8-dynamic: activations by each request's own"
    " range, for transformers. fp16: half precision. auto: the smallest file that keeps what it must.",
)  # fmt: skip
@gate_options
@json_option
@click.pass_obj
def compress(data: Path, reference: str, method: str, gate: GateOptions, as_json: bool) -> None:
    """Make a smaller version of a model, and store it if it passes the gate.

    One half of the samples chooses (ranges, and the layers that stay in float), the other half confirms: what is
    promised holds with 90 % certainty for frames like these. Without labels only agreement can be seen. Where the gate
    is missed nothing is stored (exit 4), and the layers are ranked by what each harms.
    """
    samples, terms = gate.request()
    api = connect(data, timeout_s=LONG_CALL_S)
    base = api.get(f"/v1/models/{segment(reference)}")
    path = f"/v1/models/{segment(base['model'])}/compress"
    chosen = send_sample_set(api, base["model"], samples, quiet=as_json)
    with controller_progress(api, path, f"compressing {base['model']}", quiet=as_json):
        stored = api.post(path, {**terms, "method": method, "samples": chosen["set"]})
    sizes = f"{format_size(stored['bytes'])}, {stored['bytes'] / base['bytes']:.0%} of {base['model']}"
    outcome = "stored" if stored["created"] else "already there, unchanged:"
    next_step = f"next: edgectl plan {stored['model']} --device PROFILE --link wifi"
    print_result(stored, as_json, f"{outcome} {stored['model']}  {sizes}", *stored["lineage"]["sentences"], next_step)
