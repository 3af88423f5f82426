"""`edgectl adopt`: installs the agent over SSH on machines that already run."""

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
from rich.progress import TextColumn

from edgesplit.controller_client import credentials
from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit.identifiers import parse_label
from edgesplit_cli.options.agent import agent_options
from edgesplit_cli.options.types import FILE, FOLDER
from edgesplit_cli.output import json_option, print_json
from edgesplit_cli.progress import BYTES, make_bars
from edgesplit_cli.settings import chosen_credentials
from edgesplit_provisioning.kit import Kit
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages
from edgesplit_provisioning.ssh.adopt import Adopter, AdoptionResult, AdoptOptions
from edgesplit_provisioning.ssh.connection import Ssh
from edgesplit_provisioning.ssh.decide import InstallMeans
from edgesplit_provisioning.ssh.facts import DATA, PREFIX, MachineFacts
from edgesplit_provisioning.ssh.inventory import Host, check_distinct, parse_host, read_batch
from edgesplit_provisioning.ssh.kit_selection import installer_path, kit_maker
from edgesplit_provisioning.ssh.parallel import HostOutcome, run_parallel

WAIT_S = 180
DONE_TEXT = {
    "install": "installed", "upgrade": "upgraded", "repair": "repaired", "nothing": "up to date", "remove": "removed",
    "purge": "removed, with its identity", "configure": "given its options",
}  # fmt: skip
DRY_RUN_TEXT = {
    "install": "would be installed", "upgrade": "would be upgraded", "repair": "would be repaired",
    "nothing": "is up to date", "remove": "would be removed", "purge": "would be removed, with its identity",
    "configure": "would be given its options",
}  # fmt: skip


@click.command()
@click.argument("machines", nargs=-1, metavar="[USER@]HOST...")
@click.option(
    "--batch",
    type=FILE,
    help="Adopt the machines in this CSV file too: columns host, name,"
    " device_class, group, labels (K=V K=V), link, port, key.",
)
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="Port of ssh on the machines.")
@click.option("-i", "--key", type=FILE, help="Private key for ssh.")
@click.option("-o", "ssh_options", multiple=True, metavar="OPTION", help="Passed to ssh with -o; repeatable.")
@click.option("--name", default="", help="Name of the device. [default: the machine's host name]")
@click.option("--device-class", default="", help="Device profile. [default: by the machine's device tree]")
@click.option("--group", default="", help="Group, for `--to group=NAME`.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be given several times.")
@click.option("--link", default="wifi", show_default=True, help="Link that plans assume.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the device is online.")
@click.option(
    "--wait-seconds", type=click.IntRange(1, 86_400), default=WAIT_S, show_default=True, help="How long --wait waits."
)
@click.option("--replace", "replaces", is_flag=True, help="Take over the name of an existing device.")
@click.option("--remove", "removes", is_flag=True, help="Uninstall the agent: service, user, programs.")
@click.option("--purge", is_flag=True, help="With --remove: delete its identity and data too.")
@click.option("--coral", is_flag=True, help="There is a Coral Edge TPU: install libedgetpu too.")
@click.option(
    "--coral-deb", "coral_debs", multiple=True, type=FILE,
    help="The libedgetpu1 package for that machine, and what it needs there; repeatable.",
)  # fmt: skip
@click.option(
    "--interpreter",
    type=FILE,
    help="A Python to install where the machine has none that fits"
    " (JetPack 5, Mendel): an install_only archive of python-build-standalone for it.",
)
@click.option("--wheelhouse", type=FOLDER, help="Take wheels from this folder, and none from a package index.")
@click.option("--extra", "extras", multiple=True, type=click.Choice(["tflite", "otel"]), help="Install this extra too.")
@click.option("--prefix", default=PREFIX, show_default=True, metavar="DIR", help="Where the agent is installed there.")
@click.option("--agent-data", default=DATA, show_default=True, metavar="DIR", help="Its data folder there.")
@agent_options
@click.option("--no-service", is_flag=True, help="Without systemd: print the command that starts the agent.")
@click.option("--ask-sudo-password", is_flag=True, help="Ask for sudo's password (or $EDGESPLIT_SUDO_PASSWORD).")
@click.option("--dry-run", is_flag=True, help="Change nothing; print what would be done.")
@json_option
@click.pass_obj
def adopt(data: Path, /, machines: tuple[str, ...], batch: Path | None, as_json: bool, **options: Any) -> None:
    """Make running machines devices: install the agent over SSH, enrol it, wait until it is online.

    For Raspberry Pi OS, Debian, Ubuntu and JetPack, by your own ssh with its configuration, keys and known hosts.
    Repeating it upgrades, or reports that all is up to date; an interrupted run is continued.
    """
    hosts = _hosts(machines, batch, options)
    if options["purge"] and not options["removes"]:
        raise UsageError("--purge goes with --remove")
    alone = len(hosts) == 1 and sys.stdin.isatty()
    with tempfile.TemporaryDirectory(prefix="es-") as folder, _ProgressBars(hosts, quiet=as_json) as bars:
        ask_password = _password_source(options["ask_sudo_password"], alone)
        adopter = _make_adopter(data, options, Path(folder), ask_password)

        def process(host: Host) -> AdoptionResult:
            with_progress = replace(adopter, on_progress=bars.callback_for(host))
            with Ssh(host, options["ssh_options"], may_ask=alone) as ssh:
                if options["removes"]:
                    return with_progress.remove(ssh, installer_path(), purge=options["purge"])
                return with_progress.adopt(ssh)

        outcomes = run_parallel(hosts, process, bars.on_finished)
    if as_json:
        print_json([_to_dict(outcome) for outcome in outcomes])
    else:
        for outcome in outcomes:
            _print_outcome(outcome, {**options, "several": len(outcomes) > 1})
    if failed := [outcome.error for outcome in outcomes if outcome.error is not None]:
        if len(outcomes) > 1 or as_json:
            raise SystemExit(failed[0].exit_code)
        raise failed[0]


def _make_adopter(data: Path, options: dict[str, Any], folder: Path, ask_password: Callable[[str], str]) -> Adopter:
    chosen = chosen_credentials(data)
    login = credentials.read(chosen) if chosen else credentials.from_data_folder(data)
    make = kit_maker(cache_folder(), options["extras"], options["interpreter"], options["wheelhouse"])
    coral = CoralPackages(options["coral_debs"]) if options["coral"] else None

    def kit_for(means: InstallMeans, facts: MachineFacts, coral_wanted: bool) -> Kit:
        return make(means, facts, coral.archive(means.machine, folder) if coral is not None and coral_wanted else None)

    adopt_options = AdoptOptions(
        coral=options["coral"], interpreter=options["interpreter"] is not None,
        prefix=_checked_folder(options["prefix"], "--prefix"),
        data=_checked_folder(options["agent_data"], "--agent-data"), service=not options["no_service"],
        replace=options["replaces"], link=options["link"], wait_s=options["wait_seconds"] if options["wait"] else 0.0,
        dry_run=options["dry_run"], agent_options=options["agent_options"],
    )  # fmt: skip
    return Adopter(ControllerClient.from_credentials(login), login.ca_pem, adopt_options, kit_for, ask_password)


def _checked_folder(text: str, option: str) -> str:
    """A remote folder, as an absolute path of at least two components, so that no system folder is used."""
    parts = Path(text).parts
    if not text.startswith("/") or ".." in parts or len(parts) < 3 or not text.isprintable():
        raise UsageError(f"{option} {text[:80]!r}: an absolute path of a folder of the agent's own, as in {PREFIX}")
    return str(Path(text))


def _hosts(machines: Sequence[str], batch: Path | None, options: dict[str, Any]) -> list[Host]:
    """The machines; options apply where a line of the batch leaves a field empty."""
    hosts = [parse_host(text) for text in machines] + (read_batch(batch) if batch else [])
    if not hosts:
        raise UsageError("no machine is named: edgectl adopt user@host, or --batch FILE")
    if options["name"] and len(hosts) > 1:
        raise UsageError("--name is for one machine; name several in a CSV file, with --batch")
    labels = dict(parse_label(text) for text in options["labels"])
    hosts = [
        replace(
            host,
            port=host.port or options["port"],
            key=host.key or str(options["key"] or ""),
            name=host.name or options["name"],
            device_class=host.device_class or options["device_class"],
            group=host.group or options["group"],
            labels={**labels, **host.labels},
        )
        for host in hosts
    ]
    check_distinct(hosts)
    return hosts


def _password_source(is_requested: bool, is_interactive: bool) -> Callable[[str], str]:
    """A function that returns the sudo password: from the environment or one prompt for all machines, else a prompt per
    machine."""
    known = os.environ.get("EDGESPLIT_SUDO_PASSWORD", "")
    if is_requested and not known:
        known = click.prompt("password for sudo there", hide_input=True, err=True)
    if known or not is_interactive:
        return lambda target: known
    return lambda target: str(click.prompt(f"password for sudo on {target}", hide_input=True, err=True, default=""))


class _ProgressBars:
    """One progress line for each machine."""

    def __init__(self, hosts: Sequence[Host], *, quiet: bool) -> None:
        self._bars = make_bars(TextColumn("{task.fields[host]}"), *BYTES, TextColumn("{task.description}"), quiet=quiet)
        self._tasks = {id(host): self._bars.add_task("waiting", total=None, host=host.target) for host in hosts}

    def __enter__(self) -> _ProgressBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def callback_for(self, host: Host) -> Callable[..., None]:
        def on_progress(doing: str, done: int = 0, of: int = 0) -> None:
            byte_counts = {"completed": done, "total": of} if of else {}
            self._bars.update(self._tasks[id(host)], description=doing, **byte_counts)  # type: ignore[arg-type]

        return on_progress

    def on_finished(self, outcome: HostOutcome) -> None:
        self._bars.remove_task(self._tasks[id(outcome.host)])


def _to_dict(outcome: HostOutcome) -> dict[str, Any]:
    if outcome.error is not None:
        return {"host": outcome.host.target, "error": str(outcome.error), "kind": type(outcome.error).__name__}
    assert outcome.result is not None
    return dataclasses.asdict(outcome.result)


def _print_outcome(outcome: HostOutcome, options: dict[str, Any]) -> None:
    result = outcome.result
    if result is None:
        if outcome.error is not None and options["several"]:
            click.echo(f"{outcome.host.target}: {outcome.error}", err=True)
        return
    if options["removes"] and result.did == "nothing":
        click.echo(f"{result.host}: no agent is installed there ({result.system})")
        return
    action_text = (DRY_RUN_TEXT if options["dry_run"] else DONE_TEXT)[result.did]
    online = f", {result.state}" if result.state else ""
    version = f" edgesplit {result.version}" if result.version else ""
    click.echo(f"{result.host}: {result.device or 'no device'} {action_text},{version}{online} ({result.system})")
    if result.warning:
        click.echo(f"edgectl: {result.warning}", err=True)
    if result.start:
        click.echo(f"there is no systemd: start the agent there, as its own user, with `{result.start}`")
    if options["removes"] and result.device:
        click.echo(f"its certificate is still valid: `edgectl device revoke {result.device}` revokes it")
