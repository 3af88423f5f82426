"""`edgectl flash`: an image onto a card, with the agent's installer and a claim, and the device online."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgesplit.errors import UsageError
from edgesplit_cli.output import json_option
from edgesplit_cli.quantities import LIFE
from edgesplit_cli.settings import connect
from edgesplit_provisioning.image.flash import Session
from edgesplit_provisioning.image.output import show_disks
from edgesplit_provisioning.jetson.flash import flash_jetson, is_jetson

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.option(
    "--device", default=None, metavar="PROFILE", help="raspberrypi3b+, raspberrypi4, raspberrypi5 or jetson-orin-nano."
)
@click.option("--image", type=FILE, default=None, help="The system's image: .img, or packed as .xz, .zst or .gz.")
@click.option("--sha256", default=None, metavar="HEX", help="Of the image file. [default: IMAGE.sha256 or SHA256SUMS]")
@click.option(
    "--to",
    default=None,
    metavar="FILE|/dev/sdX|nvme|sd|usb",
    help="The card, or an image file; {hostname} in a batch. Of a Jetson: its own medium.",
)
@click.option("--hostname", default=None, help="Its name, in the network and at the controller. [default: made up]")
@click.option("--group", default=None, help="Group, for `--to group=NAME`.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be given several times.")
@click.option("--wifi", "ssid", default=None, metavar="SSID", help="A wireless network (WPA2); asks for its key.")
@click.option("--wifi-password-file", type=FILE, default=None, help="Read the passphrase there instead of asking.")
@click.option("--wifi-country", default="", metavar="CC", help="Where its radio is used: DE, GB, US…")
@click.option("--ssh-key", type=FILE, default=None, help="Public keys of who may log in. [default: nobody]")
@click.option("--user", default=None, metavar="NAME", help="Who logs in by that key. [default: the image's, as in pi]")
@click.option("--sudo", is_flag=True, help="That user may become root (nobody has a password).")
@click.option("--link", default="wifi", show_default=True, help="The link that plans assume, as for `device claim`.")
@click.option("--expires", "expires_s", type=LIFE, default="7d", show_default=True, help="When its claim is void.")
@click.option("--replace", is_flag=True, help="The name is a device's already: give it to this card.")
@click.option("--claim", "claim_file", type=FILE, default=None, help="Take this claim instead of making one.")
@click.option("--kit", "kit_folder", type=FOLDER, default=None, help="Take this kit instead of making one.")
@click.option("--with", "extras", multiple=True, metavar="EXTRA", help="What the agent has besides, as in tflite.")
@click.option("--wheelhouse", type=FOLDER, default=None, help="Make the kit of these wheels alone: no network.")
@click.option("--interpreter", type=FILE, default=None, help="A Python for the kit (see `edgectl kit build`).")
@click.option("--coral", is_flag=True, help="There is a Coral Edge TPU: install libedgetpu too.")
@click.option("--coral-deb", "coral_debs", multiple=True, type=FILE, help="The libedgetpu1 package, and what it needs.")
@click.option("--bsp", type=FOLDER, default=None, help="Jetson: NVIDIA's Linux_for_Tegra, with its root file system.")
@click.option(
    "--board", default=None, metavar="CONFIG", help="Jetson: NVIDIA's board configuration. [default: by --device]"
)
@click.option("--run", is_flag=True, help="Jetson: call NVIDIA's flasher, in place of printing how.")
@click.option("--accept-nvidia-license", is_flag=True, help="Jetson: NVIDIA's script for --user does not ask.")
@click.option("--clean", is_flag=True, help="Jetson: put the tree back as it was.")
@click.option("--batch", type=FILE, default=None, metavar="CSV", help="One card for each line: hostname,group,labels.")
@click.option("--fixed-disk", is_flag=True, help="The target is a disk that is built into this machine.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be written; write nothing, claim nothing.")
@click.option("--wait", is_flag=True, help="Until the device is online.")
@click.option("--wait-for", "wait_s", type=LIFE, default="30m", show_default=True, help="How long --wait waits.")
@click.option("--list", "list_disks", is_flag=True, help="Show the disks that a card could be.")
@json_option
@click.pass_obj
def flash(data: Path, /, list_disks: bool, as_json: bool, **asked: Any) -> None:
    """Write a system's image to a card so that the device installs the agent and comes online by itself.

    The image is checked, written and read back; what its first boot needs is put onto the boot partition: the agent's
    offline installer, a one-time claim, its name and network. A card that fails halfway boots nowhere.

    A Jetson is flashed by NVIDIA's own tools: --bsp names their tree, which gets the same files; its commands follow.
    """
    if list_disks:
        show_disks(as_json)
        return
    if is_jetson(asked["device"]):
        if asked["coral"] or asked["coral_debs"]:
            raise UsageError("--coral is for Raspberry Pi cards: on a Jetson that runs, `edgectl adopt --coral`")
        flash_jetson(lambda: connect(data), as_json, asked)
        return
    for name in ("bsp", "board", "run", "accept_nvidia_license", "clean"):
        if asked[name]:
            raise UsageError(f"--{name.replace('_', '-')} is for Jetson boards (--device jetson-orin-nano)")
    for name in ("device", "image", "to"):
        if asked[name] is None:
            raise UsageError(f"say --{name}; `edgectl flash --list` shows the disks that a card could be")
    Session(lambda: connect(data), as_json, asked).run()
