"""`edgectl flash`: writes an image, the agent's installer and a claim to a card, and waits for the device."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from edgesplit.errors import UsageError
from edgesplit.identifiers import parse_label
from edgesplit_cli.flash.cards import flash_cards
from edgesplit_cli.flash.jetson import clean_tree, flash_jetson, is_jetson
from edgesplit_cli.flash.output import show_disks
from edgesplit_cli.options.agent import agent_options
from edgesplit_cli.options.types import DURATION, FILE, FOLDER
from edgesplit_cli.output import json_option
from edgesplit_cli.settings import connect
from edgesplit_provisioning.flash_options import CardOptions, JetsonOptions

CARDS_ONLY = ("image", "sha256", "batch", "fixed_disk", "coral", "coral_debs")
JETSONS_ONLY = ("bsp", "board", "run", "accept_nvidia_license", "clean")
"""Options that apply to one kind of flash only."""


@click.command()
@click.option("--device", metavar="PROFILE", help="raspberrypi3b+, raspberrypi4, raspberrypi5 or jetson-orin-nano.")
@click.option("--image", type=FILE, help="The system's image: .img, or packed as .xz, .zst or .gz.")
@click.option("--sha256", metavar="HEX", help="SHA-256 of the image file. [default: IMAGE.sha256 or SHA256SUMS]")
@click.option(
    "--to",
    metavar="FILE|/dev/sdX|nvme|sd|usb",
    help="The card, or an image file; {hostname} in a batch. Of a Jetson: its own medium.",
)
@click.option("--hostname", help="Host name, also the device's name at the controller. [default: random]")
@click.option("--group", help="Group, for `--to group=NAME`.")
@click.option("--label", "labels", multiple=True, metavar="K=V", help="A label; may be given several times.")
@click.option("--wifi", "ssid", metavar="SSID", help="A wireless network (WPA2); asks for its key.")
@click.option("--wifi-password-file", type=FILE, help="Read the passphrase there instead of asking.")
@click.option("--wifi-country", default="", metavar="CC", help="Country of the radio (ISO 3166), as in DE, GB or US.")
@click.option("--ssh-key", type=FILE, help="File of public keys that may log in. [default: none]")
@click.option("--user", metavar="NAME", help="User that logs in with that key. [default: the image's, as in pi]")
@click.option("--sudo", is_flag=True, help="That user may use sudo without a password.")
@click.option("--link", default="wifi", show_default=True, help="Link that plans assume, as for `device claim`.")
@click.option("--expires", "expires_s", type=DURATION, default="7d", show_default=True, help="Validity of the claim.")
@click.option("--replace", is_flag=True, help="Take over the name of an existing device.")
@agent_options
@click.option("--claim", "claim_file", type=FILE, help="Use this claim instead of a new one.")
@click.option("--kit", "kit_folder", type=FOLDER, help="Use this kit instead of building one.")
@click.option("--with", "extras", multiple=True, metavar="EXTRA", help="Extra of the agent, as in tflite; repeatable.")
@click.option("--wheelhouse", type=FOLDER, help="Build the kit from the wheels in this folder, without a network.")
@click.option("--interpreter", type=FILE, help="A Python for the kit (see `edgectl kit build`).")
@click.option("--coral", is_flag=True, help="There is a Coral Edge TPU: install libedgetpu too.")
@click.option("--coral-deb", "coral_debs", multiple=True, type=FILE, help="The libedgetpu1 package, and what it needs.")
@click.option("--bsp", type=FOLDER, help="Jetson: NVIDIA's Linux_for_Tegra, with its root file system.")
@click.option("--board", metavar="CONFIG", help="Jetson: NVIDIA's board configuration. [default: by --device]")
@click.option("--run", is_flag=True, help="Jetson: run NVIDIA's flasher instead of printing its commands.")
@click.option(
    "--accept-nvidia-license",
    is_flag=True,
    help="Jetson: accept NVIDIA's licence, which its script for --user asks for.",
)
@click.option("--clean", is_flag=True, help="Jetson: restore NVIDIA's folder as it was.")
@click.option("--batch", type=FILE, metavar="CSV", help="One card for each line: hostname,group,labels.")
@click.option("--fixed-disk", is_flag=True, help="Allow a target disk that is built into this machine.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Print what would be written; write nothing, create no claim.")
@click.option("--wait", is_flag=True, help="Wait until the device is online.")
@click.option("--wait-for", "wait_s", type=DURATION, default="30m", show_default=True, help="How long --wait waits.")
@click.option("--list", "list_disks", is_flag=True, help="List the disks, and which can be written to.")
@json_option
@click.pass_obj
def flash(data: Path, /, list_disks: bool, as_json: bool, **options: Any) -> None:
    """Write a system's image to a card so that the device installs the agent and comes online by itself.

    The image is checked, written and read back; the files for its first boot are added to the boot partition: the
    agent's offline installer, a one-time claim, its name and network. A card whose write fails does not boot.

    A Jetson is flashed by NVIDIA's own tools: --bsp names their folder, which gets the same files; NVIDIA's commands
    are printed.
    """
    if list_disks:
        show_disks(as_json)
        return
    jetson = is_jetson(options["device"])
    for name in CARDS_ONLY if jetson else JETSONS_ONLY:
        if options[name]:
            option = f"--{name.removesuffix('s').replace('_', '-')}"
            raise UsageError(
                f"{option} is for cards: the system of a Jetson comes from --bsp; on one that runs, `edgectl adopt`"
                if jetson
                else f"{option} is for Jetson boards (--device jetson-orin-nano)"
            )
    for name in ("bsp",) if jetson else ("device", "image", "to"):
        if options[name] is None:
            hint = "NVIDIA's folder Linux_for_Tegra" if jetson else "`edgectl flash --list` shows possible target disks"
            raise UsageError(f"missing option --{name}: {hint}")
    if options["clean"]:
        clean_tree(options["bsp"], as_json)
        return
    options |= {"labels": dict(parse_label(text) for text in options["labels"]), "expires_s": int(options["expires_s"])}
    kind = JetsonOptions if jetson else CardOptions
    flash_options = {field.name: options[field.name] for field in fields(kind)}
    run = {"as_json": as_json, "yes": options["yes"], "wait_s": options["wait_s"]}
    if jetson:
        flash_jetson(lambda: connect(data), JetsonOptions(**flash_options), run=options["run"], **run)
    else:
        flash_cards(lambda: connect(data), CardOptions(**flash_options), **run)
