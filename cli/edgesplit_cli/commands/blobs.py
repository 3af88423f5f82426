"""`edgectl blobs`: where models and chunks are stored."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click

from edgesplit.errors import UsageError
from edgesplit_cli.kept_options import kept_text, read_options, write_options
from edgesplit_cli.options.types import parse_store
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.progress import BYTES, progress_bar

VARIABLE = "EDGESPLIT_BLOBS"
FILES = "files"


@click.group()
def blobs() -> None:
    """Where models and chunks are stored: in the data folder, or in an S3-compatible object store."""


@blobs.command()
@click.argument("to", metavar="s3://BUCKET/PREFIX|files")
@click.option("--remove", is_flag=True, help="Delete what was moved from its old place.")
@json_option
@click.pass_obj
def move(data: Path, to: str, remove: bool, as_json: bool) -> None:
    """Copy every blob to another place, verified, and use that place from the next start on.

    It may begin while the controller runs and be repeated: only what is missing is copied. The change itself needs all
    controller processes to be stopped. `files` is the data folder.
    """
    from edgesplit_controller.storage.blob_location import blobs_for_command, copy_blobs
    from edgesplit_controller.storage.folder_lock import exclusive

    old, new = os.environ.get(VARIABLE, "") or kept_text(data, "blobs"), "" if to == FILES else parse_store(to)
    if not (data / "keys" / "ca.pem").is_file():
        raise UsageError(f"{data} is no controller's data folder: give it with `edgectl --data DIR blobs move ...`")
    if old == new:
        raise UsageError(f"the blobs are in {old or FILES} already")
    with (
        blobs_for_command(old, data, data) as source,
        blobs_for_command(new, data, data) as target,
        progress_bar("blobs", *BYTES, quiet=as_json) as update,
    ):
        copied = copy_blobs(source, target, lambda done, of: update(completed=done, total=of))
        try:
            with exclusive(data):
                copied = copy_blobs(source, target)  # what came meanwhile; returns the whole
                kept = {name: value for name, value in read_options(data).items() if name != "blobs"}
                write_options(data, {**kept, "blobs": new} if new else kept)
                for blob in source.list_blobs() if remove else ():
                    source.delete_stored_before(blob.sha256, math.inf)
        except UsageError as error:
            raise UsageError(
                f"{copied.blobs} blobs are in {new or FILES} now, and not used yet: {error}, then run this command"
                " again, which copies only what is new"
            ) from error
    variable = f" Set {VARIABLE} to it, which precedes what is kept." if os.environ.get(VARIABLE) else ""
    result = {"from": old or FILES, "to": new or FILES, "blobs": copied.blobs, "bytes": copied.bytes, "removed": remove}
    print_result(
        result, as_json, f"{copied.blobs} blobs, {copied.bytes / 1e6:.1f} MB, are in {new or FILES}, used from the next"
        f" start on.{variable}",
        *([] if remove else [f"Those in {old or f'{data}/blobs'} are not used any more: delete them once it works."]),
    )  # fmt: skip
