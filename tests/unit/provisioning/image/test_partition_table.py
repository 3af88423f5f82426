"""The pure parts of flashing: partition tables, the kernel's command line, networks, names, formats, batches."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgesplit.errors import LinkError, NotFound, UsageError
from edgesplit_provisioning import wifi
from edgesplit_provisioning.image import cmdline, detect, installer, options, root_filesystem
from edgesplit_provisioning.image.batch import Journal, read_rows
from edgesplit_provisioning.image.detect import Format
from edgesplit_provisioning.image.device_config import check_name_is_free, profile_of, read_claim, why_unreachable
from edgesplit_provisioning.image.partition_table import read_table
from edgesplit_provisioning.image.root_filesystem import OperatingSystem
from edgesplit_provisioning.image.wait_online import WaitProgress, wait_online
from edgesplit_provisioning.kit import Target
from support.card_images import (
    BOOKWORM,
    BOOT_OFFSET,
    BOOT_SIZE,
    CMDLINE,
    MIB,
    PI_FILES,
    PUBLIC_KEY,
    SEEDS,
    gpt,
    make_claim,
    mbr,
)

PARTS = [(BOOT_OFFSET, BOOT_SIZE, True), (BOOT_OFFSET + BOOT_SIZE, MIB, False)]
BOOKWORM_SYSTEM = OperatingSystem(identity="debian", python="3.11", machine="aarch64", has_first_run=True)


@pytest.mark.parametrize("kind", ["MBR", "GPT"])
def test_boot_and_root_partitions_are_found_in_mbr_and_gpt(kind: str) -> None:
    """The FAT that the firmware reads, and the Linux partition behind it, by their bytes on the disk."""
    table = read_table({"MBR": mbr, "GPT": gpt}[kind](PARTS))

    assert table.kind == kind
    assert (table.boot.offset, table.boot.size) == (BOOT_OFFSET, BOOT_SIZE)
    assert table.root is not None and table.root.offset == BOOT_OFFSET + BOOT_SIZE
    assert table.end == BOOT_OFFSET + BOOT_SIZE + MIB


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"", "no partition table"),
        (bytes(4096), "no partition table"),
        (mbr([]), "lists no partition"),
        (mbr([(BOOT_OFFSET, BOOT_SIZE, True), (BOOT_OFFSET + MIB, BOOT_SIZE, False)]), "overlap"),
        (gpt(PARTS)[:512] + bytes(512 * 40), "GPT that is not there"),
        (gpt(PARTS)[:530] + b"\xff" + gpt(PARTS)[531:], "header of its GPT is damaged"),
        (gpt(PARTS)[:1100] + b"\xff" + gpt(PARTS)[1101:], "entries of its GPT are damaged"),
        (gpt(PARTS)[:2048], "entries of its GPT are damaged"),
    ],
)
def test_a_damaged_partition_table_is_refused_with_the_reason(head: bytes, why: str) -> None:
    """Nothing is guessed about such a disk."""
    with pytest.raises(UsageError, match=why):
        read_table(head)


def test_a_disk_without_a_fat_partition_is_refused() -> None:
    """A table of Linux partitions alone is no image for these devices."""
    with pytest.raises(UsageError, match="no FAT partition"):
        _ = read_table(mbr([(BOOT_OFFSET, BOOT_SIZE, False)])).boot


@given(st.binary(max_size=2_000), st.integers(0, 1_200), st.booleans())
def test_a_corrupt_partition_table_parses_or_is_refused(noise: bytes, place: int, is_gpt: bool) -> None:
    """No other exception, whatever the first sectors hold."""
    head = (gpt if is_gpt else mbr)(PARTS)
    try:
        table = read_table(head[:place] + noise + head[place + len(noise) :])
        assert table.end > table.start >= 512
    except UsageError:
        pass


def test_kernel_parameters_replace_earlier_values_on_one_line() -> None:
    """New parameters come last and once; all others keep their order."""
    raw = f"{CMDLINE} ds=nocloud;i=old\r\n\n".encode()

    made = cmdline.with_parameters(raw, ["ds=nocloud;i=new"])

    assert made == f"{CMDLINE} ds=nocloud;i=new\n".encode()
    assert cmdline.with_parameters(made, ["ds=nocloud;i=new"]) == made


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"a\nb\n", "r\u00f6ot=1\n".encode(), b"a" * 3_000])
def test_an_invalid_kernel_command_line_is_refused(raw: bytes) -> None:
    """No line, two lines, no text, or more than a kernel reads."""
    with pytest.raises(UsageError, match=r"cmdline\.txt"):
        cmdline.with_parameters(raw, ["x=1"])


def test_quoted_spaces_stay_in_one_kernel_parameter() -> None:
    """As the kernel parses them."""
    assert cmdline.parameters(b'a="b c"  d\n') == ['a="b c"', "d"]


def test_wireless_keys_match_the_standards_test_vectors() -> None:
    """IEEE 802.11i, annex H.4.3: its first two test vectors."""
    assert wifi.derived_key(b"IEEE", "password") == "f42c6fc52df0ebef9ebb4b90b38a5f902e83fe1b135a70e23aed762e9710a12e"
    assert wifi.derived_key(b"ThisIsASSID", "ThisIsAPassword") == (
        "0dc0d6eb90555ed6419756b9a15ec3e3209b63df707dd508d14581f8982721af"
    )


@given(st.text(min_size=8, max_size=20).filter(lambda text: 8 <= len(text.encode("utf-8", "surrogatepass")) <= 63))
def test_any_passphrase_derives_a_key_or_is_refused(passphrase: str) -> None:
    """A pasted line ending is stripped; everything else is used unchanged."""
    try:
        key = wifi.derived_key(b"net", f"{passphrase}\r\n")
    except (UsageError, UnicodeEncodeError):
        return
    clean = passphrase.strip("\r\n")
    assert key == hashlib.pbkdf2_hmac("sha1", clean.encode("utf-8", "surrogateescape"), b"net", 4096, 32).hex()


@pytest.mark.parametrize("passphrase", ["", "short", "x" * 65, "two\nlines of it", "nul\0 in the middle"])
def test_an_invalid_passphrase_is_refused(passphrase: str) -> None:
    """Before a card is written that never joins; the message does not repeat it."""
    with pytest.raises(UsageError) as refused:
        wifi.derived_key(b"net", passphrase)
    assert not passphrase or passphrase not in str(refused.value)


def test_a_key_of_64_digits_is_used_unchanged() -> None:
    """It is the derived key already."""
    assert wifi.derived_key(b"net", "AB" * 32) == "ab" * 32


@pytest.mark.parametrize(
    ("ssid", "country"), [("", "DE"), ("x" * 33, "DE"), ("net", "de"), ("net", "DEU"), ("net", "")]
)
def test_an_invalid_network_name_or_country_is_refused(ssid: str, country: str) -> None:
    """1 to 32 bytes, and a country in capitals."""
    with pytest.raises(UsageError):
        wifi.make_wifi(ssid, "passphrase", country)


def test_repr_contains_no_secret() -> None:
    """A log or a traceback shows no key."""
    made = wifi.make_wifi("net", "passphrase", "DE")
    assert made.key not in repr(made)


@pytest.mark.parametrize(
    "name", ["", "-a", "a-", "A", "a_b", "a.b", "a" * 64, "localhost", "caf\u00e9", "a\nb", "$(reboot)"]
)
def test_an_invalid_host_name_is_refused(name: str) -> None:
    """RFC 1123, in lower case."""
    with pytest.raises(UsageError):
        options.checked_hostname(name)


def test_generated_device_names_are_unique() -> None:
    """Two cards without a name get two."""
    made = {options.random_hostname("raspberrypi3b+") for _ in range(20)}
    assert len(made) == 20 and all(options.checked_hostname(item) == item for item in made)


def test_a_private_ssh_key_is_refused(tmp_path: Path) -> None:
    """id_ed25519 in place of id_ed25519.pub is reported as such."""
    file = tmp_path / "id"
    file.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n")
    with pytest.raises(UsageError, match="private key"):
        options.read_ssh_keys(file)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "ssh-ed25519",
        "ssh-ed25519 AAAA",
        'command="x" ' + PUBLIC_KEY,
        PUBLIC_KEY.replace("ed25519", "rsa", 1),
    ],
)
def test_an_invalid_public_key_is_refused(tmp_path: Path, line: str) -> None:
    """Its bytes must name the type that is written before them."""
    file = tmp_path / "id.pub"
    file.write_text(line + "\n")
    with pytest.raises(UsageError):
        options.read_ssh_keys(file)


def test_control_characters_are_removed_from_key_comments(tmp_path: Path) -> None:
    """The key stays as it is."""
    file = tmp_path / "id.pub"
    file.write_text(f"# mine\n{PUBLIC_KEY} me\x1b[2J@h\u00f6re\n\n")
    assert options.read_ssh_keys(file) == (f"{PUBLIC_KEY} me[2J@h\u00f6re",)


def test_image_formats_are_detected_by_content() -> None:
    """Bookworm without cloud-init's files is configured by firstrun.sh; where those and cloud-init are, by them."""
    issue = PI_FILES["issue.txt"]
    with_seeds = [*PI_FILES, *SEEDS]
    cloud = OperatingSystem(identity="debian", python="3.13", machine="aarch64", has_cloud_init=True)

    assert detect.detect(PI_FILES, issue, BOOKWORM_SYSTEM).format is Format.FIRSTRUN
    assert detect.detect([name.upper() for name in PI_FILES], issue, BOOKWORM_SYSTEM).format is Format.FIRSTRUN
    assert detect.detect(with_seeds, issue, cloud).format is Format.CLOUD_INIT
    assert (
        detect.detect(["cmdline.txt", *SEEDS], "", OperatingSystem(identity="ubuntu", has_cloud_init=True)).default_user
        == "ubuntu"
    )


@pytest.mark.parametrize(
    ("names", "issue", "system", "why"),
    [
        (["config.txt"], "", OperatingSystem(), "no cmdline.txt"),
        (["cmdline.txt"], "", OperatingSystem(name="Some Linux"), "neither Raspberry Pi OS.*Some Linux"),
        (["cmdline.txt", "rpi-preseed.toml"], "", OperatingSystem(), "rpi-preseed"),
        (PI_FILES, "Raspberry Pi reference 2022-09-22", OperatingSystem(), "older than Bookworm"),
        (
            PI_FILES,
            PI_FILES["issue.txt"],
            OperatingSystem(identity="debian", python="3.11"),
            "none of its first-boot scripts",
        ),
        ([*PI_FILES, *SEEDS], "", OperatingSystem(identity="debian"), "no cloud-init"),
        (PI_FILES, PI_FILES["issue.txt"], OperatingSystem(machine="armhf (32-bit)"), "64-bit image"),
        (PI_FILES, PI_FILES["issue.txt"], OperatingSystem(name="Debian 11", python="3.9"), "Debian 11 has Python 3.9"),
    ],
)
def test_an_unsupported_image_is_refused_with_the_detected_system(
    names: list[str], issue: str, system: OperatingSystem, why: str
) -> None:
    """Settings that nothing would read are never written."""
    with pytest.raises(UsageError, match=why):
        detect.detect(names, issue, system)


def test_an_image_without_the_boards_device_tree_is_reported() -> None:
    """An image older than a board does not boot on it."""
    assert detect.why_board_may_not_boot("raspberrypi5", ["bcm2711-rpi-4-b.dtb"])
    assert not detect.why_board_may_not_boot("raspberrypi5", BOOKWORM.boot)


def test_fstab_is_parsed_like_the_manual() -> None:
    """Comments and tabs."""
    assert (
        root_filesystem.boot_mount(b"#LABEL=x /boot vfat\nLABEL=y\t/boot/firmware\tvfat\tdefaults\n")
        == "/boot/firmware"
    )
    assert root_filesystem.boot_mount(b"UUID=1 / ext4 defaults\n") == ""
    assert root_filesystem.elf_machine(b"\x7fELF".ljust(18, b"\0") + struct.pack("<H", 40)).startswith("armhf")
    assert root_filesystem.elf_machine(b"#!/bin/sh") == ""


def test_a_device_csv_is_parsed_with_labels(tmp_path: Path) -> None:
    """Columns in any order, a byte order mark from a spreadsheet, empty lines."""
    file = tmp_path / "devices.csv"
    file.write_bytes("\ufeffgroup,hostname,labels\ncams, cam-1, room=a;floor=2\n,,\n,cam-2,\n".encode())

    one, two = read_rows(file)

    assert (one.hostname, one.group, dict(one.labels)) == ("cam-1", "cams", {"room": "a", "floor": "2"})
    assert (two.hostname, two.group, dict(two.labels)) == ("cam-2", None, {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names the columns"),
        ("name\ncam-1\n", "names the columns"),
        ("hostname,colour\ncam-1,red\n", "names the columns"),
        ("hostname\n", "lists no device"),
        ("hostname\ncam-1\ncam-1\n", "line 3: cam-1 is in line 2"),
        ("hostname\nCam 1\n", "line 2: not a host name"),
        ("hostname\nbroker\n", "line 2: not a device name"),
        ("hostname,labels\ncam-1,room\n", "line 2: not a label: 'room'"),
        ("hostname\ncam-1,x\n", "line 2: more fields"),
    ],
)
def test_an_invalid_device_csv_names_its_line(tmp_path: Path, text: str, why: str) -> None:
    """Before the first card is written."""
    file = tmp_path / "devices.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=why):
        read_rows(file)


def test_a_truncated_journal_counts_complete_lines(tmp_path: Path) -> None:
    """A card whose line is incomplete is written again; the line appended next stays separate."""
    journal = Journal(tmp_path / "j")
    journal.add("cam-1", "i-1", "/dev/sdx")
    with (tmp_path / "j").open("ab") as opened:
        opened.write(b'{"hostname": "cam-2", "ins')

    again = Journal(tmp_path / "j")
    assert again.done == {"cam-1"}
    again.add("cam-3", "i-3", "/dev/sdx")
    assert Journal(tmp_path / "j").done == {"cam-1", "cam-3"}


class Controller:
    """Answers with a list of states, one after another."""

    def __init__(self, *states: str | Exception) -> None:
        self.states = list(states)

    def get(self, path: str, **query: object) -> object:
        said = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(said, Exception):
            raise said
        return {"state": said}


def test_waiting_ends_when_the_device_is_online_and_survives_outages() -> None:
    """A controller that restarts meanwhile is polled again."""
    told: list[WaitProgress] = []
    clock = iter(range(100))
    api = Controller("claimed", LinkError("away"), "online")

    seen = wait_online(api, ["cam-1"], 50, told.append, lambda: float(next(clock)), lambda _: None)

    assert seen.online == ["cam-1"]
    assert [message.states["cam-1"] for message in told] == ["claimed", "claimed", "online"]


def test_a_wait_timeout_names_the_missing_devices() -> None:
    """It is a network error, after which a script may wait again."""
    clock = iter(range(100))
    with pytest.raises(LinkError, match=r"not online within .* cam-1.*first-boot\.log"):
        wait_online(Controller("claimed"), ["cam-1"], 3, lambda _: None, lambda: float(next(clock)), lambda _: None)


def test_a_device_revoked_meanwhile_ends_the_wait() -> None:
    """It will never come."""
    with pytest.raises(UsageError, match="revoked"):
        wait_online(Controller("revoked"), ["cam-1"], 3, lambda _: None, lambda: 0.0, lambda _: None)


def test_an_existing_device_name_needs_replace() -> None:
    """Otherwise its card would boot and find its claim refused."""
    with pytest.raises(UsageError, match="--replace"):
        check_name_is_free(Controller("online"), "cam-1", False)  # type: ignore[arg-type]
    check_name_is_free(Controller("online"), "cam-1", True)  # type: ignore[arg-type]
    check_name_is_free(Controller("claimed"), "cam-1", False)  # type: ignore[arg-type]
    check_name_is_free(Controller(NotFound("no such device")), "cam-1", False)  # type: ignore[arg-type]


def test_a_claim_must_match_the_cards_device_name(tmp_path: Path) -> None:
    """The name on the card and that in the claim are the same."""
    file = make_claim(tmp_path / "claim.json")
    assert read_claim(file, None)[0] == "cam-1"
    with pytest.raises(UsageError, match="for cam-1, not for cam-2"):
        read_claim(file, "cam-2")


def test_a_loopback_controller_address_is_warned_about(tmp_path: Path) -> None:
    """No device could reach it."""
    at = make_claim(tmp_path / "claim.json", controller_url="https://127.0.0.1:8443")
    assert "none of them can reach" in why_unreachable(at.read_bytes())
    assert not why_unreachable(make_claim(at).read_bytes())


class EdgeTpu:
    """Packages for an accelerator."""

    def archive(self, machine: str, folder: Path) -> Path:
        made = folder / "coral.tar"
        made.write_text(f"for {machine}")
        return made


def flash_options(**given: Any) -> Any:
    """The options of a flash that a kit depends on."""
    return SimpleNamespace(**{"kit_folder": None, "extras": (), "wheelhouse": None, "interpreter": None, **given})


def test_an_edge_tpu_adds_its_library_and_litert_to_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the image's machine and Python; and its device profile is the one of a board with an accelerator."""
    asked: dict[str, Any] = {}

    def build_kit(target: Target, *, more: dict[str, Path], **other: Any) -> None:
        asked.update(other, target=target, coral=more["coral.tar"].read_text())

    monkeypatch.setattr(installer, "build_kit", build_kit)
    found = detect.DetectedImage(Format.CLOUD_INIT, "/boot/firmware", OperatingSystem(python="3.13", machine="aarch64"))

    installer.kit_for(found, flash_options(extras=("otel",)), EdgeTpu(), lambda _: None)  # type: ignore[arg-type]

    assert asked["target"] == Target(python="3.13", machine="aarch64") and asked["coral"] == "for aarch64"
    assert asked["extras"] == ["otel", "tflite"]
    assert profile_of("raspberrypi4", coral=True) == "coral-usb-rpi4"
    assert profile_of("raspberrypi4", coral=False) == "raspberrypi4"
    assert profile_of("raspberrypi5", coral=True) == "raspberrypi5"  # no profile of that pair: by its CPU


def test_without_a_detected_python_a_kit_is_required() -> None:
    """A root file system other than ext4 cannot be inspected."""
    found = detect.DetectedImage(Format.CLOUD_INIT, "/boot/firmware", OperatingSystem())
    with pytest.raises(UsageError, match="--kit"):
        installer.kit_for(found, flash_options(), None, lambda _: None)
