"""`edgectl export`: far halves of a release for servers that are not ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import click

from edgesplit.atomic_files import write_durably
from edgesplit.controller_client.client import ControllerClient
from edgesplit.errors import ModelRefused, UsageError
from edgesplit_cli.export_files import SERVICE, inference_service, triton_config, write_model
from edgesplit_cli.output import console, json_option, print_json
from edgesplit_cli.settings import connect

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wanted:
    """Which halves, and how."""

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


def _options(command: F) -> F:
    """What both kinds share."""
    for option in reversed(
        (
            click.argument("model"),
            click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder."),
            click.option("--device", "device_class", default="", help="Device class. [default: each in the release]"),
            click.option("--row", default="", help="A row of the plan, as in cut-1. [default: all that can be]"),
            click.option("--instances", type=click.IntRange(0, 1024), default=0, help="Of each, on the server's CPU."),
            click.option("--decrypt", is_flag=True, help="Write an encrypted release's slices in clear."),
            json_option,
        )
    ):
        command = option(command)
    return command


@export.command()
@_options
@click.pass_obj
def triton(data: Path, /, out: Path, as_json: bool, **wanted: Any) -> None:
    """Write a Triton model repository: a model for each row of the plans that needs a server.

    MODEL is a model, whose newest release is taken, or a release by the beginning of its digest. The folder is what
    `tritonserver --model-repository` takes; several releases may lie in one.
    """
    release, models = _write(connect(data), Wanted(**wanted), out)
    told = {"release": release["release"], "model": release["model"], "folder": str(out), "models": models}
    if as_json:
        print_json(told)
        return
    _show(told)
    console().print(f"serve them: tritonserver --model-repository={out}")


@export.command()
@_options
@click.option(
    "--storage",
    required=True,
    metavar="URI",
    help="Where the folder `models` will lie for KServe, as in s3://bucket/digits or pvc://claim/digits.",
)
@click.option("--namespace", default="", help="Of the InferenceService.")
@click.pass_obj
def kserve(data: Path, /, out: Path, storage: str, namespace: str, as_json: bool, **wanted: Any) -> None:
    """Write a KServe InferenceService and the model repository that it serves, by KServe's Triton runtime.

    MODEL is a model, whose newest release is taken, or a release by the beginning of its digest. Copy OUT/models to
    the storage that you name, then `kubectl apply -f OUT/inference-service.yaml`.
    """
    if "://" not in storage:
        raise UsageError(f"--storage {storage!r} is not a URI, as in s3://bucket/digits or pvc://claim/digits")
    release, models = _write(connect(data), Wanted(**wanted), out / "models")
    manifest = inference_service(release["release"], release["model"], storage, namespace=namespace)
    write_durably(out / SERVICE, manifest.encode())
    told = {"release": release["release"], "model": release["model"], "folder": str(out), "models": models}
    if as_json:
        print_json({**told, "manifest": str(out / SERVICE), "storage": storage})
        return
    _show(told)
    console().print(f"copy {out / 'models'} to {storage}, then: kubectl apply -f {out / SERVICE}")


def _write(api: ControllerClient, wanted: Wanted, folder: Path) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The halves that are wanted, written into `folder`; the release, and what was written."""
    path = f"/v1/releases/{quote(wanted.model, safe='')}"
    release = api.get(f"{path}/halves")
    halves = chosen(release["halves"], wanted.device_class, wanted.row)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for half in halves:
        config = triton_config(half["name"], half["inputs"], half["outputs"], wanted.instances)
        which = {"device_class": half["device_class"], "row": half["row"]}
        model = api.download(f"{path}/half", **which, **({"decrypt": "true"} if wanted.decrypt else {}))
        write_model(folder, half["name"], config, model)
        written.append({"name": half["name"], **which, "after": half["after"], "bytes": len(model)})
    return release, written


def chosen(halves: Sequence[Mapping[str, Any]], device_class: str, row: str) -> list[Mapping[str, Any]]:
    """Those that were asked for and can be exported; ModelRefused or UsageError where that is none of them."""
    if not halves:
        raise ModelRefused("every device of this release answers alone: nothing of it runs on a server")
    asked = [one for one in halves if device_class in ("", one["device_class"]) and row in ("", one["row"])]
    if not asked:
        known = sorted({f"{one['device_class']} {one['row']}" for one in halves})
        raise UsageError(f"no such half of this release; there are: {', '.join(known)}")
    refused = [str(one["refusal"]) for one in asked if one["refusal"]]
    able = [one for one in asked if not one["refusal"]]
    if refused and (row or not able):
        raise ModelRefused(refused[0])
    for refusal in refused:
        click.echo(f"left out: {refusal}", err=True)
    return able


def _show(told: Mapping[str, Any]) -> None:
    console().print(f"release {told['release'][:16]}…  of {told['model']}  in {told['folder']}")
    for one in told["models"]:
        after = f" (after {one['after']})" if one["after"] else ""
        console().print(
            f"  {one['device_class']} {one['row']}{after}: {one['name']}  {one['bytes']:,} bytes", soft_wrap=True
        )
