"""The `edgectl flash` command: images of every kind written onto files and compared byte by byte."""

from __future__ import annotations

import dataclasses
import functools
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from edgesplit.errors import MalformedMessage, MediumFailed, TrustError, UsageError
from edgesplit_cli.main import cli
from edgesplit_provisioning.image import card, session
from edgesplit_provisioning.image.target_checks import resolve_target
from support.card_images import (
    BOOKWORM,
    BOOT_OFFSET,
    CLAIM,
    CMDLINE,
    MIB,
    PI_FILES,
    PUBLIC_KEY,
    TRIXIE,
    UBUNTU,
    Kind,
    Machine,
    boot_of,
    fsck,
    make_claim,
    make_image,
    make_kit,
    needs_card_tools,
)

KINDS = {"bookworm": BOOKWORM, "trixie": TRIXIE, "ubuntu": UBUNTU}
PYTHONS = {"bookworm": "3.11", "trixie": "3.13", "ubuntu": "3.12"}
MARK = b"somewhere in the root file system"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each kind, and a kit for it."""
    needs_card_tools()
    folder = tmp_path_factory.mktemp("images")
    made = {name: make_image(folder / f"{name}.img", kind) for name, kind in KINDS.items()}
    for name, python in PYTHONS.items():
        make_kit(folder / f"kit-{name}", python)
    return made


@pytest.fixture
def bench(tmp_path: Path, images: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> FlashCommand:
    """Where things are typed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return FlashCommand(tmp_path, images)


class FlashCommand:
    """A folder with a claim, a public key and a passphrase, and the command."""

    def __init__(self, folder: Path, images: dict[str, Path]) -> None:
        self.folder, self.images, self.card = folder, images, folder / "card.img"
        make_claim(folder / "claim.json")
        (folder / "key.pub").write_text(f"{PUBLIC_KEY} me\n")
        (folder / "passphrase").write_text("correct horse\n")

    def flash(self, kind: str, *words: str, image: Path | None = None, **kept: Any) -> Result:
        """Typed, answered with yes; its error rises."""
        kit = self.images[kind].with_name(f"kit-{kind}")
        asked = [
            "flash", "--device", "raspberrypi4", "--image", str(image or self.images[kind]), "--to", str(self.card),
            "--kit", str(kit), "--claim", str(self.folder / "claim.json"), "--ssh-key", str(self.folder / "key.pub"),
            "--wifi", 'my "net`', "--wifi-password-file", str(self.folder / "passphrase"), "--wifi-country", "DE",
            *words,
        ]  # fmt: skip
        result = CliRunner().invoke(cli, asked, **{"input": "y\n", **kept})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_every_image_format_is_flashed_completely(bench: FlashCommand, kind: str) -> None:
    """The image byte by byte outside the boot partition; in it the kit, the claim, the first boot; fsck clean."""
    assert bench.flash(kind).exit_code == 0

    fat, image = boot_of(bench.card), bench.images[kind]
    flashed, original = bench.card.read_bytes(), image.read_bytes()
    end = BOOT_OFFSET + fat.size
    assert flashed[:BOOT_OFFSET] == original[:BOOT_OFFSET] and flashed[end:] == original[end:]
    checked = fsck(bench.card, bench.folder)
    assert checked.returncode == 0, checked.stdout
    assert json.loads(fat.read("edgesplit/claim.json")) == CLAIM
    for file in image.with_name(f"kit-{kind}").iterdir():
        assert fat.read(f"edgesplit/{file.name}") == file.read_bytes()
    line = fat.read("cmdline.txt").decode()
    assert line.count("\n") == 1 and line.endswith("\n")
    assert fat.read("edgesplit/cmdline.orig") == KINDS[kind].boot["cmdline.txt"].encode()
    if kind == "bookworm":
        assert line.startswith(CMDLINE) and "systemd.run=/boot/firmware/firstrun.sh " in line
        assert b"hostname=cam-1\n" in fat.read("firstrun.sh")
    else:
        instance = yaml.safe_load(fat.read("meta-data"))["instance-id"]
        assert f" ds=nocloud;i={instance} " in line
        assert yaml.safe_load(fat.read("user-data"))["user"]["name"] == {"trixie": "pi", "ubuntu": "ubuntu"}[kind]
        assert 'my "net`' in yaml.safe_load(fat.read("network-config"))["network"]["wifis"]["wlan0"]["access-points"]


@pytest.mark.parametrize("packed", ["xz", "named"])
def test_a_compressed_image_is_verified_by_its_digest_file(bench: FlashCommand, packed: str) -> None:
    """Unpacked where it is needed, and nothing of it stays in the cache."""
    image = bench.folder / f"system.img{'.xz' if packed == 'xz' else ''}"
    image.write_bytes(lzma.compress(bench.images["trixie"].read_bytes(), preset=0))
    from edgesplit_provisioning.image.archive import sha256

    image.with_name(f"{image.name}.sha256").write_text(f"{sha256(image, lambda *_: None)}  {image.name}\n")

    result = bench.flash("trixie", "--json", image=image)

    told = json.loads(result.stdout)
    assert told["digest"] == f"{image.name}.sha256" and told["device"] == "cam-1" and told["python"] == "3.13"
    assert "NOBODY CHECKED" not in result.stderr
    assert not list((bench.folder / "cache/edgesplit/unpacked").iterdir())


def test_an_unverified_image_needs_confirmation(bench: FlashCommand) -> None:
    """With the answer no, nothing is written."""
    result = bench.flash("trixie", input="n\n")
    assert result.exit_code == 1 and "THE IMAGE IS NOT VERIFIED" in result.stderr
    assert not bench.card.exists()


def test_an_image_with_a_wrong_digest_is_refused_before_writing(bench: FlashCommand) -> None:
    """The digest differs from the given one."""
    bench.card.write_bytes(bytes(4_096))
    with pytest.raises(TrustError, match="Download it again"):
        bench.flash("trixie", "--sha256", "0" * 64)
    assert bench.card.read_bytes() == bytes(4_096)


def test_an_image_path_with_special_characters_is_passed_literally(bench: FlashCommand) -> None:
    """mtools interprets @@ and debugfs ?offset= in a path; neither receives the original."""
    image = bench.folder / "trixie@@1?offset=2 $(x).img"
    image.write_bytes(bench.images["trixie"].read_bytes())
    bench.card = bench.folder / "card@@2.img"

    bench.flash("trixie", image=image)

    assert bench.card.read_bytes()[:512] == image.read_bytes()[:512]


def test_boot_partition_names_are_case_insensitive(bench: FlashCommand) -> None:
    """CMDLINE.TXT and USER-DATA are replaced, not joined by a second."""
    upper = {name.upper(): content for name, content in TRIXIE.boot.items()}
    image = make_image(bench.folder / "upper.img", dataclasses.replace(TRIXIE, boot=upper))

    bench.flash("trixie", image=image)

    names = [name.lower() for name in boot_of(bench.card).names()]
    assert len(names) == len(set(names)) and {"cmdline.txt", "user-data"} <= set(names)
    assert b"ds=nocloud" in boot_of(bench.card).read("CMDLINE.TXT")
    assert fsck(bench.card, bench.folder).returncode == 0


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Kind({"config.txt": "x"}, "ID=debian\n"), "no cmdline.txt"),
        (Kind({"cmdline.txt": "x=1"}, 'ID=arch\nPRETTY_NAME="Arch Linux ARM"\n'), "Arch Linux ARM"),
        (Kind(PI_FILES, "ID=debian\n", "3.11", programs=BOOKWORM.programs, elf=40), "64-bit image"),
        (Kind(PI_FILES, "ID=debian\n", "3.9", programs=BOOKWORM.programs), "Python 3.9"),
        (Kind({**PI_FILES, "cmdline.txt": "a\nb\n"}, "ID=debian\n", programs=BOOKWORM.programs), "2 lines"),
    ],
)
def test_an_unsupported_image_leaves_the_card_unchanged(bench: FlashCommand, kind: Kind, why: str) -> None:
    """The message has what was detected."""
    image = make_image(bench.folder / "odd.img", kind)
    with pytest.raises(UsageError, match=why):
        bench.flash("bookworm", image=image)
    assert not bench.card.exists()


def test_a_truncated_image_leaves_the_card_unchanged(bench: FlashCommand) -> None:
    """Its partitions reach beyond its end; or it is no image at all."""
    image = bench.folder / "short.img"
    image.write_bytes(bench.images["trixie"].read_bytes()[: 12 * MIB])
    with pytest.raises(UsageError, match="is truncated"):
        bench.flash("trixie", image=image)
    image.write_bytes(b"\0" * MIB)
    with pytest.raises(UsageError, match="no partition table"):
        bench.flash("trixie", image=image)
    assert not bench.card.exists()


def test_a_full_boot_partition_leaves_the_card_unchanged(bench: FlashCommand) -> None:
    """Its free space is checked before anything is written."""
    kit = make_kit(bench.folder / "kit", "3.13")
    (kit / "wheels.tar").write_bytes(bytes(40 * MIB))
    from edgesplit_provisioning.kit.manifest import decode, encode, list_files

    described = decode((kit / "kit.json").read_bytes())
    files = list_files({path.name: path for path in kit.iterdir() if path.name != "kit.json"})
    import msgspec

    (kit / "kit.json").write_bytes(encode(msgspec.structs.replace(described, files=files)))
    with pytest.raises(UsageError, match="bytes free"):
        bench.flash("trixie", "--kit", str(kit))
    assert not bench.card.exists()


def test_a_kit_for_another_python_is_refused(bench: FlashCommand) -> None:
    """It would fail on the device, unnoticed."""
    with pytest.raises(UsageError, match=r"for 3\.11, and the image has 3\.13"):
        bench.flash("trixie", "--kit", str(bench.images["bookworm"].with_name("kit-bookworm")))


def test_a_corrupt_kit_is_refused(bench: FlashCommand) -> None:
    """By its own digests."""
    kit = make_kit(bench.folder / "kit", "3.13")
    (kit / "wheels.tar").write_bytes(b"x")
    with pytest.raises(MalformedMessage):
        bench.flash("trixie", "--kit", str(kit))


def test_a_dry_run_lists_files_and_writes_nothing(bench: FlashCommand) -> None:
    """Files with their sizes and the kernel's command line; no secret is printed."""
    told = json.loads(bench.flash("trixie", "--dry-run", "--json").stdout)

    assert told["format"] == "cloud-init" and told["python"] == "3.13" and told["boot_partition"] == "/boot/firmware"
    assert {"edgesplit/kit.json", "edgesplit/claim.json", "user-data", "network-config"} <= set(told["files"])
    assert "ds=nocloud;i=edgesplit-cam-1-" in told["cmdline"]["after"]
    assert not bench.card.exists()
    assert "nothing was written" in bench.flash("trixie", "--dry-run").stdout


def test_a_corrupted_boot_partition_is_detected(bench: FlashCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card returns another file than was written: no partition table is written."""
    put = card.write_boot_files

    def spoilt(fat: Any, *rest: Any) -> None:
        put(fat, *rest)
        fat.write("edgesplit/wheels.tar", b"something else")

    monkeypatch.setattr(card, "write_boot_files", spoilt)
    with pytest.raises(MediumFailed, match=r"wheels\.tar is not what was written"):
        bench.flash("trixie")
    assert bench.card.read_bytes()[:512] == bytes(512)


def test_a_full_card_is_reported() -> None:
    """/dev/full accepts nothing."""
    needs_card_tools()
    from edgesplit_provisioning.image.target_device import OpenedMedium, medium_failed

    with open("/dev/full", "r+b", buffering=0) as full:
        medium = OpenedMedium("/dev/full", full.fileno(), None)
        with pytest.raises(OSError) as refused:
            medium.write(memoryview(b"x"), 0)
        assert "NOT usable" in str(medium_failed(medium, "writing", refused.value))


def test_a_second_flash_replaces_the_first(bench: FlashCommand) -> None:
    """The same file, another name; an instance that is new."""
    bench.flash("bookworm")
    before = boot_of(bench.card).read("edgesplit/card.json")
    make_claim(bench.folder / "claim.json", device="cam-2")
    bench.flash("trixie")
    assert json.loads(boot_of(bench.card).read("edgesplit/card.json"))["device"] == "cam-2"
    assert json.loads(before)["device"] == "cam-1"
    assert card.card_owner(bench.card) == "cam-2" and card.card_owner(bench.folder / "key.pub") == ""


def test_a_card_in_a_reader_is_flashed_like_a_file(bench: FlashCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lay behind the image stays; a card that is too small is refused as it was."""
    machine = Machine(bench.folder / "machine")
    node = machine.disk("sdb", 48 * MIB)
    with node.open("r+b") as raw:
        raw.seek(45 * MIB)
        raw.write(MARK)
    monkeypatch.setattr(session, "resolve_target", functools.partial(resolve_target, root=machine.root))

    result = bench.flash("trixie", "--to", "/dev/sdb")

    assert "everything on /dev/sdb will be lost" in result.stderr and "serial S-sdb" in result.stderr
    assert json.loads(boot_of(node).read("edgesplit/claim.json")) == CLAIM
    assert node.read_bytes()[45 * MIB :].startswith(MARK)
    small = machine.disk("sdc", 16 * MIB)
    with pytest.raises(UsageError, match="larger card"):
        bench.flash("trixie", "--to", "/dev/sdc")
    assert not any(small.read_bytes()[:MIB])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--device", "toaster"], "raspberrypi4"),
        (["--hostname", "cam-2"], "for cam-1, not for cam-2"),
        (["--label", "room"], "KEY=VALUE"),
        (["--user", "root"], "not a user"),
        (["--wifi-country", "germany"], "two capital letters"),
        (["--wifi", "x" * 40], "1 to 32 bytes"),
        (["--sha256", "12"], "64 hex digits"),
        (["--coral"], "libedgetpu1"),
        (["--coral-deb", __file__], "not a Debian package"),
    ],
)
def test_contradictory_options_are_refused_first(bench: FlashCommand, words: list[str], why: str) -> None:
    """Before any prompt, unpacking or writing."""
    with pytest.raises(UsageError, match=why):
        bench.flash("trixie", *words)


def test_missing_flash_options_are_required() -> None:
    """--device, --image and --to."""
    told = CliRunner().invoke(cli, ["flash"])
    assert isinstance(told.exception, UsageError) and "--list" in str(told.exception)


def test_disks_are_listed_on_any_machine() -> None:
    """Also on one without a disk."""
    assert CliRunner().invoke(cli, ["flash", "--list"]).exit_code == 0
    assert isinstance(json.loads(CliRunner().invoke(cli, ["flash", "--list", "--json"]).stdout), list)
