"""One run of `edgectl flash`: check the options, confirm once, write card after card, wait for the devices."""

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
from edgesplit.identifiers import parse_label
from edgesplit.quantities import format_size
from edgesplit_cli.flash import prompts
from edgesplit_cli.flash.output import FlashPlan, progress_bars, show_finished_card, show_plan
from edgesplit_cli.output import console, print_json
from edgesplit_provisioning.image import archive, card, options, subprocesses
from edgesplit_provisioning.image.batch import BatchRow, Journal, read_rows
from edgesplit_provisioning.image.boot_files import BootFiles, build_boot_files
from edgesplit_provisioning.image.detect import why_board_may_not_boot
from edgesplit_provisioning.image.device_config import (
    BatchSettings,
    DeviceSettings,
    card_settings,
    check_name_is_free,
    checked_board,
    profile_of,
    read_claim,
    request_claim,
    why_unreachable,
)
from edgesplit_provisioning.image.installer import KitSource, coral_packages, kit_for
from edgesplit_provisioning.image.target_checks import FlashTarget, resolve_target
from edgesplit_provisioning.image.wait_online import WaitProgress, wait_online
from edgesplit_provisioning.kit import Kit

HOSTNAME_PLACEHOLDER = "{hostname}"
"""Placeholder in `--to` that is replaced by the host name."""
CLAIM_PLACEHOLDER = b'{"dry run": "a claim of about this size is made when a card is written"}' + b" " * 4_000
"""Stands for a claim where none is made: in the space check and in a dry run."""


class FlashSession:
    """One run of the command."""

    def __init__(self, connect: Callable[[], ControllerClient], as_json: bool, arguments: dict[str, Any]) -> None:
        """Check everything that can be wrong with the options before anything is written."""
        subprocesses.check_programs()
        self._arguments, self._as_json = arguments, as_json
        self._image: Path = arguments["image"]
        archive.compression(self._image)
        self._digest = archive.expected_digest(self._image, arguments["sha256"])
        self._coral = coral_packages(arguments["coral"], arguments["coral_debs"])
        self._claim: bytes | None = None
        self._journal = Journal.beside(arguments["batch"]) if arguments["batch"] is not None else None
        self._devices = self._requested_devices()
        self._batch_settings = BatchSettings(
            board=checked_board(arguments["device"]),
            device_class=profile_of(arguments["device"], coral=self._coral is not None),
            user=options.checked_user_name(arguments["user"]) if arguments["user"] is not None else None,
            ssh_keys=options.read_ssh_keys(arguments["ssh_key"]) if arguments["ssh_key"] is not None else (),
            sudo=arguments["sudo"],
            wifi=prompts.prompt_network(arguments["ssid"], arguments["wifi_password_file"], arguments["wifi_country"]),
            link=arguments["link"],
            expires_s=int(arguments["expires_s"]),
            replace=arguments["replace"],
        )
        self._api = None if arguments["dry_run"] or (self._claim and not arguments["wait"]) else connect()
        if self._api is not None and self._claim is None:
            for device in self._devices:
                check_name_is_free(self._api, device.hostname, arguments["replace"])

    def _requested_devices(self) -> list[DeviceSettings]:
        arguments = self._arguments
        if self._journal is not None:
            return self._devices_of_table(arguments["batch"], self._journal)
        name: str | None = arguments["hostname"]
        if arguments["claim_file"] is not None:
            claim, self._claim = read_claim(arguments["claim_file"], name)
            name = claim.device
        name = (
            options.checked_hostname(name)
            if name is not None
            else options.random_hostname(checked_board(arguments["device"]))
        )
        labels = dict(parse_label(text) for text in arguments["labels"])
        return [DeviceSettings(hostname=name, group=arguments["group"], labels=labels)]

    def _devices_of_table(self, file: Path, journal: Journal) -> list[DeviceSettings]:
        arguments = self._arguments
        if arguments["hostname"] is not None or arguments["claim_file"] is not None:
            raise UsageError(
                "--batch takes names from its table and makes a claim for each: leave --hostname and --claim"
            )
        if not arguments["to"].startswith("/dev/") and HOSTNAME_PLACEHOLDER not in arguments["to"]:
            raise UsageError(
                f"--batch into files needs {HOSTNAME_PLACEHOLDER} in --to, as in --to cards/{HOSTNAME_PLACEHOLDER}.img"
            )
        common = dict(parse_label(text) for text in arguments["labels"])

        def device(line: BatchRow) -> DeviceSettings:
            labels = {**common, **line.labels}
            return DeviceSettings(hostname=line.hostname, group=line.group or arguments["group"], labels=labels)

        return [device(line) for line in read_rows(file) if line.hostname not in journal.done]

    def run(self) -> None:
        """Write all cards, then wait for the devices if that is asked for."""
        if not self._devices:
            click.echo(
                f"every device of {self._arguments['batch']} has its card ({self._journal and self._journal.file})"
            )
            return
        first = self._target(self._devices[0]) if self._journal is None else None
        if not self._arguments["dry_run"]:
            several = f"{len(self._devices)} cards, one after another, in {self._arguments['to']}"
            destination = first if first is not None else several
            prompts.confirm(self._image.name, destination, self._digest is not None, self._arguments["yes"])
        scratch = cache_folder() / "unpacked"
        with progress_bars(self._as_json) as stages:
            if self._digest is not None:
                archive.check_digest(self._image, self._digest, stages("checking"))
            with card.open_image(self._image, scratch, stages) as image:
                kit = self._kit(image, stages)
                if self._arguments["dry_run"]:
                    show_plan(self._plan(image, kit), self._as_json)
                    return
                done = [self._make_card(image, kit, device, first, scratch, stages) for device in self._devices]
        if self._as_json:
            print_json(done if self._journal is not None else done[0])
        if self._arguments["wait"]:
            self._wait()
        elif not self._as_json:
            name = self._devices[-1].hostname
            click.echo(f"Start the device with it; `edgectl device show {name}` says when it is online.")

    def _target(self, device: DeviceSettings) -> FlashTarget:
        to = Path(self._arguments["to"].replace(HOSTNAME_PLACEHOLDER, device.hostname))
        return resolve_target(to, fixed_disk=self._arguments["fixed_disk"])

    def _kit(self, image: card.Image, stages: card.Stages) -> Kit:
        arguments = self._arguments
        source = KitSource(
            cache=cache_folder(), folder=arguments["kit_folder"], extras=arguments["extras"],
            wheelhouse=arguments["wheelhouse"], interpreter=arguments["interpreter"], coral=self._coral,
        )  # fmt: skip
        if warning := why_board_may_not_boot(self._batch_settings.board, image.boot_names):
            click.echo(f"edgectl: {warning}", err=True)
        on_progress = stages("kit")
        kit = kit_for(image.detected, source, lambda _: on_progress(0, 1))
        on_progress(1, 1)
        card.check_boot_space(image, self._files(image, kit, self._devices[0], CLAIM_PLACEHOLDER))
        return kit

    def _files(self, image: card.Image, kit: Kit, device: DeviceSettings, claim: bytes) -> BootFiles:
        wanted = card_settings(self._batch_settings, device, image.detected)
        return build_boot_files(
            image.detected, wanted, kit.files, claim, image.cmdline, self._batch_settings.device_class
        )

    def _make_card(
        self, image: card.Image, kit: Kit, device: DeviceSettings, first: FlashTarget | None, scratch: Path,
        stages: card.Stages,
    ) -> dict[str, Any]:  # fmt: skip
        """Make one device's card: wait for it, request a claim, write, record in the journal."""
        target = first if first is not None else self._wait_for_card(device, image)
        _check_fits(image, target)
        claim = self._claim or request_claim(self._claim_client, self._batch_settings, device)
        if warning := why_unreachable(claim):
            click.echo(f"edgectl: {warning}", err=True)
        files = self._files(image, kit, device, claim)
        medium = target.open()
        try:
            if medium.size is None:
                medium.set_size(image.size)
            card.write(image, medium, files, scratch, stages)
        except BaseException:
            click.echo(f"edgectl: {target.name} is not usable: it has no partition table and boots nowhere", err=True)
            raise
        finally:
            medium.close()
        if self._journal is not None:
            self._journal.add(device.hostname, files.instance, target.name)
        result = {
            "device": device.hostname, "target": target.name, "bytes": image.size, "image": image.name,
            "digest": self._digest.source if self._digest else None, "format": image.detected.format.value,
            "system": image.detected.system.name, "python": kit.manifest.python, "machine": kit.manifest.machine,
            "instance": files.instance,
        }  # fmt: skip
        if not self._as_json:
            show_finished_card(result)
        return result

    @property
    def _claim_client(self) -> ControllerClient:
        if self._api is None:
            raise UsageError("a claim needs a controller")
        return self._api

    def _wait_for_card(self, device: DeviceSettings, image: card.Image) -> FlashTarget:
        """The card for that device: prompt until a card is inserted that may be written."""
        while True:
            if self._arguments["to"].startswith("/dev/"):
                nth = f"card {self._devices.index(device) + 1} of {len(self._devices)}, for {device.hostname}"
                click.echo(f"{nth}: put it into {self._arguments['to']} and press Enter", err=True)
                if not sys.stdin.readline():
                    raise click.Abort
            try:
                target = self._target(device)
                if self._journal and target.is_disk and (owner := card.card_owner(target.node)) in self._journal.done:
                    raise UsageError(f"this is the card of {owner}, which is done: take it out")
                _check_fits(image, target)
                return target
            except UsageError as error:
                if not self._arguments["to"].startswith("/dev/"):
                    raise
                click.echo(f"edgectl: {error}", err=True)

    def _plan(self, image: card.Image, kit: Kit) -> FlashPlan:
        files = self._files(image, kit, self._devices[0], CLAIM_PLACEHOLDER)
        return FlashPlan(image, kit, files, tuple(device.hostname for device in self._devices))

    def _wait(self) -> None:
        with console(quiet=self._as_json).status(Text("waiting for the devices")) as status:

            def on_progress(now: WaitProgress) -> None:
                states = ", ".join(f"{name} {state}" for name, state in list(now.states.items())[:6])
                status.update(
                    Text(f"{len(now.online)} of {len(now.states)} online after {now.seconds:.0f} s: {states}")
                )

            progress = wait_online(
                self._claim_client,
                [device.hostname for device in self._devices],
                self._arguments["wait_s"],
                on_progress,
            )
        if not self._as_json:
            click.echo(f"online: {', '.join(progress.online)}")


def _check_fits(image: card.Image, target: FlashTarget) -> None:
    """UsageError where the card is too small; no claim was made and nothing was written yet."""
    if target.size is not None and image.size > target.size:
        raise UsageError(
            f"{image.name} needs {format_size(image.size)}, and {target.name} has {format_size(target.size)}:"
            " take a larger card"
        )
