"""`edgectl family`: models of one task as one model, chosen among per request."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import msgspec

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit_cli.options.completion import complete_models
from edgesplit_cli.options.types import EXISTING_PATH
from edgesplit_cli.output import console, json_option, print_json, table
from edgesplit_cli.progress import controller_progress
from edgesplit_cli.sample_upload import SampleSource
from edgesplit_cli.settings import connect

MOST_SAMPLES = 10_000
COLUMNS = ("variant", "model", ">accuracy", ">at least (90 % sure)", ">right")


@click.group()
def family() -> None:
    """Create families of models of one task, list them, show one, remove them."""


@family.command()
@click.argument("name")
@click.option(
    "--variant", "variants", multiple=True, required=True, metavar="MODEL[=LABELS.json]",
    shell_complete=complete_models,
    help="A model of the family, NAME or NAME@VERSION; several. Where its classes are others than the first one's: a"
    " file with the label of each of its classes, -1 for none, as a JSON list.",
)  # fmt: skip
@click.option(
    "--samples", type=EXISTING_PATH, required=True,
    help="Labelled input, by which accuracies are measured: a folder of JPEG or NPZ with labels.json ({\"a.jpg\": 3}).",
)  # fmt: skip
@json_option
@click.pass_obj
def create(data: Path, name: str, variants: tuple[str, ...], samples: Path, as_json: bool) -> None:
    """Store models of one task as the family NAME, with their accuracies on labelled samples.

    A family is planned, deployed, asked and undeployed by its name, as a model is.
    """
    api, path = connect(data), "/v1/families"
    requested = [_variant(text) for text in variants]
    body = {"name": name, "variants": requested, "samples": _labelled(api, requested[0]["model"], samples)}
    with controller_progress(api, path, f"measuring {len(variants)} variants", quiet=as_json):
        created: dict[str, Any] = api.post(path, body)
    _print(created, as_json)


@family.command("list")
@json_option
@click.pass_obj
def list_(data: Path, as_json: bool) -> None:
    """List families with their variants."""
    families: list[dict[str, Any]] = connect(data).get("/v1/families")
    if as_json:
        print_json(families)
        return
    rows = [
        (one["family"], ", ".join(f"{v['model']} {v['accuracy']:.1%}" for v in one["variants"]), str(one["samples"]))
        for one in families
    ]
    console().print(table(("family", "variants", ">samples"), rows))


@family.command()
@click.argument("name")
@json_option
@click.pass_obj
def show(data: Path, name: str, as_json: bool) -> None:
    """Show the variants of a family with their accuracies."""
    _print(connect(data).get(f"/v1/families/{quote(name)}"), as_json)


@family.command()
@click.argument("name")
@json_option
@click.pass_obj
def remove(data: Path, name: str, as_json: bool) -> None:
    """Remove a family, or one version of it, with its releases; its variants stay. Refused while it is in use."""
    api = connect(data)
    api.get(f"/v1/families/{quote(name)}")  # a model is removed by `edgectl model remove`
    removed: dict[str, Any] = api.delete(f"/v1/models/{quote(name)}")
    if as_json:
        print_json(removed)
        return
    console().print(f"removed {', '.join(removed['models'])}")


def _variant(text: str) -> dict[str, Any]:
    """A variant from MODEL or MODEL=LABELS.json."""
    model, _, file = text.partition("=")
    if not file:
        return {"model": model}
    try:
        labels = msgspec.json.decode(Path(file).read_bytes(), type=list[int])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file}: {error}; it should be a list with the label of each class, [0, 1, -1]") from error
    return {"model": model, "labels": labels}


def _labelled(api: ControllerClient, model: str, location: Path) -> list[dict[str, Any]]:
    """The labelled samples, read as the first variant takes them; UsageError where one has no label."""
    source = SampleSource.of(api, model)
    samples = list(source.read(location, MOST_SAMPLES))
    without = [sample.file for sample in samples if sample.label is None]
    if without:
        raise UsageError(
            f"{len(without)} of {len(samples)} samples have no label, {without[0].name} among them: name them in"
            f" {without[0].parent / 'labels.json'}"
        )
    body: list[dict[str, Any]] = source.body(samples)["samples"]
    return body


def _print(shown: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(shown)
        return
    console().print(f"{shown['family']}: {len(shown['variants'])} variants on {shown['samples']} labelled samples")
    rows = [
        (
            variant["name"], variant["model"], f"{variant['accuracy']:.1%}", f"{variant['least_accuracy']:.1%}",
            f"{variant['right']} of {shown['samples']}",
        )
        for variant in shown["variants"]
    ]  # fmt: skip
    console().print(table(COLUMNS, rows))
