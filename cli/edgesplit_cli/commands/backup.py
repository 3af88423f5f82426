"""`edgectl backup` and `edgectl restore`: a controller in one file, and back.

Both work on the data folder itself, on the controller's machine; the controller may run during a backup.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from edgesplit.errors import UsageError
from edgesplit_cli.output import console, json_option, print_json
from edgesplit_cli.signing import ask_secret

database_option = click.option(
    "--database",
    envvar="EDGESPLIT_DATABASE",
    default="",
    help="postgresql://… (or $EDGESPLIT_DATABASE). [default: SQLite in the data folder]",
)


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--without-keys", is_flag=True, help="Leave private keys and tokens out; then the file is not sealed.")
@click.option("--without-blobs", is_flag=True, help="Leave models and chunks out: keep `blobs/` by other means.")
@click.option("--to", default="", metavar="PUBLIC-KEY", help="Seal it for this key instead of by a passphrase.")
@click.option(
    "--new-recipient",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Make a key for backups in this file, tell its public part, and end.",
)
@click.option("--force", is_flag=True, help="Replace FILE.")
@database_option
@json_option
@click.pass_obj
def backup(
    data: Path,
    file: Path | None,
    without_keys: bool,
    without_blobs: bool,
    to: str,
    new_recipient: Path | None,
    force: bool,
    database: str,
    as_json: bool,
) -> None:
    """Write keys, repository, database and blobs into FILE, also while the controller runs.

    It is sealed by a passphrase (asked for, or $EDGESPLIT_PASSPHRASE), or --to a key whose private part lies elsewhere.
    """
    from edgesplit_controller.backup.create import make_backup
    from edgesplit_controller.backup.envelope import Opener, make_recipient, parse_recipient

    if new_recipient is not None:
        click.echo(make_recipient(new_recipient))
        return
    if file is None:
        raise UsageError("say where the backup shall be written: edgectl backup FILE")
    url = database or f"sqlite:///{data / 'controller.db'}"
    recipient = parse_recipient(to) if to else b""
    passphrase = "" if without_keys or to else ask_secret(f"passphrase of {file}", new=True)
    with _bar("backup", as_json) as progress:
        contents = make_backup(
            data, url, file, Opener(passphrase, recipient), keys=not without_keys, blobs=not without_blobs,
            now=time.time(), progress=progress, replace=force,
        )  # fmt: skip
    if as_json:
        print_json({"file": str(file), "bytes": file.stat().st_size, "files": len(contents.files)})
        return
    sealed = "sealed for that key" if to else "sealed" if not without_keys else "without keys, not sealed"
    click.echo(f"{file}: {len(contents.files)} files, {file.stat().st_size / 1e6:.1f} MB, {sealed}")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--key",
    "key_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    default=None,
    help="The private key of a backup that was made with --to.",
)
@click.option(
    "--force", is_flag=True, help="Replace what is there: the folder is kept beside it, PostgreSQL's rows go."
)
@database_option
@json_option
@click.pass_obj
def restore(data: Path, file: Path, key_file: Path | None, force: bool, database: str, as_json: bool) -> None:
    """Put the controller in FILE back into the (empty) data folder. Start it with `edgectl up` afterwards."""
    from edgesplit_controller.backup.envelope import Opener, read_header
    from edgesplit_controller.backup.restore import restore as restore_backup

    with file.open("rb") as raw:
        how = read_header(raw).opened_with
    passphrase = ask_secret(f"passphrase of {file}") if how == "passphrase" else ""
    with _bar("restore", as_json) as progress:
        done = restore_backup(
            file, data, Opener(passphrase, key_file=key_file), database_url=database, now=time.time(),
            replace=force, progress=progress,
        )  # fmt: skip
    if as_json:
        told = {"data": str(data), "created": done.created, "devices": done.devices, "replaced": done.replaced or None}
        print_json(told)
        return
    made = datetime.fromtimestamp(done.created).strftime("%Y-%m-%d %H:%M")
    click.echo(f"{data}: {done.files} files and {done.devices} devices as they were at {made}")
    if done.replaced:
        click.echo(f"what was there before lies in {done.replaced}")
    click.echo("Start it with `edgectl up`. Devices that were told something newer keep it until you deploy to them.")


@contextmanager
def _bar(what: str, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(what), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console(quiet=as_json), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
