"""Jetson: NVIDIA's tree is inspected, its root file system prepared and cleaned, its flash script called as
documented."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgesplit.errors import EdgeError, MalformedMessage, UsageError
from edgesplit.trust.identity import Claim, encode_document
from edgesplit_cli.main import cli
from edgesplit_provisioning.jetson import flasher
from edgesplit_provisioning.jetson.bsp import read_bsp
from edgesplit_provisioning.jetson.overlay import KIT, overlay_files
from edgesplit_provisioning.jetson.root_filesystem import RECORD, FileToWrite, install_files, restore_files
from edgesplit_provisioning.kit.manifest import FORMAT, KitManifest, encode, list_files
from edgesplit_provisioning.wifi import Wifi
from support.jetson_tree import listing, make_tree

PROFILE = "jetson-orin-nano"


def overlay(folder: Path, **more: Any) -> list[FileToWrite]:
    kit = folder / "kit"
    kit.mkdir(exist_ok=True)
    (kit / "install.sh").write_text('#!/bin/sh\necho "$@" >../installed\n[ ! -e ../../fails ] || exit 3\n')
    (kit / "wheels.tar").write_bytes(b"wheels")
    made = {path.name: path for path in kit.iterdir()}
    return overlay_files(made, b'{"token": "secret"}', "jet-1", **more)


@pytest.mark.parametrize(("major", "python", "name"), [(36, "3.10", "JetPack 6"), (35, "3.8", "JetPack 5")])
def test_release_board_and_python_are_read_from_the_tree(tmp_path: Path, major: int, python: str, name: str) -> None:
    """Release, board and the Python that the agent can have there, which JetPack 5 lacks."""
    tree = read_bsp(make_tree(tmp_path, major, python), PROFILE)
    assert name in tree.name and tree.board == "jetson-orin-nano-devkit"
    assert tree.python == ("3.10" if major == 36 else "")


def test_the_newest_board_configuration_is_the_default(tmp_path: Path) -> None:
    """The one for the Super mode where there is one; a missing one is refused, also as a path."""
    path = make_tree(tmp_path)
    (path / "jetson-orin-nano-devkit-super.conf").touch()
    assert read_bsp(path, PROFILE).board == "jetson-orin-nano-devkit-super"
    assert read_bsp(path, PROFILE, "jetson-orin-nano-devkit").board == "jetson-orin-nano-devkit"
    for board in ("nothing", "../rootfs/x", "-h", "a;b"):
        with pytest.raises(UsageError, match="no configuration"):
            read_bsp(path, PROFILE, board)


def test_an_invalid_tree_is_refused_with_instructions(tmp_path: Path) -> None:
    """An empty folder, no root file system, another release, another board."""
    with pytest.raises(UsageError, match="Linux_for_Tegra"):
        read_bsp(tmp_path, PROFILE)
    path = make_tree(tmp_path)
    release = path / "rootfs/etc/nv_tegra_release"
    release.write_text("# R32 (release), REVISION: 7.1\n")
    with pytest.raises(UsageError, match="R35"):
        read_bsp(path, PROFILE)
    release.write_bytes(b"\xff\x00garbage" * 1000)
    with pytest.raises(UsageError, match="an unknown release"):
        read_bsp(path, PROFILE)
    release.unlink()
    with pytest.raises(UsageError, match="apply_binaries"):
        read_bsp(path, PROFILE)
    with pytest.raises(UsageError, match="jetson-nano"):
        read_bsp(path, "jetson-nano")


def test_prepare_installs_first_boot_files_and_clean_removes_them(tmp_path: Path) -> None:
    """Kit, claim (0600), unit, name, keys, network; `--clean` leaves not a trace."""
    path = make_tree(tmp_path)
    before = listing(path)
    wifi = Wifi(b"caf\xc3\xa9;\n[evil]", "ab" * 32, "FR")
    wished = overlay(tmp_path, user="ada", ssh_keys=("ssh-ed25519 AAAA ada",), sudo=True, wifi=wifi)
    install_files(path, wished)

    root = path / "rootfs"
    assert (root / KIT / "claim.json").stat().st_mode & 0o777 == 0o600
    assert (root / "etc/hostname").read_text() == "jet-1\n"
    assert (root / "etc/ssh/authorized_keys.d/ada").read_text() == "ssh-ed25519 AAAA ada\n"
    assert (root / "etc/sudoers.d/40-edgesplit").stat().st_mode & 0o777 == 0o440
    wanted = root / "etc/systemd/system/multi-user.target.wants/edgesplit-first-boot.service"
    assert os.readlink(wanted) == "/etc/systemd/system/edgesplit-first-boot.service"
    connection = (root / "etc/NetworkManager/system-connections/edgesplit-wifi.nmconnection").read_text()
    assert "[evil]" not in connection and f"psk={'ab' * 32}" in connection and "ssid=99;97;102;195;" in connection

    assert restore_files(path) == []
    assert listing(path) == before
    assert restore_files(path) == []


def test_preparing_again_replaces_the_files(tmp_path: Path) -> None:
    """`--clean` restores the state before the first time."""
    path = make_tree(tmp_path)
    before = listing(path)
    install_files(path, overlay(tmp_path, user="ada", ssh_keys=("k",)))
    install_files(path, overlay(tmp_path))
    assert not (path / "rootfs/etc/ssh/authorized_keys.d").exists()
    restore_files(path)
    assert listing(path) == before


@pytest.mark.parametrize("writes", range(8))
def test_an_interrupted_preparation_is_cleaned_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    """After any number of files."""
    path = make_tree(tmp_path)
    before = listing(path)
    real, done = os.fchmod, [0]

    def dies(*arguments: int) -> None:
        done[0] += 1
        if done[0] > writes:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(os, "fchmod", dies)
    with pytest.raises(KeyboardInterrupt):
        install_files(path, overlay(tmp_path, user="ada", ssh_keys=("k",), sudo=True))
    monkeypatch.undo()
    assert restore_files(path) == []
    assert listing(path) == before


def test_clean_keeps_files_that_were_changed_since(tmp_path: Path) -> None:
    """They are reported."""
    path = make_tree(tmp_path)
    install_files(path, overlay(tmp_path))
    (path / "rootfs/etc/hostname").write_text("mine\n")
    assert restore_files(path) == ["etc/hostname"]
    assert (path / "rootfs/etc/hostname").read_text() == "mine\n"
    assert not (path / "rootfs" / KIT).exists()


@pytest.mark.parametrize("link", ["etc/systemd", "opt", "etc/ssh", "etc/hostname"])
def test_prepare_follows_no_symlink(tmp_path: Path, link: str) -> None:
    """Wherever it leads, within the tree or out of it."""
    path = make_tree(tmp_path)
    outside = tmp_path / "outside"
    (path / "rootfs" / link).rename(outside)
    (path / "rootfs" / link).symlink_to(outside)
    before = listing(outside) if outside.is_dir() else outside.read_bytes()
    with pytest.raises(UsageError):
        install_files(path, overlay(tmp_path, user="ada", ssh_keys=("k",)))
    assert (listing(outside) if outside.is_dir() else outside.read_bytes()) == before


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a//b", ""])
def test_paths_outside_the_root_file_system_are_refused(tmp_path: Path, name: str) -> None:
    """Whatever their source."""
    with pytest.raises(MalformedMessage):
        install_files(make_tree(tmp_path), [FileToWrite(name, b"x")])


def test_clean_refuses_a_corrupt_record(tmp_path: Path) -> None:
    """Nothing is removed by guess."""
    path = make_tree(tmp_path)
    (path / RECORD).write_text("{")
    with pytest.raises(UsageError, match="corrupt"):
        restore_files(path)


def test_the_first_boot_installs_once_and_removes_secrets(tmp_path: Path) -> None:
    """After a failed installation everything stays, for the next boot."""
    path = make_tree(tmp_path)
    install_files(path, overlay(tmp_path))
    root = path / "rootfs"
    script = root / KIT / "first-boot.sh"
    here = script.read_text().replace(f"/{KIT}", str(root / KIT)).replace("/etc/", f"{root}/etc/")
    script.write_text(here)
    (root / "fails").touch()
    assert subprocess.run(["sh", str(script)], check=False).returncode == 3
    assert (root / KIT / "claim.json").exists()
    (root / "fails").unlink()
    assert subprocess.run(["sh", str(script)], check=False).returncode == 0
    assert (root / "opt/installed").read_text() == "--claim claim.json\n"
    assert not (root / KIT).exists()
    assert not list((root / "etc/systemd/system/multi-user.target.wants").iterdir())


def test_flash_commands_match_nvidias_quick_start(tmp_path: Path) -> None:
    """For each release and medium; the printed commands are the executed ones."""
    six = read_bsp(make_tree(tmp_path / "6"), PROFILE)
    _, flash = flasher.flash_commands(six, "nvme", user="ada", hostname="jet-1", accept_license=False)
    assert shlex.split(flasher.command_line(flash))[1:] == flash
    assert flasher.command_line(flash) == (
        "sudo ./tools/kernel_flash/l4t_initrd_flash.sh --external-device nvme0n1p1"
        " -c tools/kernel_flash/flash_l4t_t234_nvme.xml -p '-c bootloader/generic/cfg/flash_t234_qspi.xml'"
        " --showlogs --network usb0 jetson-orin-nano-devkit internal"
    )
    five = read_bsp(make_tree(tmp_path / "5", 35), PROFILE)
    (alone,) = flasher.flash_commands(five, "sd", user="", hostname="jet-1", accept_license=True)
    assert "mmcblk1p1" in alone and "tools/kernel_flash/flash_l4t_external.xml" in alone
    user, _ = flasher.flash_commands(five, "sd", user="ada", hostname="jet-1", accept_license=True)
    assert user == ["./tools/l4t_create_default_user.sh", "-u", "ada", "-n", "jet-1", "--accept-license"]
    with pytest.raises(UsageError, match="nvme, sd or usb"):
        flasher.parse_medium("/dev/sda")


@pytest.mark.skipif(os.geteuid() != 0, reason="NVIDIA's tools are called as root alone")
def test_the_flash_script_runs_in_its_tree_and_its_failure_is_reported(tmp_path: Path) -> None:
    """With exactly those arguments."""
    tree = read_bsp(make_tree(tmp_path), PROFILE)
    (command,) = flasher.flash_commands(tree, "usb", user="", hostname="jet-1", accept_license=False)
    flasher.run(tree, command)
    assert (tree.path / "asked").read_text().splitlines() == command
    (tree.path / "fails").touch()
    with pytest.raises(EdgeError, match="ended with 7"):
        flasher.run(tree, command)


def kit_folder(folder: Path, python: str = "3.10") -> Path:
    """A kit, as far as it is read."""
    made = folder / "made-kit"
    made.mkdir(exist_ok=True)
    (made / "install.sh").write_text("exit 0\n")
    (made / "wheels.tar").write_bytes(b"wheels")
    described = KitManifest(
        format=FORMAT, version="1.0", python=python, machine="aarch64", glibc="2.28", extras=("agent",), needs_bytes=1,
        wheels=(), files=list_files({path.name: path for path in made.iterdir() if path.name != "kit.json"}),
    )  # fmt: skip
    (made / "kit.json").write_bytes(encode(described))
    return made


def claim_file(folder: Path) -> Path:
    """For jet-1."""
    file = folder / "claim.json"
    file.write_bytes(
        encode_document(
            Claim(device="jet-1", device_class=PROFILE, token="secret", controller_url="https://c:8443", ca_pem="x",
                  tuf_root="{}", expires=2**40)
        )
    )  # fmt: skip
    return file


def flash(folder: Path, *words: str) -> Result:
    """`edgectl flash` for that tree, with a claim and a kit that are there already."""
    given = ["--kit", str(kit_folder(folder)), "--claim", str(claim_file(folder))]
    start = ["--data", str(folder), "flash", "--device", PROFILE, "--bsp", str(folder / "Linux_for_Tegra")]
    return CliRunner().invoke(cli, [*start, *([] if "--clean" in words else given), *words])


@pytest.mark.skipif(os.geteuid() != 0, reason="NVIDIA's tools are called as root alone")
def test_the_command_prepares_prints_runs_and_cleans(tmp_path: Path) -> None:
    """What it prints is what it runs."""
    path = make_tree(tmp_path)
    before = listing(path)
    assert flash(tmp_path, "--dry-run", "--to", "sd").exit_code == 0
    assert listing(path) == before

    keys = tmp_path / "id.pub"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id")], check=True)
    named = ["--user", "ada", "--ssh-key", str(keys), "--accept-nvidia-license"]
    told = json.loads(flash(tmp_path, *named, "--json").stdout)
    assert (told["device"], told["python"], told["prepared"]) == ("jet-1", "3.10", True)
    claim = path / "rootfs" / KIT / "claim.json"
    assert b"secret" in claim.read_bytes() and claim.stat().st_mode & 0o077 == 0

    ran = flash(tmp_path, *named, "--run", "--yes")
    assert ran.exit_code == 0 and "sudo ./tools/kernel_flash" in ran.output
    asked = (path / "asked").read_text().splitlines()
    assert asked == [word for command in told["commands"] for word in command]
    (path / "asked").unlink()
    assert "as it was before" in flash(tmp_path, "--clean").output
    assert listing(path) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "/dev/sda"], "nvme, sd or usb"),
        (["--ssh-key", "KEYS"], "--user"),
        (["--image", "KEYS"], "is for cards"),
        (["--user", "root"], "not a user"),
        (["--hostname", "other"], "is for jet-1"),
        (["--wifi", "net"], "--wifi-country"),
    ],
)
def test_invalid_options_are_refused_before_changing_the_tree(tmp_path: Path, words: list[str], said: str) -> None:
    """With advice."""
    path = make_tree(tmp_path)
    before = listing(path)
    public = tmp_path / "id.pub"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "id")], check=True)
    refused = flash(tmp_path, *(str(public) if word == "KEYS" else word for word in words))
    assert isinstance(refused.exception, UsageError) and said in str(refused.exception)
    assert listing(path) == before


def test_jetpack_5_requires_an_interpreter(tmp_path: Path) -> None:
    """Its own Python is too old, and a kit for another does not help."""
    make_tree(tmp_path, 35, "3.8")
    refused = CliRunner().invoke(
        cli, ["--data", str(tmp_path), "flash", "--device", PROFILE, "--bsp", str(tmp_path / "Linux_for_Tegra")]
    )
    assert "--interpreter" in str(refused.exception)
    assert "needs another" in str(flash(tmp_path).exception)
