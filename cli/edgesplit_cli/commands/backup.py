"""`edgectl backup` and `edgectl restore`: a controller in one file, and back.

Both work on the data folder itself, on the controller's machine; the controller may run during a backup.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import click

from edgesplit.errors import UsageError
from edgesplit_cli.options.types import FILE, NEW_FILE
from edgesplit_cli.output import json_option, print_result
from edgesplit_cli.progress import BYTES, progress_bar
from edgesplit_cli.signing import ask_secret

database_option = click.option(
    "--database", envvar="EDGESPLIT_DATABASE", default="",
    help="postgresql://… (or $EDGESPLIT_DATABASE). [default: SQLite in the data folder]",
)  # fmt: skip


@click.command()
@click.argument("file", type=NEW_FILE, required=False)
@click.option("--without-keys", is_flag=True, help="Leave private keys and tokens out; then the file is not encrypted.")
@click.option("--without-blobs", is_flag=True, help="Leave models and chunks out: keep `blobs/` by other means.")
@click.option("--to", default="", metavar="PUBLIC-KEY", help="Encrypt for this key instead of with a passphrase.")
@click.option(
    "--new-recipient", type=NEW_FILE, help="Make a key for backups in this file, print its public part, and exit."
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@database_option
@json_option
@click.pass_obj
def backup(
    data: Path, file: Path | None, without_keys: bool, without_blobs: bool, to: str, new_recipient: Path | None,
    force: bool, database: str, as_json: bool,
) -> None:  # fmt: skip
    """Write keys, repository, database and blobs into FILE, also while the controller runs.

    It is encrypted with a passphrase (prompted for, or $EDGESPLIT_PASSPHRASE), or --to a public key whose private key
    is kept elsewhere.
    """
    from edgesplit_controller.backup.create import make_backup
    from edgesplit_controller.backup.envelope import BackupKey, make_recipient, parse_recipient

    if new_recipient is not None:
        click.echo(make_recipient(new_recipient))
        return
    if file is None:
        raise UsageError("missing file to write the backup to: edgectl backup FILE")
    url = database or f"sqlite:///{data / 'controller.db'}"
    recipient = parse_recipient(to) if to else b""
    passphrase = "" if without_keys or to else ask_secret(f"passphrase of {file}", new=True)
    with progress_bar("backup", *BYTES, quiet=as_json) as update:
        contents = make_backup(
            data, url, file, BackupKey(passphrase, recipient), keys=not without_keys, blobs=not without_blobs,
            now=time.time(), replace=force,
            progress=lambda done, of: update(completed=done, total=of),
        )  # fmt: skip
    size, files = file.stat().st_size, len(contents.files)
    protection = "encrypted for that key" if to else "sealed" if not without_keys else "without keys, not encrypted"
    result = {"file": str(file), "bytes": size, "files": files}
    print_result(result, as_json, f"{file}: {files} files, {size / 1e6:.1f} MB, {protection}")


@click.command()
@click.argument("file", type=FILE)
@click.option("--key", "key_file", type=FILE, help="The private key of a backup that was made with --to.")
@click.option(
    "--force",
    is_flag=True,
    help="Replace existing state: the old folder is kept beside it, PostgreSQL's rows are deleted.",
)
@database_option
@json_option
@click.pass_obj
def restore(data: Path, file: Path, key_file: Path | None, force: bool, database: str, as_json: bool) -> None:
    """Restore the controller in FILE into the (empty) data folder. Start it with `edgectl up` afterwards."""
    from edgesplit_controller.backup.envelope import BackupKey, read_header
    from edgesplit_controller.backup.restore import restore as restore_backup

    with file.open("rb") as raw:
        opened_with = read_header(raw).opened_with
    passphrase = ask_secret(f"passphrase of {file}") if opened_with == "passphrase" else ""
    with progress_bar("restore", *BYTES, quiet=as_json) as update:
        restored = restore_backup(
            file, data, BackupKey(passphrase, key_file=key_file), database_url=database, now=time.time(),
            replace=force, progress=lambda done, of: update(completed=done, total=of),
        )  # fmt: skip
    created, replaced = datetime.fromtimestamp(restored.created), restored.replaced or None
    result = {"data": str(data), "created": restored.created, "devices": restored.devices, "replaced": replaced}
    print_result(
        result,
        as_json,
        f"{data}: {restored.files} files and {restored.devices} devices as they were at {created:%Y-%m-%d %H:%M}",
        *([f"the previous folder is now {replaced}"] if replaced else []),
        "Start it with `edgectl up`. Devices that received a newer statement keep it until you deploy to them.",
    )
