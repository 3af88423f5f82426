"""Disks that may be written: not the system's, none in use, no partition, no file that is something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import UsageError
from edgesplit_provisioning.image.block_devices import list_disks, read_disk
from edgesplit_provisioning.image.target_checks import candidates, resolve_target
from edgesplit_provisioning.image.target_device import open_disk, open_file
from support.card_images import BOOT_OFFSET, BOOT_SIZE, MIB, Machine, mbr


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Runs from an encrypted partition of sda; has a card in sdb."""
    made = Machine(tmp_path)
    made.disk("sda", 512 * MIB, removable=False)
    made.partition("sda", "sda1", "8:1")
    made.partition("sda", "sda2", "8:2")
    made.held_by("sda2", "dm-0", "253:0")
    made.mount("/dev/mapper/root", "/", "253:0")
    made.mount("/dev/sda1", "/boot", "8:1")
    made.disk("sdb", 64 * MIB)
    made.partition("sdb", "sdb1", "8:17")
    return made


def test_a_card_is_described_by_size_model_and_serial(machine: Machine) -> None:
    """Its owner can recognise it before it is overwritten."""
    found = resolve_target(Path("/dev/sdb"), root=machine.root)

    assert found.description == "/dev/sdb: Card, 64.0 MiB, serial S-sdb"
    assert found.size == 64 * MIB and found.is_disk and "will be lost" in found.warning


def test_the_system_disk_is_refused_through_partitions_and_encryption(machine: Machine) -> None:
    """The file system of / lies on it, two layers down."""
    assert read_disk("sda", machine.root).used_for == ("/", "/boot")
    with pytest.raises(UsageError, match="holds the system"):
        resolve_target(Path("/dev/sda"), root=machine.root, fixed_disk=True)


@pytest.mark.parametrize(("source", "place"), [("/dev/sdb1", "/media/me/bootfs"), ("/dev/sdb1", "/mnt/a b")])
def test_a_disk_with_a_mounted_partition_is_refused(machine: Machine, source: str, place: str) -> None:
    """The mount point is named, so that it can be unmounted."""
    machine.mount(source, place.replace(" ", "\\040"))
    with pytest.raises(UsageError, match=f"in use at {place}"):
        resolve_target(Path("/dev/sdb"), root=machine.root)


def test_a_mounted_disk_is_recognised_by_its_device_number(machine: Machine) -> None:
    """/dev/root is no node; the kernel's number is the same."""
    machine.mount("/dev/root", "/data", "8:17")
    with pytest.raises(UsageError, match="in use at /data"):
        resolve_target(Path("/dev/sdb"), root=machine.root)


def test_a_swap_disk_is_refused(machine: Machine) -> None:
    """Writing to it would crash the machine."""
    machine.swap("/dev/sdb1")
    with pytest.raises(UsageError, match="holds the system"):
        resolve_target(Path("/dev/sdb"), root=machine.root)


def test_a_partition_is_refused_with_its_disks_name(machine: Machine) -> None:
    """An image is a whole disk."""
    with pytest.raises(UsageError, match="whole disk, /dev/sdb"):
        resolve_target(Path("/dev/sdb1"), root=machine.root)


def test_an_unknown_device_node_is_refused(machine: Machine) -> None:
    """A mistyped name creates no file in /dev."""
    with pytest.raises(UsageError, match="not a disk of this machine"):
        resolve_target(Path("/dev/sdz"), root=machine.root)


@pytest.mark.parametrize(
    ("given", "why"),
    [({"read_only": True}, "write-protected"), ({"size": 0}, "no card in it"), ({"removable": False}, "--fixed-disk")],
)
def test_a_disk_that_cannot_or_should_not_be_written_is_refused(
    machine: Machine, given: dict[str, int], why: str
) -> None:
    """Write-protected, an empty reader, a disk that is built in."""
    machine.disk("sdc", **{"size": 64 * MIB, **given})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=why):
        resolve_target(Path("/dev/sdc"), root=machine.root)


def test_a_built_in_disk_is_written_with_that_option(machine: Machine) -> None:
    """An NVMe drive in a dock, for instance."""
    machine.disk("nvme0n1", 64 * MIB, removable=False)
    assert resolve_target(Path("/dev/nvme0n1"), root=machine.root, fixed_disk=True).size == 64 * MIB


def test_a_card_in_a_built_in_reader_is_accepted(machine: Machine) -> None:
    """A laptop's reader reports that it is not removable, but the card reports its type. Soldered flash is refused."""
    for name, kind in (("mmcblk0", "MMC"), ("mmcblk1", "SD")):
        machine.disk(name, 64 * MIB, removable=False)
        (machine.root / f"sys/block/{name}/device/type").write_text(f"{kind}\n")

    assert resolve_target(Path("/dev/mmcblk1"), root=machine.root).is_disk
    with pytest.raises(UsageError, match="--fixed-disk"):
        resolve_target(Path("/dev/mmcblk0"), root=machine.root)


def test_a_by_id_link_resolves_to_its_disk(machine: Machine) -> None:
    """/dev/disk/by-id is the name that does not change."""
    (machine.root / "dev/disk").mkdir()
    (machine.root / "dev/disk/card").symlink_to(machine.root / "dev/sdb")
    assert resolve_target(Path("/dev/disk/card"), root=machine.root).size == 64 * MIB


def test_the_disk_list_shows_which_disks_are_writable(machine: Machine) -> None:
    """Loop devices and optical drives are not listed."""
    for name in ("loop0", "zram0", "sr0", "dm-1"):
        (machine.root / "sys/block" / name).mkdir()

    found = {candidate.name: why for candidate, why in candidates(machine.root)}

    assert set(found) == {"sda", "sdb"} == {disk.name for disk in list_disks(machine.root)}
    assert "system" in found["sda"] and found["sdb"] == ""


def test_a_disk_has_one_writer_at_a_time(machine: Machine) -> None:
    """Two flashes of one card cannot run."""
    node = machine.root / "dev/sdb"
    held = open_disk(node, 64 * MIB)
    with pytest.raises(UsageError, match="another program"):
        open_disk(node, 64 * MIB)
    held.close()
    open_disk(node, 64 * MIB).close()


def test_a_file_that_is_no_image_is_not_overwritten(tmp_path: Path) -> None:
    """For instance with --to thesis.odt."""
    file = tmp_path / "thesis.odt"
    file.write_text("years of work")
    with pytest.raises(UsageError, match="will not overwrite"):
        resolve_target(file)
    assert file.read_text() == "years of work"


def test_an_image_file_is_overwritten_after_a_warning(tmp_path: Path) -> None:
    """Also one that an interrupted flash left, whose table is zeros."""
    file = tmp_path / "card.img"
    assert resolve_target(file).warning == ""
    file.write_bytes(mbr([(BOOT_OFFSET, BOOT_SIZE, True)]) + bytes(512))
    assert "replaced" in resolve_target(file).warning
    file.write_bytes(bytes(1024) + b"x" * 512)
    with pytest.raises(UsageError):
        resolve_target(file)
    file.write_bytes(bytes(1 << 20) + b"x" * 512)
    assert resolve_target(file).size is None


@pytest.mark.parametrize("to", ["nowhere/card.img", "."])
def test_an_impossible_file_target_is_refused(tmp_path: Path, to: str) -> None:
    """A folder, or a file in a missing one."""
    with pytest.raises(UsageError):
        resolve_target(tmp_path / to)


def test_a_truncated_file_counts_as_blank(tmp_path: Path) -> None:
    """Zeros need not be written to it."""
    medium = open_file(tmp_path / "card.img")
    medium.write(memoryview(b"old"), 0)
    assert not medium.is_blank
    medium.set_size(1_024)
    assert medium.is_blank and medium.read(2_000, 0) == bytes(1_024)
    medium.close()
