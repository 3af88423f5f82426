"""`edgectl model` and `edgectl profile`: the model registry, and measurements of a model's costs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click
import msgspec

from edgesplit.errors import UsageError
from edgesplit.input_spec import InputSpec
from edgesplit.quantities import format_size
from edgesplit.terminal_text import printable
from edgesplit_cli.commands.compress import LONG_CALL_S, compress
from edgesplit_cli.commands.replan import drift, replan_policy
from edgesplit_cli.local.model import warn_of_range
from edgesplit_cli.options.completion import complete_devices, complete_models, complete_profiles
from edgesplit_cli.options.gate import GateOptions, gate_options
from edgesplit_cli.options.types import EXISTING_PATH, FILE
from edgesplit_cli.output import (
    bold_head,
    console,
    counted,
    fine_ms,
    json_option,
    ms,
    percent_text,
    print_json,
    print_result,
    table,
)
from edgesplit_cli.progress import controller_progress, upload_bar
from edgesplit_cli.sample_upload import send_sample_set, send_samples
from edgesplit_cli.settings import connect, segment
from edgesplit_cli.views.model_interface import interface_lines, proposal_lines

CODEC_COLUMNS = (
    "tensor", "codec", ">raw", ">encoded", ">+zstd", ">encode ms", ">decode ms", ">loss", ">confirmed", ">accuracy"
)  # fmt: skip
FEW_ROWS = 10
"""Rows of a table without `--all`."""
SLICE_COLUMNS = ("slice", ">layers", ">median ms", ">p95 ms", ">sum of its layers ms")


@click.group()
def model() -> None:
    """Push models, list them, show one, remove them."""


for command in (compress, drift, replan_policy):
    model.add_command(command)


@model.command()
@click.argument("file", type=EXISTING_PATH)
@click.option("--name", help="Name to store it under; each new content becomes a new version.")
@click.option(
    "--input",
    "input_spec",
    metavar="SPEC",
    help="What arrives: pictures as in 'image/jpeg 640x480 rgb nchw scale=1/255', or sound as in 'audio/pcm16 16k'"
    " (grammar above); auto: as is proposed. Without it the model takes tensors.",
)
@click.option(
    "--preset", type=click.Choice(("imagenet", "yolo", "coco-ssd")),
    help="In place of --input and --output: those of models trained so. YOLO's generation is told by the outputs.",
)  # fmt: skip
@click.option(
    "--output", "output_kind", metavar="KIND",
    help="What the outputs are: labels[:OUTPUT], boxes:LAYOUT[:THRESHOLD[:OVERLAP]], mask[:OUTPUT] or"
    " embedding[:OUTPUT]; auto: as is proposed; none: just tensors. With --preset and --input auto it is proposed.",
)  # fmt: skip
@click.option("--labels", type=FILE, help="Names of the classes, one in a line, by index.")
@click.option(
    "--bind", "bindings", multiple=True, metavar="DIM=N",
    help="Fix a dynamic dimension, as in batch=1, or the value of an input that is one whole number, as in sr=16000.",
)  # fmt: skip
@click.option(
    "--variant-of",
    metavar="NAME[@VERSION]",
    shell_complete=complete_models,
    help="It stands in for this model (pruned, distilled, compressed elsewhere), and is stored only if it passes the"
    " gate that the options below describe. Its name and --input are those of the base where they are not given.",
)
@gate_options
@json_option
@click.pass_obj
def push(
    data: Path, file: Path, name: str | None, input_spec: str | None, preset: str | None, output_kind: str | None,
    labels: Path | None, bindings: tuple[str, ...], variant_of: str | None, gate: GateOptions, as_json: bool,
) -> None:  # fmt: skip
    """Check a model (.onnx, .tflite) and store it as NAME@VERSION.

    FILE may be a folder that holds one model; weights in files beside an .onnx are sent with it.

    Without --input and --preset, what the model most likely takes and gives is proposed, by its shapes, names and
    metadata; push again with --input auto to take that.

    --input says how what arrives becomes the model's first tensor. Pictures are
    resized bilinearly; a PNG sent where JPEG was pushed is refused:

    \b
      image/jpeg WIDTHxHEIGHT   size of the pictures that arrive, for plans; also
                                image/png and image/webp
      qN                        their quality, for plans without samples [85]
      image/raw WIDTHxHEIGHT PIXELS   a camera's frames, of rgb24, bgr24, gray8,
                                yuyv, nv12 or i420 (BT.601, limited range)
      letterbox | letterbox-topleft | crop[=PART]   keep the aspect ratio: pad to the
                                model's size, or cut the middle out, of which
                                the shorter side is PART [stretch; 0.875]
      pad=N                     pixels beside a letterboxed picture [114]
      rgb | bgr | gray          order of the colours [rgb]
      nchw | nhwc               order of the dimensions [nchw]
      scale=S mean=A,B,C std=A,B,C   value = (pixel * S - mean) / std, with pixels
                                from 0 to 255 [1, 0, 1]; one number or one per colour
      uint8 | int8 | fp16       type of the tensor: pixels, pixels less 128, or
                                half precision [32 bits]
      audio/pcm16 RATE [SAMPLES] [scale=S]   one channel of 16-bit samples, as in
                                16k; value = sample * S [1/32768]

    A model trained as usual on ImageNet: 'image/jpeg 640x480 rgb nchw scale=1/255
    mean=0.485,0.456,0.406 std=0.229,0.224,0.225'.

    With --variant-of it must pass the gate of `edgectl model compress`, on samples that had no part in making it: a
    miss is exit 4, and nothing is stored.
    """
    query = {"name": name, "input": input_spec, "bind": list(bindings) or None}
    if variant_of is not None:
        if preset or output_kind or labels:
            raise UsageError("--preset, --output and --labels are those of the base where --variant-of names one")
        stored = _push_variant(data, file, variant_of, gate, query, quiet=as_json)
    elif gate.is_given:
        raise UsageError("--samples, --keep-accuracy, --keep-agreement and --answer go with --variant-of")
    elif not name:
        raise UsageError("--name: give the name to store it under")
    else:
        api = connect(data)
        names = None if labels is None else api.post("/v1/class-names", {"names": read_class_names(labels)})["names"]
        with (
            _open_for_upload(file) as (upload, total),
            upload_bar(f"pushing {file.name}", total, quiet=as_json) as on_progress,
        ):
            interface = {"preset": preset, "output": output_kind, "names": names}
            stored = api.upload("/v1/models", upload, total, on_progress, **query, **interface)
    outcome = "stored" if stored.get("created", True) else "already there, unchanged:"
    layers = counted(_count(stored["layers"]), "layer")
    text = f"{outcome} {stored['model']}  sha256 {stored['sha256'][:16]}…  {layers}"
    if preset is None and input_spec != "auto":
        warn_of_range(msgspec.convert(stored["input_spec"], InputSpec | None))
    ref = stored["model"] if variant_of is not None else name
    next_step = f"next: edgectl plan {ref} --device PROFILE --link wifi; edgectl deploy {ref} --to DEVICE --wait 60"
    print_result(
        stored, as_json, text, *interface_lines(stored), *_lineage_lines(stored), *proposal_lines(stored), next_step
    )


def _push_variant(
    data: Path, file: Path, variant_of: str, gate: GateOptions, query: Mapping[str, Any], *, quiet: bool
) -> dict[str, Any]:
    """Send the samples and the file; returns the version that passed the gate."""
    samples, terms = gate.request()
    api = connect(data, timeout_s=LONG_CALL_S)
    base = api.get(f"/v1/models/{segment(variant_of)}")["model"]
    path = f"/v1/models/{segment(base)}/variants"
    chosen = send_sample_set(api, base, samples, quiet=quiet)["set"]
    with (
        _open_for_upload(file) as (upload, total),
        controller_progress(api, path, f"judging {file.name} beside {base}", quiet=quiet),
    ):
        stored: dict[str, Any] = api.upload(path, upload, total, **query, **terms, samples=chosen)
    return stored


def _lineage_lines(model_: Mapping[str, Any]) -> list[str]:
    """Where a version that stands in for another comes from, a sentence each; empty for others."""
    said = (model_.get("lineage") or {}).get("sentences", ())
    return [f"  {printable(sentence)}" for sentence in said]


def read_class_names(file: Path) -> list[str]:
    """Names of classes from a file, one in a line; empty lines at its end do not count."""
    try:
        names = file.read_text(encoding="utf-8").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--labels {file}: {error}") from error
    if not names:
        raise UsageError(f"--labels {file}: it has no names, one in a line")
    return [name.strip() for name in names]


@contextmanager
def _open_for_upload(path: Path) -> Iterator[tuple[IO[bytes], int]]:
    """What is uploaded for a model, and its size: the file alone, or an archive of it and the data files beside it."""
    from edgesplit_partitioner.onnx_format import archive

    file = archive.find_model(path)
    data = archive.data_files(file)
    with tempfile.TemporaryFile() if data else file.open("rb") as opened:
        if data:
            archive.write_archive(file, data, opened)
        total = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        yield opened, total


@model.command("list")
@json_option
@click.pass_obj
def list_models(data: Path, as_json: bool) -> None:
    """List every model and version."""
    stored = connect(data).get("/v1/models")
    rows = [
        (
            model_["model"],
            format_size(model_["bytes"]),
            str(_count(model_["layers"])),
            model_["sha256"][:16],
            model_.get("input") or "tensors",
        )
        for model_ in stored
    ]
    print_result(stored, as_json, table(("model", ">size", ">layers", "sha256", "input"), rows))


@model.command()
@click.argument("reference", shell_complete=complete_models)
@json_option
@click.pass_obj
def show(data: Path, reference: str, as_json: bool) -> None:
    """One model: inputs, outputs, input spec and layers (names that `--partition LAYER` takes)."""
    model_ = connect(data).get(f"/v1/models/{segment(reference)}")
    head = bold_head(model_["model"], f"  sha256 {model_['sha256']}")
    rows = [
        (
            layer["name"],
            layer.get("operator", ""),
            format_size(layer.get("weight_bytes")),
            format_size(layer.get("output_bytes")),
        )
        for layer in model_["layers"]
    ]
    variants = [f"  variants: {', '.join(model_['variants'])}"] if model_.get("variants") else []
    measured = [f"measured on the controller's machine: {model_['measurement']}"] if "measurement" in model_ else []
    print_result(
        model_, as_json, head, *interface_lines(model_), *_lineage_lines(model_), *variants, *measured,
        table(("layer", "operator", ">weights", ">writes"), rows),
    )  # fmt: skip


@model.command()
@click.argument("reference", metavar="NAME[@VERSION]")
@json_option
@click.pass_obj
def remove(data: Path, reference: str, as_json: bool) -> None:
    """Remove every version of a model, or one, with its samples, measurements and releases.

    Versions that stand in for it stay, and their lineage still names it.

    It is refused while a device runs it: `edgectl undeploy` ends that. Its files are deleted by `edgectl gc`. The
    number of a removed version is not used again.
    """
    removed = connect(data).delete(f"/v1/models/{segment(reference)}")
    releases = len(removed["releases"])
    with_releases = f" and {counted(releases, 'release')}" if releases else ""
    text = f"removed {', '.join(removed['models'])}{with_releases}; `edgectl gc` deletes the files"
    variants = removed.get("variants", ())
    stays = [f"{', '.join(variants)} stood in for it, and stay{'s' * (len(variants) == 1)}"] if variants else []
    print_result(removed, as_json, text, *stays)


@click.command()
@click.argument("reference", shell_complete=complete_models)
@click.option(
    "--samples",
    type=EXISTING_PATH,
    help="A JPEG (for a model of tensors an .npz, or an .npy of its only input), or a folder of them, as real input:"
    " also measures what lossy codecs do to the answers. labels.json beside them (class by file name) adds accuracy.",
)
@click.option(
    "--device", default="generic-x86", show_default=True, shell_complete=complete_profiles,
    help="Device profile whose predictions --json puts beside what is measured here.",
)  # fmt: skip
@click.option("--lossless", is_flag=True, help="With --samples: leave the lossy codecs out.")
@click.option(
    "--every-sample",
    is_flag=True,
    help="With --samples: send all of a folder, not a few: --allow-changed confirms on all but the first 16, --exit on"
    " all.",
)
@click.option(
    "--on", "where", default="local", metavar="local|DEVICE", shell_complete=complete_devices,
    help="local: the controller's machine; a device: what it measured of the model in operation, in the last day.",
)  # fmt: skip
@click.option("--all", "show_all", is_flag=True, help=f"Print whole tables, not the first {FEW_ROWS} rows of each.")
@json_option
@click.pass_obj
def profile(
    data: Path, reference: str, samples: Path | None, device: str, lossless: bool, every_sample: bool, where: str,
    show_all: bool, as_json: bool,
) -> None:  # fmt: skip
    """Measure a model: layer by layer on this machine, then whole the slices that plans choose; or show what a device
    that runs it measured.

    With --json it is a costs file, which `edgectl plan` reads.
    """
    api, path = connect(data), f"/v1/models/{segment(reference)}/profile"
    if samples is not None:
        send_samples(api, reference, samples, every=every_sample, quiet=as_json)
    with controller_progress(api, path, f"profiling {reference} on {where}", quiet=as_json):
        request = {"on": where, "device": device, "codecs": samples is not None and not lossless}
        measured = api.post(path, request)
    if as_json:
        print_json(measured)
    elif where != "local":
        _print_device_measurements(measured, show_all=show_all)
    else:
        _print_measurements(measured, show_all=show_all)


def _print_measurements(measured: Mapping[str, Any], *, show_all: bool) -> None:
    """Print what was measured on the controller's machine; of each table the rows that cost or save most, unless
    `show_all`."""
    layers = measured["layers"]
    rows: list[tuple[str, ...]] = [
        (layer["name"], layer.get("operator", ""), fine_ms(layer["median_s"]), fine_ms(layer["p95_s"]))
        for layer in _ranked(layers, lambda layer: layer["median_s"], show_all=show_all)
    ]
    title = f"{measured['model']} on {measured.get('where', 'local')}"
    columns = ("layer", "operator", ">median ms", ">p95 ms")
    _print_table(columns, rows, title, "slowest first", show_all=show_all)
    console().print(f"sum of medians {ms(sum(layer['median_s'] for layer in layers))} ms")
    if slices := measured.get("slices"):
        title = "slices that plans choose, measured whole"
        _print_table(SLICE_COLUMNS, [_slice_row(slice_) for slice_ in slices], title, show_all=show_all)
    if measured.get("measurement"):
        console().print(f"used by plans: {measured['measurement']}")
    for note in measured.get("notes", ()):
        console().print(note)
    if codecs := measured.get("codecs"):
        ranked = _ranked(codecs, lambda codec: codec["raw_bytes"] - codec["zstd_bytes"], show_all=show_all)
        codec_rows = list(map(_codec_row, ranked))
        _print_table(CODEC_COLUMNS, codec_rows, "lossy codecs, zstd besides", "largest saving first", show_all=show_all)


def _ranked(rows: Sequence[Any], key: Callable[[Any], float], *, show_all: bool) -> Sequence[Any]:
    """The rows, those with the largest key first where only a part will be printed."""
    return rows if show_all or len(rows) <= FEW_ROWS else sorted(rows, key=key, reverse=True)


def _print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str, order: str = "", *, show_all: bool
) -> None:
    """Print a table, or its first rows, in the `order` that is named then, and how many more there are."""
    more = 0 if show_all else max(0, len(rows) - FEW_ROWS)
    console().print(table(columns, rows[: len(rows) - more], title=f"{title}, {order}" if more and order else title))
    if more:
        console().print(f"… and {more} more; --all prints all of them")


def _print_device_measurements(measured: dict[str, Any], *, show_all: bool) -> None:
    """Print what a device measured beside what its plan predicted."""
    basis = "" if measured["measured"] == "measured" else f" ({measured['measured']})"
    title = f"{measured['model']} at work on {measured['where']}{basis}, {measured['requests']} requests"
    rows = [
        (
            _layer_range(slice_["layers"]),
            str(len(slice_["layers"])),
            fine_ms(slice_["seconds"]),
            fine_ms(slice_["predicted_s"]),
        )
        for slice_ in measured["slices"]
    ]
    _print_table(("slice", ">layers", ">measured ms", ">planned ms"), rows, title, show_all=show_all)


def _layer_range(layers: Sequence[str]) -> str:
    return layers[0] if layers[0] == layers[-1] else f"{layers[0]} to {layers[-1]}"


def _slice_row(slice_: dict[str, Any]) -> tuple[str, ...]:
    times = (fine_ms(slice_[name]) for name in ("median_s", "p95_s", "summed_s"))
    return (_layer_range(slice_["layers"]), str(len(slice_["layers"])), *times)


def _codec_row(measurement: dict[str, Any]) -> tuple[str, ...]:
    accuracy, raw = measurement["accuracy"], measurement["accuracy_raw"]
    return (
        measurement["tensor"],
        measurement["codec"],
        *(format_size(measurement[name]) for name in ("raw_bytes", "bytes", "zstd_bytes")),
        *(fine_ms(measurement[name]) for name in ("encode_s", "decode_s")),
        *(percent_text(measurement[name]) for name in ("loss", "confirmed_loss")),
        "-" if accuracy is None else f"{accuracy:.1%} ({raw:.1%} raw)",
    )


def _count(layers: Any) -> int:
    return layers if isinstance(layers, int) else len(layers)
