"""The first boot of a card: the files are checked by their own parsers, and a real shell runs the scripts."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edgesplit.errors import UsageError
from edgesplit_provisioning.image import cloud_init, raspberry_firstrun, systemd_unit
from edgesplit_provisioning.image.boot_files import BootFiles, build_boot_files
from edgesplit_provisioning.image.detect import DetectedImage, Format
from edgesplit_provisioning.image.options import CardSettings
from edgesplit_provisioning.image.root_filesystem import OperatingSystem
from edgesplit_provisioning.wifi import Wifi, make_wifi
from support import REPOSITORY
from support.card_images import CLAIM, CMDLINE, PUBLIC_KEY, make_kit
from support.first_boot import MOUNT, Device

CLAIM_BYTES = json.dumps(CLAIM).encode()
NET = make_wifi("home", "passphrase", "DE")
BOOKWORM = DetectedImage(Format.FIRSTRUN, MOUNT, OperatingSystem(identity="debian"))
TRIXIE = DetectedImage(Format.CLOUD_INIT, MOUNT, OperatingSystem(identity="debian"))
UNPACKED = REPOSITORY / ".venv" / "first-boot"
"""Where `tools/setup dev` unpacks Debian's cloud-init and netplan, not to be installed on a machine at work."""
SSIDS = st.binary(min_size=1, max_size=32)


def wishes_with(**other: Any) -> CardSettings:
    return CardSettings(**{"hostname": "cam-1", "user": "pi", "ssh_keys": (PUBLIC_KEY,), "wifi": NET, **other})


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "root")


def card(tmp_path: Path, found: DetectedImage, wishes: CardSettings | None = None) -> BootFiles:
    kit = {file.name: file for file in make_kit(tmp_path / "kit").iterdir()}
    return build_boot_files(found, wishes or wishes_with(), kit, CLAIM_BYTES, f"{CMDLINE}\n".encode(), "raspberrypi4")


def network_applied(device: Device) -> None:
    """What cloud-init does with network-config."""
    place = device.root / "etc/netplan/50-cloud-init.yaml"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes((device.boot / "network-config").read_bytes())


def test_bookworm_firstrun_configures_installs_and_removes_secrets(device: Device, tmp_path: Path) -> None:
    """firstrun.sh, a reboot, the unit: name, user, key, network, the agent with its claim; then the card is clean."""
    device.insert(card(tmp_path, BOOKWORM))

    assert device.firstrun() == 0
    assert device.read("etc/hostname") == "cam-1\n"
    assert device.read("etc/hosts") == "127.0.0.1\tlocalhost\n127.0.1.1\tcam-1\n"
    assert device.read("home/pi/.ssh/authorized_keys") == f"{PUBLIC_KEY}\n"
    connection = device.root / "etc/NetworkManager/system-connections/edgesplit-wifi.nmconnection"
    assert NET.key in connection.read_text() and connection.stat().st_mode & 0o777 == 0o600
    assert device.read("var/lib/systemd/rfkill/platform-3f300000:wlan") == "0\n"
    assert not (device.root / "etc/sudoers.d/010_pi-nopasswd").exists()
    assert device.called == ["usermod -p * pi", "systemctl enable ssh", "rfkill unblock wifi"]
    assert (device.boot / "cmdline.txt").read_text() == f"{CMDLINE} cfg80211.ieee80211_regdom=DE\n"
    assert not (device.boot / "firstrun.sh").exists()
    assert device.is_armed

    assert device.first_boot() == 0
    assert device.is_done and not device.is_armed
    assert device.read("installs").startswith("install.sh --claim ")
    assert json.loads(device.read("claimed")) == CLAIM
    assert NET.key.encode() not in device.on_card() and b"one-time-token" not in device.on_card()


def test_cloud_init_enables_the_unit_that_installs_and_removes_secrets(device: Device, tmp_path: Path) -> None:
    """bootcmd at each boot; the network's key goes when the system has its own copy of it, and not before."""
    files = card(tmp_path, TRIXIE)
    device.insert(files)
    bootcmd = yaml.safe_load((device.boot / "user-data").read_bytes())["bootcmd"]

    assert device.run(*bootcmd[0]).returncode == 0 and device.is_armed
    assert device.called == ["systemctl daemon-reload", "systemctl --no-block start edgesplit-first-boot.service"]
    assert device.first_boot() == 1  # cloud-init has not come to the network yet
    assert not device.is_done and device.is_armed
    assert NET.key.encode() in device.on_card() and b"one-time-token" not in device.on_card()
    assert "still needed" in (device.boot / "edgesplit/first-boot.log").read_text()

    network_applied(device)
    assert device.first_boot() == 0
    assert device.is_done and not device.is_armed
    assert NET.key.encode() not in device.on_card()
    assert yaml.safe_load((device.boot / "network-config").read_bytes()) == {
        "network": {"version": 2, "ethernets": {"eth0": {"dhcp4": True, "optional": True}}}
    }
    assert device.read("installs").count("install.sh") == 1
    assert not (device.boot / "edgesplit/first-boot.log").exists()

    assert device.run(*bootcmd[0]).returncode == 0 and not device.is_armed  # the next boot, and every one after


def test_without_wireless_settings_the_first_boot_does_not_wait(device: Device, tmp_path: Path) -> None:
    """A device on a cable is done at once."""
    device.insert(card(tmp_path, TRIXIE, wishes_with(wifi=None)))
    assert device.first_boot() == 0 and device.is_done


def test_the_agents_options_lie_beside_the_installer(tmp_path: Path) -> None:
    """Where its first run finds them; without any there is no such file."""
    with_options = card(tmp_path, TRIXIE, wishes_with(agent_options="--skip-still --changed 1%")).files
    assert with_options["edgesplit/options.env"] == b'OPTIONS="--skip-still --changed 1%"\n'
    assert "edgesplit/options.env" not in card(tmp_path / "plain", TRIXIE).files


def test_a_failed_installation_is_retried_and_logged_on_the_card(device: Device, tmp_path: Path) -> None:
    """No disk space, a package missing: the next boot tries again, with the stored claim."""
    device.insert(card(tmp_path, TRIXIE, wishes_with(wifi=None)))
    (device.root / "install-fails").touch()

    assert device.first_boot() == 1 and not device.is_done
    assert "could not be installed" in (device.boot / "edgesplit/first-boot.log").read_text()
    assert b"one-time-token" not in device.on_card()

    (device.boot / "edgesplit/first-boot.log").write_text("read already")
    assert device.first_boot() == 1
    assert (device.boot / "edgesplit/first-boot.log").read_text() == "read already"  # a card wears out

    (device.root / "install-fails").unlink()
    assert device.first_boot() == 0 and device.is_done
    assert json.loads(device.read("claimed")) == CLAIM


@pytest.mark.parametrize("nth", range(1, 13))
def test_a_power_cut_during_the_first_boot_is_recovered(device: Device, tmp_path: Path, nth: int) -> None:
    """The power goes at the nth program that the script calls; the next boots finish, and no secret stays.

    Each program that changes something is counted by a stand-in, which stops the script there and then.
    """
    device.insert(card(tmp_path, TRIXIE))
    network_applied(device)
    device.cut_off_at(nth, "cp", "mv", "rm", "dd", "sync")

    device.first_boot()
    device.let_live()
    assert device.first_boot() == 0

    assert device.is_done
    assert json.loads(device.read("claimed")) == CLAIM
    assert NET.key.encode() not in device.on_card() and b"one-time-token" not in device.on_card()


@pytest.mark.parametrize("nth", range(1, 10))
def test_a_power_cut_during_firstrun_is_recovered(device: Device, tmp_path: Path, nth: int) -> None:
    """Until it has removed itself from the kernel's command line it runs again; after that the unit removes what is
    left of it."""
    device.insert(card(tmp_path, BOOKWORM))
    device.cut_off_at(nth, "mv", "rm", "dd", "sync")

    device.firstrun()
    device.let_live()
    if "systemd.run=" in (device.boot / "cmdline.txt").read_text():
        device.firstrun()
    assert device.is_armed
    assert device.first_boot() == 0

    assert device.is_done and device.read("etc/hostname") == "cam-1\n"
    assert (device.boot / "cmdline.txt").read_text() == f"{CMDLINE} cfg80211.ieee80211_regdom=DE\n"
    assert NET.key in device.read("etc/NetworkManager/system-connections/edgesplit-wifi.nmconnection")
    assert NET.key.encode() not in device.on_card() and b"one-time-token" not in device.on_card()


def test_a_firstrun_that_always_fails_gives_up_after_three_tries(device: Device, tmp_path: Path) -> None:
    """With a read-only root file system the device boots unconfigured, so that it can be inspected."""
    device.insert(card(tmp_path, BOOKWORM))
    device.fake("ln", "exit 1")

    for _ in range(3):
        assert "systemd.run=" in (device.boot / "cmdline.txt").read_text()
        assert device.firstrun() == 0
    device.firstrun()

    assert "systemd.run=" not in (device.boot / "cmdline.txt").read_text()


def test_a_kit_with_coral_sets_the_installer_option(device: Device, tmp_path: Path) -> None:
    """Where the kit has the accelerator's library."""
    device.insert(card(tmp_path, TRIXIE, wishes_with(wifi=None)))
    (device.boot / "edgesplit/coral.tar").write_bytes(b"tar")
    assert device.first_boot() == 0
    assert device.read("installs").strip().endswith("--coral")


def test_user_data_states_sudo_explicitly() -> None:
    """A missing `sudo` would mean the image's default, which needs no password."""
    without = yaml.safe_load(cloud_init.user_data(wishes_with(), MOUNT))
    with_sudo = yaml.safe_load(cloud_init.user_data(wishes_with(sudo=True), MOUNT))

    assert "users" not in without and without["user"]["sudo"] is None
    assert without["user"]["lock_passwd"] and without["ssh_pwauth"] is False and "manage_etc_hosts" not in without
    assert with_sudo["user"]["sudo"] == "ALL=(ALL) NOPASSWD:ALL"
    assert without["runcmd"] == [["systemctl", "enable", "--now", "ssh"]]
    assert "runcmd" not in yaml.safe_load(cloud_init.user_data(wishes_with(ssh_keys=()), MOUNT))


def test_bookworm_user_gets_sudo_by_option(device: Device, tmp_path: Path) -> None:
    """Through a sudoers file with the required mode."""
    device.insert(card(tmp_path, BOOKWORM, wishes_with(sudo=True, ssh_keys=())))
    assert device.firstrun() == 0
    file = device.root / "etc/sudoers.d/010_edgesplit"
    assert file.read_text() == "pi ALL=(ALL) NOPASSWD: ALL\n" and file.stat().st_mode & 0o777 == 0o440
    assert "systemctl enable ssh" not in device.called


def test_each_card_has_its_own_instance_id(tmp_path: Path) -> None:
    """cloud-init skips an instance that it has configured before; the kernel's command line names the same id."""
    one, two = card(tmp_path, TRIXIE), card(tmp_path / "again", TRIXIE)
    assert one.instance != two.instance
    assert yaml.safe_load(bytes(one.files["meta-data"]))["instance-id"] == one.instance  # type: ignore[arg-type]
    assert one.cmdline.decode().split()[-2:] == [f"ds=nocloud;i={one.instance}", "cfg80211.ieee80211_regdom=DE"]


def test_the_wireless_passphrase_is_not_on_the_card(tmp_path: Path) -> None:
    """Only the key that was derived from it is."""
    for image in (TRIXIE, BOOKWORM):
        files = card(tmp_path / image.format.value, image, wishes_with(wifi=make_wifi("net", "my dog's name", "DE")))
        everything = b"".join(c if isinstance(c, bytes) else c.read_bytes() for c in files.files.values())
        assert b"dog" not in everything


@given(SSIDS, st.from_regex(r"[0-9a-f]{64}", fullmatch=True))
def test_hostile_network_names_round_trip_through_netplan_or_are_refused(ssid: bytes, key: str) -> None:
    """Quotes, dollars, backticks, emoji: a YAML parser returns the input."""
    try:
        raw = cloud_init.network_config(Wifi(ssid, key, "DE"))
    except UsageError:
        return
    points = yaml.safe_load(raw)["network"]["wifis"]["wlan0"]["access-points"]
    assert raw.isascii()
    assert {name.encode(): settings for name, settings in points.items()} == {ssid: {"password": key}}


@pytest.mark.parametrize("ssid", [b"\0", b"a\nb", b"\xff", b"1;2;", b"\x7f", "\u0085".encode()])
def test_a_network_name_unsupported_by_netplan_is_refused(ssid: bytes) -> None:
    """Instead of a device that never joins it."""
    with pytest.raises(UsageError):
        cloud_init.network_config(Wifi(ssid, "0" * 64, "DE"))


@settings(max_examples=6)
@given(SSIDS, st.lists(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=30), max_size=3))
def test_hostile_networks_and_comments_are_quoted_for_the_shell(
    tmp_path_factory: pytest.TempPathFactory, ssid: bytes, comments: list[str]
) -> None:
    """firstrun.sh, run: the file for NetworkManager has exactly those bytes, and authorized_keys those lines."""
    folder = tmp_path_factory.mktemp("first")
    device, keys = Device(folder / "root"), tuple(f"{PUBLIC_KEY} {comment}".rstrip() for comment in comments)
    wishes = wishes_with(wifi=Wifi(ssid, "ab" * 32, "DE"), ssh_keys=keys)
    device.insert(BootFiles({"firstrun.sh": raspberry_firstrun.script(wishes, MOUNT)}, b"root=x\n", "i"))

    assert device.firstrun() == 0

    connection = device.read("etc/NetworkManager/system-connections/edgesplit-wifi.nmconnection")
    found = re.search(r"^ssid=([0-9;]+)$", connection, re.MULTILINE)
    assert found and bytes(int(number) for number in found[1].split(";") if number) == ssid
    if keys:
        assert device.read("home/pi/.ssh/authorized_keys") == "".join(f"{key}\n" for key in keys)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), st.booleans())
def test_hostile_text_is_quoted_for_cloud_init(text: str, sudo: bool) -> None:
    """In a key's comment."""
    raw = cloud_init.user_data(wishes_with(ssh_keys=(f"{PUBLIC_KEY} {text}",), sudo=sudo), MOUNT)
    assert raw.startswith(b"#cloud-config\n") and raw.isascii()
    assert yaml.safe_load(raw)["user"]["ssh_authorized_keys"] == [f"{PUBLIC_KEY} {text}"]


def test_every_script_passes_a_shell_syntax_check(tmp_path: Path) -> None:
    """sh -n, for every script that is written to a card."""
    scripts = [
        systemd_unit.script(),
        systemd_unit.install_and_start_commands(MOUNT).encode(),
        raspberry_firstrun.script(wishes_with(sudo=True), MOUNT),
    ]
    for script in scripts:
        answer = subprocess.run(["sh", "-n"], input=script, check=False, capture_output=True)
        assert (answer.returncode, answer.stderr) == (0, b"")


def test_an_unusual_mount_point_is_refused() -> None:
    """It comes from the image's fstab, and would go into a unit and a shell script."""
    with pytest.raises(UsageError, match="does not know"):
        systemd_unit.install_and_start_commands("/boot/$(reboot)")


def test_user_data_matches_cloud_inits_schema() -> None:
    """The schema that comes with Debian's cloud-init."""
    import jsonschema

    schema = json.loads(_packaged("usr/lib/python3/dist-packages/cloudinit/config/schemas/schema-cloud-config-v1.json"))
    for wishes in (wishes_with(), wishes_with(sudo=True, ssh_keys=(), wifi=None)):
        jsonschema.validate(yaml.safe_load(cloud_init.user_data(wishes, MOUNT)), schema)
    with pytest.raises(jsonschema.ValidationError):  # the schema does look
        jsonschema.validate({"bootcmd": 5}, schema)


def _packaged(name: str) -> bytes:
    for root in (UNPACKED, Path("/")):
        if (root / name).is_file():
            return (root / name).read_bytes()
    pytest.skip(f"no {name} here: `tools/setup dev` unpacks Debian's cloud-init and netplan")


@pytest.mark.parametrize("renderer", ["NetworkManager", "networkd"])
@pytest.mark.parametrize("ssid", ["home", "a\"b\\c;d=e $`'\u00e9\U0001f600", " lead: {x}", "#c", "@", "%s", "no", "1"])
def test_netplan_generates_the_intended_network(tmp_path: Path, renderer: str, ssid: str) -> None:
    """Its generator reads our network-config and writes what NetworkManager or wpa_supplicant gets."""
    program = "usr/libexec/netplan/generate"
    _packaged(program)
    root = UNPACKED if (UNPACKED / program).is_file() else Path("/")
    place = tmp_path / "etc/netplan/50-cloud-init.yaml"
    place.parent.mkdir(parents=True)
    place.touch(mode=0o600)
    said = yaml.safe_load(cloud_init.network_config(make_wifi(ssid, "passphrase", "DE")))
    place.write_text(yaml.safe_dump({"network": {"renderer": renderer, **said["network"]}}))
    libraries = ":".join(str(path.parent) for path in root.glob("usr/lib/*/libnetplan.so.*"))

    answer = subprocess.run(
        [root / program, "--root-dir", tmp_path], env={**os.environ, "LD_LIBRARY_PATH": libraries}, check=False,
        capture_output=True,
    )  # fmt: skip
    if answer.returncode == 127:
        pytest.skip(f"netplan's libraries are not here: {answer.stderr.decode()[:200]}")

    assert (answer.returncode, answer.stderr) == (0, b"")
    if renderer == "networkd":
        text = (tmp_path / "run/netplan/wpa-wlan0.conf").read_text()
        assert f'ssid="{ssid}"\n' in text and f"psk={make_wifi(ssid, 'passphrase', 'DE').key}\n" in text
        return
    text = next(tmp_path.glob("run/NetworkManager/system-connections/netplan-wlan0-*")).read_text()
    written = ssid.replace("\\", "\\\\").replace(" ", "\\s", 1) if ssid.startswith(" ") else ssid.replace("\\", "\\\\")
    assert f"ssid={written}\n" in text and f"psk={make_wifi(ssid, 'passphrase', 'DE').key}\n" in text
