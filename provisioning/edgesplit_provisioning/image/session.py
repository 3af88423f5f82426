"""One flash of cards: check the options, ask once, write card after card. What the operator sees and answers goes
through `FlashUser`; the result is a plan, or the cards that were written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from edgesplit.controller_client.client import ControllerClient
from edgesplit.controller_client.settings import cache_folder
from edgesplit.errors import UsageError
from edgesplit.quantities import format_size
from edgesplit_provisioning.flash_options import CardOptions
from edgesplit_provisioning.image import archive, card, options, subprocesses
from edgesplit_provisioning.image.batch import Journal, read_rows
from edgesplit_provisioning.image.boot_files import BootFiles, build_boot_files
from edgesplit_provisioning.image.detect import why_board_may_not_boot
from edgesplit_provisioning.image.device_config import (
    check_board,
    check_name_is_free,
    profile_of,
    request_claim,
    requested_device,
    why_unreachable,
)
from edgesplit_provisioning.image.installer import kit_for
from edgesplit_provisioning.image.options import CardSettings, DeviceSettings
from edgesplit_provisioning.image.target_checks import FlashTarget, resolve_target
from edgesplit_provisioning.kit import Kit
from edgesplit_provisioning.kit.edgetpu_packages import CoralPackages
from edgesplit_provisioning.wifi import network_from_options

HOSTNAME_PLACEHOLDER = "{hostname}"
"""Placeholder in `--to` that is replaced by the host name."""
CLAIM_PLACEHOLDER = b'{"dry run": "a claim of about this size is made when a card is written"}' + b" " * 4_000
"""Stands for a claim where none is made: in the space check and in a dry run."""


class FlashUser(Protocol):
    """The operator of a flash."""

    def confirm(self, image: str, target: FlashTarget | str, is_checked: bool) -> None:
        """Show what will be overwritten, and return only if that is confirmed."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning."""
        ...

    def ask_passphrase(self) -> str:
        """The passphrase of the wireless network."""
        ...

    def wait_for_card(self, text: str) -> None:
        """Show which card is needed, and return when it is there."""
        ...

    def stages(self) -> AbstractContextManager[card.Stages]:
        """Progress of the stages of work, while the context is open."""
        ...

    def card_written(self, written: WrittenCard) -> None:
        """Called after each card."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCard:
    """A card that was written and read back."""

    device: str
    target: str
    bytes: int
    image: str
    digest: str | None
    """Where the image's expected digest came from; None: it was not checked."""
    format: str
    system: str
    python: str
    machine: str
    instance: str
    """Id of the card's configuration."""


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """What a flash would write."""

    image: card.Image
    kit: Kit
    files: BootFiles
    devices: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file on the boot partition."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.files.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-serialisable values."""
        image, detected, kit = self.image, self.image.detected, self.kit.manifest
        return {
            "image": image.name, "bytes": image.size, "format": detected.format.value, "system": detected.system.name,
            "python": kit.python, "machine": kit.machine, "boot_partition": detected.mount,
            "devices": list(self.devices), "files": self.sizes,
            "cmdline": {"before": image.cmdline.decode("ascii").strip(), "after": self.files.cmdline_text},
        }  # fmt: skip


class FlashSession:
    """One flash of cards."""

    def __init__(self, connect: Callable[[], ControllerClient], flash: CardOptions, user: FlashUser) -> None:
        """Check everything that can be wrong with the options before anything is written."""
        subprocesses.check_programs()
        check_board(flash.device)
        self._flash, self._user = flash, user
        archive.compression(flash.image)
        self._digest = archive.expected_digest(flash.image, flash.sha256)
        self._coral = CoralPackages(flash.coral_debs) if flash.coral or flash.coral_debs else None
        self._device_class = profile_of(flash.device, coral=self._coral is not None)
        self._claim: bytes | None = None
        self._journal = Journal.beside(flash.batch) if flash.batch is not None else None
        self._devices = self._requested_devices()
        self._login = options.checked_user_name(flash.user) if flash.user is not None else None
        self._ssh_keys = options.read_ssh_keys(flash.ssh_key) if flash.ssh_key is not None else ()
        self._wifi = network_from_options(flash, user.ask_passphrase)
        self._api = None if flash.dry_run or (self._claim and not flash.wait) else connect()
        if self._api is not None and self._claim is None:
            for device in self._devices:
                check_name_is_free(self._api, device.hostname, flash.replace)

    def _requested_devices(self) -> list[DeviceSettings]:
        if self._flash.batch is not None and self._journal is not None:
            return self._devices_of_table(self._flash.batch, self._journal)
        device, self._claim = requested_device(self._flash)
        return [device]

    def _devices_of_table(self, file: Path, journal: Journal) -> list[DeviceSettings]:
        flash = self._flash
        if flash.hostname is not None or flash.claim_file is not None:
            raise UsageError(
                "--batch takes names from its table and makes a claim for each: leave --hostname and --claim"
            )
        if not flash.to.startswith("/dev/") and HOSTNAME_PLACEHOLDER not in flash.to:
            raise UsageError(
                f"--batch into files needs {HOSTNAME_PLACEHOLDER} in --to, as in --to cards/{HOSTNAME_PLACEHOLDER}.img"
            )
        rows = [row for row in read_rows(file) if row.hostname not in journal.done]
        return [replace(row, group=row.group or flash.group, labels={**flash.labels, **row.labels}) for row in rows]

    @property
    def client(self) -> ControllerClient:
        """The controller, which makes claims and says which devices are online; UsageError in a run without one."""
        if self._api is None:
            raise UsageError("a claim needs a controller")
        return self._api

    @property
    def devices(self) -> list[str]:
        """Names of the devices whose cards are still to be written; empty where a batch is finished."""
        return [device.hostname for device in self._devices]

    def run(self) -> FlashPlan | list[WrittenCard]:
        """Write all cards; in a dry run make the plan only."""
        flash = self._flash
        first = self._target(self._devices[0]) if self._journal is None else None
        if not flash.dry_run:
            several = f"{len(self._devices)} cards, one after another, in {flash.to}"
            self._user.confirm(flash.image.name, first if first is not None else several, self._digest is not None)
        scratch = cache_folder() / "unpacked"
        with self._user.stages() as stages:
            if self._digest is not None:
                archive.check_digest(flash.image, self._digest, stages("checking"))
            with card.open_image(flash.image, scratch, stages) as image:
                kit = self._kit(image, stages)
                if flash.dry_run:
                    files = self._files(image, kit, self._devices[0], CLAIM_PLACEHOLDER)
                    return FlashPlan(image, kit, files, tuple(self.devices))
                return [self._make_card(image, kit, device, first, scratch, stages) for device in self._devices]

    def _target(self, device: DeviceSettings) -> FlashTarget:
        to = Path(self._flash.to.replace(HOSTNAME_PLACEHOLDER, device.hostname))
        return resolve_target(to, fixed_disk=self._flash.fixed_disk)

    def _kit(self, image: card.Image, stages: card.Stages) -> Kit:
        if warning := why_board_may_not_boot(self._flash.device, image.boot_names):
            self._user.warn(warning)
        on_progress = stages("kit")
        kit = kit_for(image.detected, self._flash, self._coral, lambda _: on_progress(0, 1))
        on_progress(1, 1)
        card.check_boot_space(image, self._files(image, kit, self._devices[0], CLAIM_PLACEHOLDER))
        return kit

    def _files(self, image: card.Image, kit: Kit, device: DeviceSettings, claim: bytes) -> BootFiles:
        settings = CardSettings(
            hostname=device.hostname, user=self._login or image.detected.default_user, ssh_keys=self._ssh_keys,
            sudo=self._flash.sudo, wifi=self._wifi, agent_options=self._flash.agent_options,
        )  # fmt: skip
        return build_boot_files(image.detected, settings, kit.files, claim, image.cmdline, self._device_class)

    def _make_card(
        self, image: card.Image, kit: Kit, device: DeviceSettings, first: FlashTarget | None, scratch: Path,
        stages: card.Stages,
    ) -> WrittenCard:  # fmt: skip
        """Make one device's card: wait for it, request a claim, write, record in the journal."""
        target = first if first is not None else self._wait_for_card(device, image)
        _check_fits(image, target)
        claim = self._claim or request_claim(self.client, self._flash, device, self._device_class)
        if warning := why_unreachable(claim):
            self._user.warn(warning)
        files = self._files(image, kit, device, claim)
        medium = target.open()
        try:
            if medium.size is None:
                medium.set_size(image.size)
            card.write(image, medium, files, scratch, stages)
        except BaseException:
            self._user.warn(f"{target.name} is not usable: it has no partition table and does not boot")
            raise
        finally:
            medium.close()
        if self._journal is not None:
            self._journal.add(device.hostname, files.instance, target.name)
        written = WrittenCard(
            device=device.hostname, target=target.name, bytes=image.size, image=image.name,
            digest=self._digest.source if self._digest else None, format=image.detected.format.value,
            system=image.detected.system.name, python=kit.manifest.python, machine=kit.manifest.machine,
            instance=files.instance,
        )  # fmt: skip
        self._user.card_written(written)
        return written

    def _wait_for_card(self, device: DeviceSettings, image: card.Image) -> FlashTarget:
        """The card for that device: prompt until a card is inserted that may be written."""
        while True:
            if self._flash.to.startswith("/dev/"):
                nth = f"card {self._devices.index(device) + 1} of {len(self._devices)}, for {device.hostname}"
                self._user.wait_for_card(f"{nth}: put it into {self._flash.to}")
            try:
                target = self._target(device)
                if self._journal and target.is_disk and (owner := card.card_owner(target.node)) in self._journal.done:
                    raise UsageError(f"this is the card of {owner}, which is done: take it out")
                _check_fits(image, target)
                return target
            except UsageError as error:
                if not self._flash.to.startswith("/dev/"):
                    raise
                self._user.warn(str(error))


def _check_fits(image: card.Image, target: FlashTarget) -> None:
    """UsageError where the card is too small; no claim was made and nothing was written yet."""
    if target.size is not None and image.size > target.size:
        raise UsageError(
            f"{image.name} needs {format_size(image.size)}, and {target.name} has {format_size(target.size)}:"
            " take a larger card"
        )
