"""`edgectl model` and `edgectl profile`: the registry, and what a model costs here."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from edgesplit.errors import UsageError
from edgesplit_cli.api import Api
from edgesplit_cli.show import console, json_option, ms, print_json, size, table

PICTURES = {".jpg", ".jpeg"}
MOST_SAMPLES = 32


@click.group()
def model() -> None:
    """Push models, list them, look at one."""


@model.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", required=True, help="Name to store it under; each new content becomes a new version.")
@click.option(
    "--input", "input_spec", default=None, help="What arrives, as in 'image/jpeg 640x480 q85 rgb nchw scale=1/255'."
)
@click.option("--bind", "bindings", multiple=True, metavar="DIM=N", help="Fix a dynamic dimension, as in batch=1.")
@json_option
@click.pass_obj
def push(data: Path, file: Path, name: str, input_spec: str | None, bindings: tuple[str, ...], as_json: bool) -> None:
    """Check a model file and store it as NAME@VERSION."""
    api = Api.of(data)
    total = file.stat().st_size
    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (
        Progress(*columns, console=None, disable=as_json or total < 8 << 20, transient=True) as bar,
        file.open("rb") as opened,
    ):
        task = bar.add_task(f"pushing {file.name}", total=total)
        stored = api.upload(
            "/v1/models",
            opened,
            total,
            lambda done, _: bar.update(task, completed=done),
            name=name,
            input=input_spec,
            bind=list(bindings) or None,
        )
    if as_json:
        print_json(stored)
        return
    fate = "stored" if stored.get("created", True) else "already there, unchanged:"
    click.echo(f"{fate} {stored['model']}  sha256 {stored['sha256'][:16]}…  {_count(stored['layers'])} layers")


@model.command("list")
@json_option
@click.pass_obj
def list_models(data: Path, as_json: bool) -> None:
    """Every model and version."""
    stored = Api.of(data).get("/v1/models")
    if as_json:
        print_json(stored)
        return
    rows = [
        (
            one["model"],
            size(one["bytes"]),
            str(_count(one["layers"])),
            one["sha256"][:16],
            one.get("input") or "tensors",
        )
        for one in stored
    ]
    console().print(table(("model", ">size", ">layers", "sha256", "input"), rows))


@model.command()
@click.argument("reference")
@json_option
@click.pass_obj
def show(data: Path, reference: str, as_json: bool) -> None:
    """One model: inputs, outputs and layers (names that `--partition LAYER` takes)."""
    one = Api.of(data).get(f"/v1/models/{reference}")
    if as_json:
        print_json(one)
        return
    console().print(f"[bold]{one['model']}[/]  sha256 {one['sha256']}")
    for side in ("inputs", "outputs"):
        for tensor in one[side]:
            console().print(f"{side[:-1]:7} {tensor['name']} {tensor['datatype']} {tensor['shape']}")
    rows = [
        (layer["name"], layer.get("operator", ""), size(layer.get("weight_bytes")), size(layer.get("output_bytes")))
        for layer in one["layers"]
    ]
    console().print(table(("layer", "operator", ">weights", ">writes"), rows))


@click.command()
@click.argument("reference")
@click.option(
    "--samples",
    type=click.Path(exists=True, path_type=Path),
    default=None,
    help="A JPEG, or a folder of them, as real input.",
)
@click.option(
    "--on", "where", type=click.Choice(["local"]), default="local", help="Where to measure: the controller's machine."
)
@json_option
@click.pass_obj
def profile(data: Path, reference: str, samples: Path | None, where: str, as_json: bool) -> None:
    """Measure a model layer by layer on this machine, by the runtime's own profile."""
    api = Api.of(data)
    if samples is not None:
        send_samples(api, reference, samples)
    with console().status(f"measuring {reference} on {where}"):
        measured = api.post(f"/v1/models/{reference}/profile", {"on": where})
    if as_json:
        print_json(measured)
        return
    rows = [
        (layer["name"], layer.get("operator", ""), ms(layer["median_s"]), ms(layer["p95_s"]))
        for layer in measured["layers"]
    ]
    console().print(
        table(
            ("layer", "operator", ">median ms", ">p95 ms"),
            rows,
            title=f"{measured['model']} on {measured.get('where', where)}",
        )
    )
    console().print(f"sum of medians {ms(sum(layer['median_s'] for layer in measured['layers']))} ms")


def send_samples(api: Api, reference: str, samples: Path) -> int:
    """Store pictures as the model's samples; returns how many."""
    files = (
        sorted(path for path in samples.iterdir() if path.suffix.lower() in PICTURES) if samples.is_dir() else [samples]
    )
    if not files:
        raise UsageError(f"no JPEG in {samples}")
    chosen = files[:: max(1, len(files) // MOST_SAMPLES)][:MOST_SAMPLES]
    body = {"samples": [{"frame": base64.b64encode(path.read_bytes()).decode()} for path in chosen]}
    api.post(f"/v1/models/{reference}/samples", body)
    return len(chosen)


def _count(layers: Any) -> int:
    return layers if isinstance(layers, int) else len(layers)
