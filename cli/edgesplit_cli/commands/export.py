"""`edgectl export`: writes remote halves of a release for inference servers of other makers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from edgesplit.atomic_files import write_durably
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import ModelRefused, UsageError
from edgesplit_cli.export_files import SERVICE_FILE, inference_service, triton_config, write_model
from edgesplit_cli.options.completion import complete_models
from edgesplit_cli.options.types import NEW_FOLDER, option_group
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.settings import connect, segment


@dataclass(frozen=True)
class ExportRequest:
    """Which remote halves to export, and how."""

    model: str
    device_class: str
    row: str
    decrypt: bool
    instances: int


@click.group()
def export() -> None:
    """Write the cloud's part of a release for another server: Triton, KServe, or any that serves ONNX.

    Devices use it where the release was deployed with `--offload URL`.
    """


_export_options = option_group(
    click.argument("model", shell_complete=complete_models),
    click.option("--out", type=NEW_FOLDER, required=True, help="Folder to write."),
    click.option("--device", "device_class", default="", help="Device class. [default: each in the release]"),
    click.option("--row", default="", help="A row of the plan, as in cut-1. [default: all that can be]"),
    click.option(
        "--instances",
        type=click.IntRange(0, 1024),
        default=0,
        help="Instances of each model on the server's CPU.",
    ),
    click.option("--decrypt", is_flag=True, help="Write an encrypted release's slices in clear."),
    json_option,
)


@export.command()
@_export_options
@click.pass_obj
def triton(data: Path, /, out: Path, as_json: bool, **options: Any) -> None:
    """Write a Triton model repository: a model for each row of the plans that needs a server.

    MODEL is a model, whose newest release is taken, or a release by the beginning of its digest. The folder is what
    `tritonserver --model-repository` takes; several releases may share one.
    """
    release, models = _write_halves(connect(data), ExportRequest(**options), out)
    result = {"release": release["release"], "model": release["model"], "folder": str(out), "models": models}
    print_result(result, as_json, *_result_lines(result), f"serve them: tritonserver --model-repository={out}")


@export.command()
@_export_options
@click.option(
    "--storage", required=True, metavar="URI",
    help="Where the folder `models` will lie for KServe, as in s3://bucket/digits or pvc://claim/digits.",
)  # fmt: skip
@click.option("--namespace", default="", help="Namespace of the InferenceService.")
@click.pass_obj
def kserve(data: Path, /, out: Path, storage: str, namespace: str, as_json: bool, **options: Any) -> None:
    """Write a KServe InferenceService and the model repository that it serves, by KServe's Triton runtime.

    MODEL is a model, whose newest release is taken, or a release by the beginning of its digest. Copy OUT/models to the
    storage that you name, then `kubectl apply -f OUT/inference-service.yaml`.
    """
    if "://" not in storage:
        raise UsageError(f"--storage {storage!r} is not a URI, as in s3://bucket/digits or pvc://claim/digits")
    release, models = _write_halves(connect(data), ExportRequest(**options), out / "models")
    manifest = inference_service(release["release"], release["model"], storage, namespace=namespace)
    write_durably(out / SERVICE_FILE, manifest.encode())
    result = {"release": release["release"], "model": release["model"], "folder": str(out), "models": models}
    hint = f"copy {out / 'models'} to {storage}, then: kubectl apply -f {out / SERVICE_FILE}"
    document = {**result, "manifest": str(out / SERVICE_FILE), "storage": storage}
    print_result(document, as_json, *_result_lines(result), hint)


def _write_halves(
    api: ControllerClient, request: ExportRequest, folder: Path
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """Write the requested halves into `folder`; returns the release and the halves written."""
    path = f"/v1/releases/{segment(request.model)}"
    release = api.get(f"{path}/remote-halves")
    halves = select_halves(release["halves"], request.device_class, request.row)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for half in halves:
        config = triton_config(half["name"], half["inputs"], half["outputs"], request.instances)
        which = {"device_class": half["device_class"], "row": half["row"]}
        model = api.download(f"{path}/remote-half", **which, **({"decrypt": "true"} if request.decrypt else {}))
        write_model(folder, half["name"], config, model)
        written.append({"name": half["name"], **which, "split_after": half["split_after"], "bytes": len(model)})
    return release, written


def select_halves(halves: Sequence[Mapping[str, Any]], device_class: str, row: str) -> list[Mapping[str, Any]]:
    """The requested halves that can be exported; ModelRefused or UsageError where there are none."""
    if not halves:
        raise ModelRefused("no device of this release offloads: nothing of it runs on a server")
    requested = [half for half in halves if device_class in ("", half["device_class"]) and row in ("", half["row"])]
    if not requested:
        known = sorted({f"{half['device_class']} {half['row']}" for half in halves})
        raise UsageError(f"no such half of this release; there are: {', '.join(known)}")
    refused = [str(half["refusal"]) for half in requested if half["refusal"]]
    exportable = [half for half in requested if not half["refusal"]]
    if refused and (row or not exportable):
        raise ModelRefused(refused[0])
    for refusal in refused:
        click.echo(f"left out: {refusal}", err=True)
    return exportable


def _result_lines(result: Mapping[str, Any]) -> Iterator[str]:
    yield f"release {result['release'][:16]}…  of {result['model']}  in {result['folder']}"
    for half in result["models"]:
        after = f" (after {half['split_after']})" if half["split_after"] else ""
        yield f"  {half['device_class']} {half['row']}{after}: {half['name']}  {half['bytes']:,} bytes"
