"""`edgectl model` and `edgectl profile`: the registry, and what a model costs here."""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import click
import msgspec
from rich.text import Text

from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec
from edgesplit_cli.commands.replan import drift, replan_policy
from edgesplit_cli.commands.upload_progress import upload_bar
from edgesplit_cli.output import console, fine_ms, headed, json_option, ms, print_json, share, size, table
from edgesplit_cli.settings import connect

PICTURES = {".jpg", ".jpeg"}
TENSORS = {".npz"}
SOUNDS = {".wav", ".pcm", ".raw"}
LABELS = "labels.json"
CODEC_COLUMNS = (
    "tensor", "codec", ">raw", ">encoded", ">+zstd", ">encode ms", ">decode ms", ">loss", ">confirmed", ">accuracy"
)  # fmt: skip
SLICE_COLUMNS = ("slice", ">layers", ">median ms", ">p95 ms", ">sum of its layers ms")
MOST_SAMPLES = 32


@click.group()
def model() -> None:
    """Push models, list them, look at one."""


for command in (drift, replan_policy):
    model.add_command(command)


@model.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.option("--name", required=True, help="Name to store it under; each new content becomes a new version.")
@click.option(
    "--input",
    "input_spec",
    default=None,
    help="What arrives, as in 'image/jpeg 640x480 q85 rgb nchw scale=1/255' or 'audio/pcm16 16k'.",
)
@click.option(
    "--bind",
    "bindings",
    multiple=True,
    metavar="DIM=N",
    help="Fix a dynamic dimension, as in batch=1, or the value of an input that is one whole number, as in sr=16000.",
)
@json_option
@click.pass_obj
def push(data: Path, file: Path, name: str, input_spec: str | None, bindings: tuple[str, ...], as_json: bool) -> None:
    """Check a model (.onnx, .tflite) and store it as NAME@VERSION.

    FILE may be a folder that holds one model; weights that lie beside an .onnx go with it.
    """
    api = connect(data)
    with _as_pushed(file) as (opened, total), upload_bar(f"pushing {file.name}", total, quiet=as_json) as told:
        stored = api.upload(
            "/v1/models",
            opened,
            total,
            told,
            name=name,
            input=input_spec,
            bind=list(bindings) or None,
        )
    if as_json:
        print_json(stored)
        return
    fate = "stored" if stored.get("created", True) else "already there, unchanged:"
    click.echo(f"{fate} {stored['model']}  sha256 {stored['sha256'][:16]}…  {_count(stored['layers'])} layers")


@contextmanager
def _as_pushed(place: Path) -> Iterator[tuple[IO[bytes], int]]:
    """What is sent for a model, and its size: the file, or the bundle of it and the data files beside it."""
    from edgesplit_partitioner.onnx_format import archive

    file = archive.model_in(place)
    data = archive.data_files(file)
    with tempfile.TemporaryFile() if data else file.open("rb") as opened:
        if data:
            archive.write(file, data, opened)
        total = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        yield opened, total


@model.command("list")
@json_option
@click.pass_obj
def list_models(data: Path, as_json: bool) -> None:
    """Every model and version."""
    stored = connect(data).get("/v1/models")
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
    one = connect(data).get(f"/v1/models/{reference}")
    if as_json:
        print_json(one)
        return
    console().print(headed(one["model"], f"  sha256 {one['sha256']}"))
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
    help="A JPEG (or .npz of tensors), or a folder of them, as real input: also measures what lossy codecs do to the"
    " answers. labels.json beside them (class by file name) adds accuracy.",
)
@click.option(
    "--device",
    default="generic-x86",
    show_default=True,
    help="Device profile whose predictions --json puts beside what is measured here.",
)
@click.option("--lossless", is_flag=True, help="With --samples: leave the lossy codecs out.")
@click.option(
    "--on",
    "where",
    default="local",
    metavar="local|DEVICE",
    help="local: the controller's machine; a device: what it measured of the model at work, in the last day.",
)
@json_option
@click.pass_obj
def profile(
    data: Path, reference: str, samples: Path | None, device: str, lossless: bool, where: str, as_json: bool
) -> None:
    """Measure a model: layer by layer on this machine, then whole the slices that plans choose; or see what a device
    that runs it measured.

    With --json it is a costs file, which `edgectl plan` reads.
    """
    api = connect(data)
    if samples is not None:
        send_samples(api, reference, samples)
    with console().status(Text(f"measuring {reference} on {where}")):
        asked = {"on": where, "device": device, "codecs": samples is not None and not lossless}
        measured = api.post(f"/v1/models/{reference}/profile", asked)
    if as_json:
        print_json(measured)
        return
    if where != "local":
        _show_at_work(measured)
        return
    rows = [
        (layer["name"], layer.get("operator", ""), fine_ms(layer["median_s"]), fine_ms(layer["p95_s"]))
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
    if measured.get("slices"):
        title = "slices that plans choose, measured whole"
        console().print(table(SLICE_COLUMNS, map(_slice_row, measured["slices"]), title=title))
    for note in measured.get("notes", ()):
        console().print(note)
    if measured.get("codecs"):
        console().print(table(CODEC_COLUMNS, map(_codec_row, measured["codecs"]), title="lossy codecs, zstd besides"))


def _show_at_work(measured: dict[str, Any]) -> None:
    """What a device measured, beside what its plan had predicted."""
    basis = "" if measured["measured"] == "measured" else f" ({measured['measured']})"
    title = f"{measured['model']} at work on {measured['where']}{basis}, {measured['requests']} requests"
    rows = [
        (_range(one["layers"]), str(len(one["layers"])), fine_ms(one["seconds"]), fine_ms(one["predicted_s"]))
        for one in measured["slices"]
    ]
    console().print(table(("slice", ">layers", ">measured ms", ">planned ms"), rows, title=title))


def _range(layers: Sequence[str]) -> str:
    return layers[0] if layers[0] == layers[-1] else f"{layers[0]} to {layers[-1]}"


def _fine(seconds: float) -> str:
    """Milliseconds with the digits that a layer of a small model needs."""
    return f"{1e3 * seconds:.3f}"


def _slice_row(one: dict[str, Any]) -> tuple[str, ...]:
    times = _fine(one["median_s"]), _fine(one["p95_s"]), "-" if one["summed_s"] is None else _fine(one["summed_s"])
    return (_range(one["layers"]), str(len(one["layers"])), *times)


def _codec_row(one: dict[str, Any]) -> tuple[str, ...]:
    accuracy = "-" if one["accuracy"] is None else f"{one['accuracy']:.1%} ({one['accuracy_raw']:.1%} raw)"
    sizes = size(one["raw_bytes"]), size(one["bytes"]), size(one["zstd_bytes"])
    times = fine_ms(one["encode_s"]), fine_ms(one["decode_s"])
    return (one["tensor"], one["codec"], *sizes, *times, share(one["loss"]), share(one["confirmed_loss"]), accuracy)


def send_samples(api: ControllerClient, reference: str, samples: Path) -> int:
    """Store pictures, sound or tensors, whichever the model takes, as its samples, with their labels; how many."""
    from edgesplit_cli.local.model import sample_files

    spec = msgspec.convert(api.get(f"/v1/models/{quote(reference)}")["input_spec"], InputSpec | None)
    files = sample_files(samples, spec)
    if spec is not None and spec.is_sound:
        return _send_sound(api, reference, samples, spec)
    labels = labels_in(files[0].parent)
    chosen = files[:: max(1, len(files) // MOST_SAMPLES)][:MOST_SAMPLES]
    api.post(f"/v1/models/{quote(reference)}/samples", {"samples": [_sample(path, spec, labels) for path in chosen]})
    return len(chosen)


def _send_sound(api: ControllerClient, reference: str, samples: Path, spec: InputSpec) -> int:
    """The same for recordings, cut into frames as the model's input spec says."""
    from edgesplit_cli.local.model import read_samples

    frames = [frame for frame in read_samples(samples, spec, MOST_SAMPLES) if isinstance(frame, bytes)]
    body = {"samples": [{"frame": base64.b64encode(frame).decode()} for frame in frames]}
    api.post(f"/v1/models/{quote(reference)}/samples", body)
    return len(frames)


def _sample(path: Path, spec: InputSpec | None, labels: Mapping[str, int]) -> dict[str, Any]:
    from edgesplit_cli.local.model import read_sample

    read_sample(path, spec)  # what the controller would refuse without knowing the file's name
    kind = "tensors" if spec is None else "frame"
    label = {"label": labels[path.name]} if path.name in labels else {}
    return {kind: base64.b64encode(path.read_bytes()).decode(), **label}


def labels_in(folder: Path) -> dict[str, int]:
    """Class by file name, from the folder's labels.json; none where there is no such file."""
    try:
        return msgspec.json.decode((folder / LABELS).read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f'{folder / LABELS}: {error}; it should be classes by file name, {{"a.jpg": 3}}') from error


def _count(layers: Any) -> int:
    return layers if isinstance(layers, int) else len(layers)
