"""`edgectl adopt`: the agent onto machines that run already, over SSH."""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit_cli.output import console, json_option, print_json
from edgesplit_cli.settings import chosen_credentials
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages
from edgesplit_provisioning.ssh.adopt import Adopted, Adoption, Kit, Wish
from edgesplit_provisioning.ssh.connection import Ssh
from edgesplit_provisioning.ssh.decide import Means
from edgesplit_provisioning.ssh.facts import DATA, PREFIX, Survey
from edgesplit_provisioning.ssh.inventory import Host, check_distinct, parse_host, parse_label, read_batch
from edgesplit_provisioning.ssh.kit_selection import installer, kits
from edgesplit_provisioning.ssh.parallel import Outcome, each

WAIT_S = 180
DID = {
    "install": "installed", "upgrade": "upgraded", "repair": "repaired", "nothing": "up to date", "remove": "removed",
    "purge": "removed, with its identity",
}  # fmt: skip
WOULD = {
    "install": "would be installed", "upgrade": "would be upgraded", "repair": "would be repaired",
    "nothing": "is up to date", "remove": "would be removed", "purge": "would be removed, with its identity",
}  # fmt: skip
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("machines", nargs=-1, metavar="[USER@]HOST...")
@click.option(
    "--batch",
    type=_FILE,
    default=None,
    help="Adopt the machines in this CSV file too: columns host, name,"
    " device_class, group, labels (K=V K=V), link, port, key.",
)
@click.option("-p", "--port", type=click.IntRange(1, 65535), default=None, help="Of ssh there.")
@click.option("-i", "--key", type=_FILE, default=None, help="Private key for ssh.")
@click.option("-o", "ssh_options", multiple=True, metavar="OPTION", help="Given to ssh as it is; repeatable.")
@click.option("--name", default="", help="Of the device. [default: what the machine calls itself]")
@click.option("--device-class", default="", help="Its device profile. [default: by its device tree]")
@click.option("--group", default="", help="Group, for `--to group=NAME`.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be given several times.")
@click.option("--link", default="wifi", show_default=True, help="The link that plans assume.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the device is online.")
@click.option("--wait-seconds", type=click.IntRange(1, 86_400), default=WAIT_S, show_default=True, help="So long.")
@click.option("--replace", "replaces", is_flag=True, help="The name is a device's already: take it from that.")
@click.option("--remove", "removes", is_flag=True, help="Take the agent away again: service, user, programs.")
@click.option("--purge", is_flag=True, help="With --remove: its identity and data too.")
@click.option("--coral", is_flag=True, help="There is a Coral Edge TPU: install libedgetpu too.")
@click.option(
    "--coral-deb",
    "coral_debs",
    multiple=True,
    type=_FILE,
    help="The libedgetpu1 package for that machine, and what it needs there; repeatable.",
)
@click.option(
    "--interpreter",
    type=_FILE,
    default=None,
    help="A Python to bring where the machine has none that fits"
    " (JetPack 5, Mendel): an install_only archive of python-build-standalone for it.",
)
@click.option(
    "--wheelhouse",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="Take wheels from this folder, and none from a package index.",
)
@click.option("--extra", "extras", multiple=True, type=click.Choice(["tflite", "otel"]), help="Install this extra too.")
@click.option("--prefix", default=PREFIX, show_default=True, metavar="DIR", help="Where the agent is installed there.")
@click.option("--agent-data", default=DATA, show_default=True, metavar="DIR", help="Its data folder there.")
@click.option("--no-service", is_flag=True, help="There is no systemd: say how the agent is started.")
@click.option("--ask-sudo-password", is_flag=True, help="Ask for sudo's password (or $EDGESPLIT_SUDO_PASSWORD).")
@click.option("--dry-run", is_flag=True, help="Only look, and say what would be done.")
@json_option
@click.pass_obj
def adopt(data: Path, /, machines: tuple[str, ...], batch: Path | None, as_json: bool, **given: Any) -> None:
    """Make running machines devices: install the agent over SSH, enrol it, see it online.

    For Raspberry Pi OS, Debian, Ubuntu and JetPack, by your own ssh with its configuration, keys and known hosts. Doing
    it again upgrades, or says that all is up to date; what was cut off is continued.
    """
    hosts = _hosts(machines, batch, given)
    if given["purge"] and not given["removes"]:
        raise UsageError("--purge goes with --remove")
    alone = len(hosts) == 1 and sys.stdin.isatty()
    with tempfile.TemporaryDirectory(prefix="es-") as folder, _Bars(hosts, quiet=as_json) as bars:
        work = _work(data, given, Path(folder), ask=_password(given["ask_sudo_password"], alone))

        def one(host: Host) -> Adopted:
            told = work.told_by(bars.of(host))
            with Ssh(host, given["ssh_options"], may_ask=alone) as ssh:
                return work.carry_out(told, ssh)

        outcomes = each(hosts, one, bars.finished)
    if as_json:
        print_json([_shown(outcome) for outcome in outcomes])
    else:
        for outcome in outcomes:
            _say(outcome, {**given, "several": len(outcomes) > 1})
    if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
        if len(outcomes) > 1 or as_json:
            raise SystemExit(failed[0].exit_code)
        raise failed[0]


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is done with each machine."""

    adoption: Adoption
    removes: bool
    purge: bool

    def told_by(self, told: Callable[..., None]) -> Adoption:
        return replace(self.adoption, told=told)

    def carry_out(self, adoption: Adoption, ssh: Ssh) -> Adopted:
        return adoption.remove(ssh, installer(), purge=self.purge) if self.removes else adoption.adopt(ssh)


def _work(data: Path, given: dict[str, Any], folder: Path, ask: Callable[[str], str]) -> _Work:
    chosen = chosen_credentials(data)
    held = credentials.read(chosen) if chosen else credentials.of_folder(data)
    make = kits(cache_folder(), given["extras"], given["interpreter"], given["wheelhouse"], lambda text: None)
    coral = CoralPackages(given["coral_debs"]) if given["coral"] else None

    def kit_for(means: Means, seen: Survey, wanted: bool) -> Kit:
        return make(means, seen, coral.archive(means.machine, folder) if coral is not None and wanted else None)

    wish = Wish(
        coral=given["coral"], interpreter=given["interpreter"] is not None, prefix=_place(given["prefix"], "--prefix"),
        data=_place(given["agent_data"], "--agent-data"), service=not given["no_service"], replace=given["replaces"],
        link=given["link"], wait_s=given["wait_seconds"] if given["wait"] else 0.0, dry_run=given["dry_run"],
    )  # fmt: skip
    adoption = Adoption(ControllerClient.by(held), held.ca_pem, wish, kit_for, ask_password=ask)
    return _Work(adoption, given["removes"], given["purge"])


def _place(text: str, option: str) -> str:
    """A folder there of our own: never one that a system is made of."""
    parts = Path(text).parts
    if not text.startswith("/") or ".." in parts or len(parts) < 3 or not text.isprintable():
        raise UsageError(f"{option} {text[:80]!r}: an absolute path of a folder of the agent's own, as in {PREFIX}")
    return str(Path(text))


def _hosts(machines: Sequence[str], batch: Path | None, given: dict[str, Any]) -> list[Host]:
    """The machines, with what is said of all of them where a line of the batch says nothing."""
    hosts = [parse_host(text) for text in machines] + (read_batch(batch) if batch else [])
    if not hosts:
        raise UsageError("say which machine: edgectl adopt user@host, or --batch FILE")
    if given["name"] and len(hosts) > 1:
        raise UsageError("--name is for one machine; name several in a CSV file, with --batch")
    labels = dict(parse_label(text) for text in given["labels"])
    hosts = [
        replace(
            host,
            port=host.port or given["port"],
            key=host.key or str(given["key"] or ""),
            name=host.name or given["name"],
            device_class=host.device_class or given["device_class"],
            group=host.group or given["group"],
            labels={**labels, **host.labels},
        )
        for host in hosts
    ]
    check_distinct(hosts)
    return hosts


def _password(wanted: bool, alone: bool) -> Callable[[str], str]:
    """Asked for once, for all machines."""
    known = os.environ.get("EDGESPLIT_SUDO_PASSWORD", "")
    if wanted and not known:
        known = click.prompt("password for sudo there", hide_input=True, err=True)
    if known or not alone:
        return lambda target: known
    return lambda target: str(click.prompt(f"password for sudo on {target}", hide_input=True, err=True, default=""))


class _Bars:
    """A line for each machine."""

    def __init__(self, hosts: Sequence[Host], *, quiet: bool) -> None:
        columns = (TextColumn("{task.fields[host]}"), BarColumn(), DownloadColumn(), TextColumn("{task.description}"))
        out = console(quiet=quiet)
        self._bars = Progress(*columns, console=out, transient=True, disable=not out.is_terminal)
        self._tasks = {id(host): self._bars.add_task("waiting", total=None, host=host.target) for host in hosts}

    def __enter__(self) -> _Bars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def of(self, host: Host) -> Callable[..., None]:
        def told(doing: str, done: int = 0, of: int = 0) -> None:
            known = {"completed": done, "total": of} if of else {}
            self._bars.update(self._tasks[id(host)], description=doing, **known)  # type: ignore[arg-type]

        return told

    def finished(self, outcome: Outcome) -> None:
        self._bars.remove_task(self._tasks[id(outcome.host)])


def _shown(outcome: Outcome) -> dict[str, Any]:
    if outcome.error is not None:
        return {"host": outcome.host.target, "error": str(outcome.error), "kind": type(outcome.error).__name__}
    assert outcome.adopted is not None
    return dataclasses.asdict(outcome.adopted)


def _say(outcome: Outcome, given: dict[str, Any]) -> None:
    done = outcome.adopted
    if done is None:
        if outcome.error is not None and given["several"]:
            click.echo(f"{outcome.host.target}: {outcome.error}", err=True)
        return
    if given["removes"] and done.did == "nothing":
        click.echo(f"{done.host}: no agent is installed there ({done.system})")
        return
    what = (WOULD if given["dry_run"] else DID)[done.did]
    online = f", {done.state}" if done.state else ""
    version = f" edgesplit {done.version}" if done.version else ""
    click.echo(f"{done.host}: {done.device or 'no device'} {what},{version}{online} ({done.system})")
    if done.warning:
        click.echo(f"edgectl: {done.warning}", err=True)
    if done.start:
        click.echo(f"there is no service: start it there, as its own user, with `{done.start}`")
    if given["removes"] and done.device:
        click.echo(f"the controller still lets it in: `edgectl device revoke {done.device}` ends that")
