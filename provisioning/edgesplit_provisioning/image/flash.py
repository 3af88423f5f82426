"""One call of `edgectl flash`: what was asked is checked, asked about once, done card by card, and waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit_cli.output import console, print_json, size
from edgesplit_provisioning.image import archive, card, options, prompts, subprocesses
from edgesplit_provisioning.image.batch import Journal, Line, label, read_lines
from edgesplit_provisioning.image.boot_files import BootFiles, boot_files
from edgesplit_provisioning.image.detect import missing_board
from edgesplit_provisioning.image.device_config import (
    DeviceToBe,
    Orders,
    board,
    claim_for,
    claim_in,
    is_free,
    profile_of,
    unreachable,
    wishes_of,
)
from edgesplit_provisioning.image.installer import KitSource, coral_packages, kit_for
from edgesplit_provisioning.image.output import Plan, bars, show_done, show_plan
from edgesplit_provisioning.image.target_checks import Target, target
from edgesplit_provisioning.image.wait_online import Seen, wait_online
from edgesplit_provisioning.kit import Kit

PLACE = "{hostname}"
NO_CLAIM = b'{"dry run": "a claim of about this size is made when a card is written"}' + b" " * 4_000


class Session:
    """One call of the command."""

    def __init__(self, connect: Callable[[], ControllerClient], as_json: bool, asked: dict[str, Any]) -> None:
        """Everything that can be wrong with a call is found out here."""
        subprocesses.find_all()
        self._asked, self._as_json = asked, as_json
        self._image: Path = asked["image"]
        archive.compression(self._image)
        self._digest = archive.expected_digest(self._image, asked["sha256"])
        self._coral = coral_packages(asked["coral"], asked["coral_debs"])
        self._claim: bytes | None = None
        self._journal = Journal.beside(asked["batch"]) if asked["batch"] is not None else None
        self._devices = self._wanted()
        self._orders = Orders(
            board=board(asked["device"]),
            device_class=profile_of(asked["device"], coral=self._coral is not None),
            user=options.user_name(asked["user"]) if asked["user"] is not None else None,
            ssh_keys=options.ssh_keys(asked["ssh_key"]) if asked["ssh_key"] is not None else (),
            sudo=asked["sudo"],
            wifi=prompts.network(asked["ssid"], asked["wifi_password_file"], asked["wifi_country"]),
            link=asked["link"],
            expires_s=int(asked["expires_s"]),
            replace=asked["replace"],
        )
        self._api = None if asked["dry_run"] or (self._claim and not asked["wait"]) else connect()
        if self._api is not None and self._claim is None:
            for device in self._devices:
                is_free(self._api, device.hostname, asked["replace"])

    def _wanted(self) -> list[DeviceToBe]:
        asked = self._asked
        if self._journal is not None:
            return self._of_table(asked["batch"], self._journal)
        name: str | None = asked["hostname"]
        if asked["claim_file"] is not None:
            claim, self._claim = claim_in(asked["claim_file"], name)
            name = claim.device
        name = options.hostname(name) if name is not None else options.made_up_hostname(board(asked["device"]))
        labels = dict(label(one) for one in asked["labels"])
        return [DeviceToBe(hostname=name, group=asked["group"], labels=labels)]

    def _of_table(self, file: Path, journal: Journal) -> list[DeviceToBe]:
        asked = self._asked
        if asked["hostname"] is not None or asked["claim_file"] is not None:
            raise UsageError(
                "--batch takes names from its table and makes a claim for each: leave --hostname and --claim"
            )
        if not asked["to"].startswith("/dev/") and PLACE not in asked["to"]:
            raise UsageError(f"--batch into files needs {PLACE} in --to, as in --to cards/{PLACE}.img")
        common = dict(label(one) for one in asked["labels"])

        def device(line: Line) -> DeviceToBe:
            labels = {**common, **line.labels}
            return DeviceToBe(hostname=line.hostname, group=line.group or asked["group"], labels=labels)

        return [device(line) for line in read_lines(file) if line.hostname not in journal.done]

    def run(self) -> None:
        """All cards, then the wait."""
        if not self._devices:
            click.echo(f"every device of {self._asked['batch']} has its card ({self._journal and self._journal.file})")
            return
        first = self._target(self._devices[0]) if self._journal is None else None
        if not self._asked["dry_run"]:
            many = f"{len(self._devices)} cards, one after another, in {self._asked['to']}"
            to = first if first is not None else many
            prompts.confirm(self._image.name, to, self._digest is not None, self._asked["yes"])
        scratch = cache_folder() / "unpacked"
        with bars(self._as_json) as stages:
            if self._digest is not None:
                archive.check_digest(self._image, self._digest, stages("checking"))
            with card.opened(self._image, scratch, stages) as image:
                kit = self._kit(image, stages)
                if self._asked["dry_run"]:
                    show_plan(self._plan(image, kit), self._as_json)
                    return
                done = [self._card(image, kit, device, first, scratch, stages) for device in self._devices]
        if self._as_json:
            print_json(done if self._journal is not None else done[0])
        if self._asked["wait"]:
            self._wait()
        elif not self._as_json:
            name = self._devices[-1].hostname
            click.echo(f"Start the device with it; `edgectl device show {name}` says when it is online.")

    def _target(self, device: DeviceToBe) -> Target:
        to = Path(self._asked["to"].replace(PLACE, device.hostname))
        return target(to, fixed_disk=self._asked["fixed_disk"])

    def _kit(self, image: card.Image, stages: card.Stages) -> Kit:
        asked = self._asked
        source = KitSource(
            cache=cache_folder(), folder=asked["kit_folder"], extras=asked["extras"], wheelhouse=asked["wheelhouse"],
            interpreter=asked["interpreter"], coral=self._coral,
        )  # fmt: skip
        if why := missing_board(self._orders.board, image.boot_names):
            click.echo(f"edgectl: {why}", err=True)
        told = stages("kit")
        kit = kit_for(image.found, source, lambda _: told(0, 1))
        told(1, 1)
        card.room_for(image, self._files(image, kit, self._devices[0], NO_CLAIM))
        return kit

    def _files(self, image: card.Image, kit: Kit, device: DeviceToBe, claim: bytes) -> BootFiles:
        wanted = wishes_of(self._orders, device, image.found)
        return boot_files(image.found, wanted, kit.files, claim, image.cmdline, self._orders.device_class)

    def _card(
        self, image: card.Image, kit: Kit, device: DeviceToBe, first: Target | None, scratch: Path,
        stages: card.Stages,
    ) -> dict[str, Any]:  # fmt: skip
        """One device's card, from asking for it to its line in the journal."""
        to = first if first is not None else self._inserted(device, image)
        _fits(image, to)
        claim = self._claim or claim_for(self._claiming, self._orders, device)
        if why := unreachable(claim):
            click.echo(f"edgectl: {why}", err=True)
        files = self._files(image, kit, device, claim)
        medium = to.open()
        try:
            if medium.size is None:
                medium.set_size(image.size)
            card.write(image, medium, files, scratch, stages)
        except BaseException:
            click.echo(f"edgectl: {to.name} is not usable: it has no partition table and boots nowhere", err=True)
            raise
        finally:
            medium.close()
        if self._journal is not None:
            self._journal.add(device.hostname, files.instance, to.name)
        done = {
            "device": device.hostname, "target": to.name, "bytes": image.size, "image": image.name,
            "digest": self._digest.source if self._digest else None, "format": image.found.format.value,
            "system": image.found.system.name, "python": kit.described.python, "machine": kit.described.machine,
            "instance": files.instance,
        }  # fmt: skip
        if not self._as_json:
            show_done(done)
        return done

    @property
    def _claiming(self) -> ControllerClient:
        if self._api is None:
            raise UsageError("a claim needs a controller")
        return self._api

    def _inserted(self, device: DeviceToBe, image: card.Image) -> Target:
        """The card for that device: asked for until there is one that may be written."""
        while True:
            if self._asked["to"].startswith("/dev/"):
                nth = f"card {self._devices.index(device) + 1} of {len(self._devices)}, for {device.hostname}"
                click.echo(f"{nth}: put it into {self._asked['to']} and press Enter", err=True)
                if not sys.stdin.readline():
                    raise click.Abort
            try:
                to = self._target(device)
                if self._journal and to.is_disk and (whose := card.whose(to.node)) in self._journal.done:
                    raise UsageError(f"this is the card of {whose}, which is done: take it out")
                _fits(image, to)
                return to
            except UsageError as error:
                if not self._asked["to"].startswith("/dev/"):
                    raise
                click.echo(f"edgectl: {error}", err=True)

    def _plan(self, image: card.Image, kit: Kit) -> Plan:
        files = self._files(image, kit, self._devices[0], NO_CLAIM)
        return Plan(image, kit, files, tuple(one.hostname for one in self._devices))

    def _wait(self) -> None:
        with console(quiet=self._as_json).status(Text("waiting for the devices")) as status:

            def told(seen: Seen) -> None:
                states = ", ".join(f"{name} {state}" for name, state in list(seen.states.items())[:6])
                status.update(
                    Text(f"{len(seen.online)} of {len(seen.states)} online after {seen.seconds:.0f} s: {states}")
                )

            seen = wait_online(self._claiming, [one.hostname for one in self._devices], self._asked["wait_s"], told)
        if not self._as_json:
            click.echo(f"online: {', '.join(seen.online)}")


def _fits(image: card.Image, to: Target) -> None:
    """UsageError for a card that is too small: nothing was claimed or written for it yet."""
    if to.size is not None and image.size > to.size:
        raise UsageError(
            f"{image.name} needs {size(image.size)}, and {to.name} has {size(to.size)}: take a larger card"
        )
