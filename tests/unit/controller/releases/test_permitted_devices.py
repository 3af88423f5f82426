"""Who was given content keys of a release stands in the list that the offload server reads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from edgesplit.crypto.key_file import write_keys
from edgesplit.crypto.permitted_devices import PERMITTED_FILE, read_permitted
from edgesplit.mqtt import messages
from edgesplit.release.manifest import DesiredRelease, Signed, Statement
from edgesplit_controller.releases.permitted_devices import PermittedDevices
from edgesplit_controller.storage.tables.core import Desired, GatewayRow
from support.device_fleet import OTHER, RELEASE, FleetHarness


@pytest.fixture
def world(database_url: str) -> FleetHarness:
    return FleetHarness(database_url)


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    write_keys(_made(tmp_path / RELEASE), {})
    _made(tmp_path / OTHER)  # not encrypted
    return tmp_path


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_device_is_listed_before_it_has_its_keys(world: FleetHarness, releases: Path) -> None:
    """Once, by whichever process: two that list many at once lose none and write none twice."""
    processes = [PermittedDevices(world.database, releases) for _ in range(2)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: processes[number % 2].add(RELEASE, f"cam-{number // 2}"), range(100)))
    assert read_permitted(releases / RELEASE) == {f"cam-{number}" for number in range(50)}
    assert (releases / RELEASE / PERMITTED_FILE).read_bytes().count(b"\n") == 50
    processes[0].add("d" * 64, "cam-1")  # not exported yet


def test_lists_are_completed_at_the_start_of_an_installation_that_had_none(world: FleetHarness, releases: Path) -> None:
    """With the devices that run the release, and the gateway that asks the cloud for its devices; releases in clear
    get none."""
    world.add("cam-1", "cam-2")
    world.want("cam-1")
    stored = Statement(
        device="gw", releases=(), counter=1, expires=1, gateway_releases=(DesiredRelease("m", RELEASE, keys=b"k"),)
    )
    world.add("gw", statement=messages.encode(Signed(msgspec.msgpack.encode(stored), ())))
    world.put(GatewayRow(device="gw", address="gw:8500"))
    lists = PermittedDevices(world.database, releases)
    lists.add(RELEASE, "cam-9")
    lists.complete()
    assert read_permitted(releases / RELEASE) == {"cam-1", "cam-9", "gw"}
    assert not (releases / OTHER / PERMITTED_FILE).exists()


def test_a_removed_devices_name_brings_its_next_owner_nothing(world: FleetHarness, releases: Path) -> None:
    """It is taken out of every list, and listed again when it is given keys anew, by any process."""
    first, second = (PermittedDevices(world.database, releases) for _ in range(2))
    for lists in (first, second):
        lists.add(RELEASE, "cam-1")
        lists.add(RELEASE, "cam-2")
    first.forget("cam-1")
    assert read_permitted(releases / RELEASE) == {"cam-2"}
    second.add(RELEASE, "cam-1")
    assert read_permitted(releases / RELEASE) == {"cam-1", "cam-2"}


def test_rows_of_desired_releases_decide(world: FleetHarness, releases: Path) -> None:
    """An encrypted release that no device runs has an empty list, by which no device may use it."""
    world.add("cam-1")
    PermittedDevices(world.database, releases).complete()
    assert read_permitted(releases / RELEASE) == frozenset()
    with world.database.read() as session:
        assert not session.query(Desired).count()
