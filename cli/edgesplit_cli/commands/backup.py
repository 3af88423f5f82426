"""`edgectl backup` and `edgectl restore`: a controller in one file, and back.

Both work on the data folder itself, on the controller's machine; the controller may run during a backup.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgesplit.errors import UsageError
from edgesplit.terminal_text import printable
from edgesplit_cli.kept_options import keep_given, kept_text
from edgesplit_cli.options.types import FILE, NEW_FILE, S3_URL
from edgesplit_cli.output import counted, json_option, print_result
from edgesplit_cli.progress import BYTES, progress_bar
from edgesplit_cli.settings import PASSPHRASE_VARIABLE
from edgesplit_cli.signing import ask_secret

if TYPE_CHECKING:
    from edgesplit_controller.backup.location import BackupLocation
    from edgesplit_controller.backup.rows import RestoredOperator

blobs_option = click.option(
    "--blobs", "blobs_url", type=S3_URL, envvar="EDGESPLIT_BLOBS", default="",
    help="s3://BUCKET/PREFIX with models and chunks (or $EDGESPLIT_BLOBS). [default: in the data folder]",
)  # fmt: skip
database_option = click.option(
    "--database", envvar="EDGESPLIT_DATABASE", default="",
    help="postgresql://… (or $EDGESPLIT_DATABASE). [default: SQLite in the data folder]",
)  # fmt: skip


@click.command()
@click.argument("file", metavar="FILE|s3://BUCKET/NAME", required=False)
@click.option("--without-keys", is_flag=True, help="Leave private keys and tokens out; then the file is not encrypted.")
@click.option("--without-blobs", is_flag=True, help="Leave models and chunks out: keep `blobs/` by other means.")
@click.option("--to", default="", metavar="PUBLIC-KEY", help="Encrypt for this key instead of with a passphrase.")
@click.option(
    "--new-recipient", type=NEW_FILE, help="Make a key for backups in this file, print its public part, and exit."
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@database_option
@blobs_option
@json_option
@click.pass_obj
def backup(
    data: Path, file: str | None, without_keys: bool, without_blobs: bool, to: str, new_recipient: Path | None,
    force: bool, database: str, blobs_url: str, as_json: bool,
) -> None:  # fmt: skip
    """Write keys, repository, database and blobs into FILE, also while the controller runs.

    FILE may be an object in an S3-compatible store, which is read back. Database and blobs are those that `edgectl up`
    keeps in the data folder, unless others are given.

    It is encrypted with a passphrase (prompted for, or $EDGESPLIT_PASSPHRASE), or --to a public key whose private key
    is kept elsewhere.

    The file is signed by this controller. Note the public key that is printed in a place that is not
    the controller's: `edgectl restore --signed-by` verifies the file with it.
    """
    from edgesplit_controller.backup.create import make_backup
    from edgesplit_controller.backup.envelope import BackupKey, make_recipient, parse_recipient
    from edgesplit_controller.backup.location import parse_location
    from edgesplit_controller.backup.origin import signer_of, signer_text
    from edgesplit_controller.storage.blob_location import blobs_for_command

    if new_recipient is not None:
        click.echo(make_recipient(new_recipient))
        return
    if file is None:
        raise UsageError("missing file to write the backup to: edgectl backup FILE")
    location = parse_location(file)
    url = database or kept_text(data, "database") or f"sqlite:///{data / 'controller.db'}"
    recipient = parse_recipient(to) if to else b""
    passphrase = "" if without_keys or to else ask_secret(f"passphrase of {file}", new=True)
    store_url = blobs_url or kept_text(data, "blobs")
    elsewhere = blobs_for_command(store_url, data, data) if store_url else nullcontext()
    with elsewhere as store, progress_bar("backup", *BYTES, quiet=as_json) as update:
        contents = make_backup(
            data, url, location, BackupKey(passphrase, recipient), keys=not without_keys, blobs=not without_blobs,
            now=time.time(), store=store, replace=force,
            progress=lambda done, of: update(completed=done, total=of),
        )  # fmt: skip
    size, files = location.size() or 0, len(contents.files)
    protection = "encrypted for that key" if to else "sealed" if not without_keys else "without keys, not encrypted"
    signer = signer_text(signer_of(data))
    result = {"file": str(location), "bytes": size, "files": files, "signer": signer}
    print_result(
        result, as_json, f"{location}: {files} files, {size / 1e6:.1f} MB, {protection}", f"signed by {signer}"
    )  # fmt: skip


@click.command()
@click.argument("file", metavar="FILE|s3://BUCKET/NAME")
@click.option("--key", "key_file", type=FILE, help="The private key of a backup that was made with --to.")
@click.option(
    "--signed-by", default="", metavar="PUBLIC-KEY",
    help="The controller's key that must have signed FILE, as `edgectl backup` printed it."
    " [default: keys/backup.key in the data folder]",
)  # fmt: skip
@click.option(
    "--unverified", is_flag=True,
    help="Restore a file whose maker cannot be verified, such as one of 0.2 without a passphrase. Its maker"
    " decides who is admin.",
)  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask whether the operators in FILE are to come back.")
@click.option(
    "--force",
    is_flag=True,
    help="Replace existing state: the old folder is kept beside it, PostgreSQL's rows are deleted.",
)
@database_option
@blobs_option
@json_option
@click.pass_obj
def restore(
    data: Path, file: str, key_file: Path | None, signed_by: str, unverified: bool, yes: bool, force: bool,
    database: str, blobs_url: str, as_json: bool,
) -> None:  # fmt: skip
    """Restore the controller in FILE into the (empty) data folder. Start it with `edgectl up` afterwards.

    FILE is believed where its passphrase opened it, or where it is signed by the controller: by the key in the data
    folder, or by --signed-by. The operators in it are shown, and come back only if you agree.
    """
    from edgesplit_controller.backup.envelope import BackupKey, read_header
    from edgesplit_controller.backup.location import parse_location
    from edgesplit_controller.backup.origin import parse_signer
    from edgesplit_controller.backup.restore import restore as restore_backup
    from edgesplit_controller.storage.blob_location import blobs_for_command

    if signed_by and unverified:
        raise UsageError("--signed-by verifies the file and --unverified does not: give one of them")
    signer = parse_signer(signed_by) if signed_by else b""
    location = parse_location(file)
    with location.reading() as raw:
        opened_with = read_header(raw).opened_with
    # Also where the header asks for none: a passphrase in the environment says that the file should be encrypted.
    needs_passphrase = opened_with == "passphrase" and key_file is None
    passphrase = ask_secret(f"passphrase of {file}") if needs_passphrase else os.environ.get(PASSPHRASE_VARIABLE, "")
    scratch = next(folder for folder in data.absolute().parents if folder.is_dir())
    elsewhere = blobs_for_command(blobs_url, data, scratch) if blobs_url else nullcontext()
    with elsewhere as store, ExitStack() as bar:
        update = bar.enter_context(progress_bar("restore", *BYTES, quiet=as_json))

        def confirm(operators: Sequence[RestoredOperator], origin: str) -> None:
            bar.close()
            _confirm_operators(location, operators, origin, yes=yes, quiet=as_json and yes)

        restored = restore_backup(
            location, data, BackupKey(passphrase, key_file=key_file), database_url=database, now=time.time(),
            replace=force, store=store, signed_by=signer, unverified=unverified, confirm=confirm,
            progress=lambda done, of: update(completed=done, total=of),
        )  # fmt: skip
    if blobs_url:
        keep_given(data, {"blobs": blobs_url})  # the next start would look in the folder otherwise
    created, replaced = datetime.fromtimestamp(restored.created), restored.replaced or None
    operators = [
        {"name": operator.name, "role": operator.role, "groups": list(operator.groups), "active": operator.is_active}
        for operator in restored.operators
    ]
    result = {
        "data": str(data), "created": restored.created, "devices": restored.devices, "replaced": replaced,
        "verified_by": None if restored.origin == "unverified" else restored.origin, "operators": operators,
    }  # fmt: skip
    print_result(
        result,
        as_json,
        f"{data}: {counted(restored.files, 'file')} and {counted(restored.devices, 'device')} as they were at"
        f" {created:%Y-%m-%d %H:%M}",
        *([f"the previous folder is now {replaced}"] if replaced else []),
        "The owner's token is not in a backup: the next start makes a new one. All browser sessions have ended.",
        "Start it with `edgectl up`. Devices that received a newer statement keep it until you deploy to them.",
    )


_ORIGINS = {
    "signature": "The controller's signature is valid.",
    "passphrase": "The passphrase opened it.",
    "unverified": "NOT VERIFIED: its maker is unknown.",
}
"""What is said about a backup's maker, by the origin."""


def _confirm_operators(
    file: BackupLocation, operators: Sequence[RestoredOperator], origin: str, *, yes: bool, quiet: bool
) -> None:
    """Show the operators that come back and ask for them, unless `yes`; UsageError where they are refused."""
    if not quiet:
        click.echo(f"{file}: {_ORIGINS[origin]} Operators that come back:", err=True)
        for operator in operators:
            groups = ", ".join(operator.groups) or "all groups"
            state = "" if operator.is_active else "  (revoked or expired)"
            click.echo(printable(f"  {operator.name}  {operator.role}  {groups}{state}"), err=True)
        if not operators:
            click.echo("  none", err=True)
    if yes:
        return
    try:
        is_agreed = click.confirm("Restore them?", err=True)
    except click.Abort:
        is_agreed = False
    if not is_agreed:
        raise UsageError("nothing was restored: the operators in the file need your consent, or --yes in a script")
