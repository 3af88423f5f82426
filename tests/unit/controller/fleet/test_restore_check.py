"""After a restore: devices that report a newer counter than the restored database are marked."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from edgesplit.mqtt import messages
from edgesplit.release.manifest import Signed, Statement
from edgesplit_controller.fleet.restore_check import check_restored
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Device, Event


def a_device(counter: int | None) -> Device:
    statement = None
    if counter is not None:
        told = Statement(device="cam", releases=(), counter=counter, expires=0)
        statement = messages.encode(Signed(messages.encode(told), ()))
    return Device(
        name="cam", device_class="x", group="", labels={}, link="", certificate_serial="1", public_key_sha256="",
        enrolled=0.0, revoked=None, counter=counter or 0, statement=statement, last_seen=None, birth=None,
        reported=None, telemetry=None, restored=5.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "acts_upon", "restored", "counter"),
    [
        (100, (100,), False, 100),
        (100, (90,), False, 100),
        (100, (101,), True, 101),
        (100, (101, 101, 101), True, 101),
        (100, (101, 103, 102), True, 103),
        (None, (0,), False, 0),
        (None, (7, 7), True, 7),
    ],
)
def test_a_device_with_a_newer_counter_than_the_restored_row_is_marked(
    database_url: str, told: int | None, acts_upon: tuple[int, ...], restored: bool, counter: int
) -> None:
    """A counter equal to the row's or older changes nothing. A newer one, however often reported, leaves the device
    marked, and its next statement counts from there; the audit trail has one entry for each newer counter."""
    database = Database(database_url)
    with database.write() as session:
        session.add(a_device(told))
    for one in acts_upon:
        with database.write_concurrent(["cam"]) as session:
            device = session.get(Device, "cam")
            assert device is not None and device.restored is not None
            check_restored(session, device, one, 9.0)
    with database.read() as session:
        after = session.get(Device, "cam")
        said = session.scalars(select(Event.what)).all()
    assert after is not None and ((after.restored is not None), after.counter) == (restored, counter)
    ahead = {
        counter for at, counter in enumerate(acts_upon) if restored and counter > max((told or 0, *acts_upon[:at]))
    }
    assert said == ["device.ahead"] * len(ahead)
    database.close()
