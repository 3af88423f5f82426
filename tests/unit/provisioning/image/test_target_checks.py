"""Which disks are written to: not the system's, nothing in use, no partition, no file that is something else."""

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


def test_a_card_is_shown_with_size_model_and_serial(machine: Machine) -> None:
    """So that its owner knows it before it is overwritten."""
    found = resolve_target(Path("/dev/sdb"), root=machine.root)

    assert found.description == "/dev/sdb: Card, 64.0 MiB, serial S-sdb"
    assert found.size == 64 * MIB and found.is_disk and "will be lost" in found.warning


def test_the_systems_disk_is_refused_through_partitions_and_encryption(machine: Machine) -> None:
    """What / is mounted from lies on it, two layers down."""
    assert read_disk("sda", machine.root).used_for == ("/", "/boot")
    with pytest.raises(UsageError, match="holds the system"):
        resolve_target(Path("/dev/sda"), root=machine.root, fixed_disk=True)


@pytest.mark.parametrize(("source", "place"), [("/dev/sdb1", "/media/me/bootfs"), ("/dev/sdb1", "/mnt/a b")])
def test_a_disk_of_which_anything_is_mounted_is_refused(machine: Machine, source: str, place: str) -> None:
    """With the place, so that it can be unmounted."""
    machine.mount(source, place.replace(" ", "\\040"))
    with pytest.raises(UsageError, match=f"in use at {place}"):
        resolve_target(Path("/dev/sdb"), root=machine.root)


def test_a_disk_that_is_mounted_under_a_name_of_its_own_is_known_by_its_number(machine: Machine) -> None:
    """/dev/root is no node; the kernel's number is the same."""
    machine.mount("/dev/root", "/data", "8:17")
    with pytest.raises(UsageError, match="in use at /data"):
        resolve_target(Path("/dev/sdb"), root=machine.root)


def test_a_disk_that_is_swapped_to_is_the_systems(machine: Machine) -> None:
    """Writing to it takes the machine down."""
    machine.swap("/dev/sdb1")
    with pytest.raises(UsageError, match="holds the system"):
        resolve_target(Path("/dev/sdb"), root=machine.root)


def test_a_partition_is_refused_with_the_name_of_its_disk(machine: Machine) -> None:
    """An image is a whole disk."""
    with pytest.raises(UsageError, match="whole disk, /dev/sdb"):
        resolve_target(Path("/dev/sdb1"), root=machine.root)


def test_what_is_no_disk_here_is_refused(machine: Machine) -> None:
    """A name that was mistyped makes no file in /dev."""
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


def test_a_built_in_disk_is_written_to_where_that_is_said(machine: Machine) -> None:
    """An NVMe drive in a dock, say."""
    machine.disk("nvme0n1", 64 * MIB, removable=False)
    assert resolve_target(Path("/dev/nvme0n1"), root=machine.root, fixed_disk=True).size == 64 * MIB


def test_a_card_in_a_slot_that_is_built_in_is_a_card(machine: Machine) -> None:
    """A laptop's reader says that it is not removable; the card says that it is one. Soldered flash is none."""
    for name, kind in (("mmcblk0", "MMC"), ("mmcblk1", "SD")):
        machine.disk(name, 64 * MIB, removable=False)
        (machine.root / f"sys/block/{name}/device/type").write_text(f"{kind}\n")

    assert resolve_target(Path("/dev/mmcblk1"), root=machine.root).is_disk
    with pytest.raises(UsageError, match="--fixed-disk"):
        resolve_target(Path("/dev/mmcblk0"), root=machine.root)


def test_a_link_by_serial_number_is_the_disk_that_it_leads_to(machine: Machine) -> None:
    """/dev/disk/by-id is the name that does not change."""
    (machine.root / "dev/disk").mkdir()
    (machine.root / "dev/disk/card").symlink_to(machine.root / "dev/sdb")
    assert resolve_target(Path("/dev/disk/card"), root=machine.root).size == 64 * MIB


def test_the_list_says_of_every_disk_whether_it_would_be_written(machine: Machine) -> None:
    """Loop devices and optical drives are no cards and are not listed."""
    for name in ("loop0", "zram0", "sr0", "dm-1"):
        (machine.root / "sys/block" / name).mkdir()

    found = {one.name: why for one, why in candidates(machine.root)}

    assert set(found) == {"sda", "sdb"} == {one.name for one in list_disks(machine.root)}
    assert "system" in found["sda"] and found["sdb"] == ""


def test_a_disk_is_held_by_one_writer_at_a_time(machine: Machine) -> None:
    """Two flashes of one card cannot run."""
    node = machine.root / "dev/sdb"
    held = open_disk(node, 64 * MIB)
    with pytest.raises(UsageError, match="another program"):
        open_disk(node, 64 * MIB)
    held.close()
    open_disk(node, 64 * MIB).close()


def test_a_file_that_is_no_image_is_not_overwritten(tmp_path: Path) -> None:
    """--to thesis.odt is a slip of the hand."""
    file = tmp_path / "thesis.odt"
    file.write_text("years of work")
    with pytest.raises(UsageError, match="will not overwrite"):
        resolve_target(file)
    assert file.read_text() == "years of work"


def test_a_file_that_is_an_image_is_overwritten_after_a_warning(tmp_path: Path) -> None:
    """And one that a flash which was cut off left: its table is zeros."""
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
def test_a_place_where_no_file_can_be_is_refused(tmp_path: Path, to: str) -> None:
    """A folder, or a file in none."""
    with pytest.raises(UsageError):
        resolve_target(tmp_path / to)


def test_a_file_is_blank_after_it_was_given_its_size(tmp_path: Path) -> None:
    """Zeros need not be written to it."""
    medium = open_file(tmp_path / "card.img")
    medium.write(memoryview(b"old"), 0)
    assert not medium.is_blank
    medium.set_size(1_024)
    assert medium.is_blank and medium.read(2_000, 0) == bytes(1_024)
    medium.close()
