"""Whether a start with other settings would strand enrolled devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from edgesplit.errors import UsageError
from edgesplit_controller.app import given_addresses
from edgesplit_controller.app.given_addresses import addresses_of, check_reachable, find_stranded, lost_addresses
from edgesplit_controller.settings import Settings

HUB = Settings(data=Path("/nowhere"), hosts=("hub.local",))
GIVEN = addresses_of(HUB, 100.0)


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        (HUB, ()),
        (replace(HUB, hosts=("new.local", "hub.local")), ()),
        (replace(HUB, bind="::"), ()),
        (replace(HUB, hosts=()), ("the controller https://hub.local:8443 would be https://127.0.0.1:8443",)),
        (replace(HUB, api_port=9443), ("the controller https://hub.local:8443 would be https://hub.local:9443",)),
        (replace(HUB, mqtt_port=9883), ("the broker mqtts://hub.local:8883 would be mqtts://hub.local:9883",)),
        (replace(HUB, offload_port=9500), ("the offload server https://hub.local:8500",)),
        (replace(HUB, broker="mqtts://other:8883"), ("the broker mqtts://hub.local:8883 would be mqtts://other:8883",)),
        (replace(HUB, broker="mqtts://other:8883", advertised_broker="hub.local:8883"), ()),
        (replace(HUB, api_url="https://balancer"), ()),
        (replace(HUB, bind="127.0.0.1"), ("it would listen on 127.0.0.1 only, where it listened on 0.0.0.0",)),
    ],
)
def test_a_start_with_other_addresses_loses_what_devices_hold(settings: Settings, lost: tuple[str, ...]) -> None:
    """What still answers under its old name, by the certificate and on the same port, is not lost."""
    found = lost_addresses(GIVEN, settings)
    assert len(found) >= len(lost) and bool(found) == bool(lost)
    assert all(any(line.startswith(part) for line in found) for part in lost)


def test_devices_are_asked_by_the_addresses_of_their_enrolment() -> None:
    """One enrolled under the old name, one under the new one: each start strands the other."""
    moved = replace(HUB, hosts=("new.local",))
    history = [GIVEN, addresses_of(moved, 200.0)]
    enrolled = {"before": 50.0, "old": 150.0, "new": 250.0}
    assert [group.devices for group in find_stranded(history, enrolled, moved)] == [("before", "old")]
    assert [group.devices for group in find_stranded(history, enrolled, HUB)] == [("new",)]
    assert not find_stranded([], enrolled, moved) and not find_stranded(history, {}, moved)


def test_a_start_that_strands_devices_is_refused_unless_forced() -> None:
    """The message names the devices, what they would miss, and the options that they need."""
    moved = replace(HUB, hosts=(), mqtt_port=9883)
    enrolled = {f"cam-{number:02d}": 150.0 for number in range(12)}
    with pytest.raises(UsageError) as refused:
        check_reachable([GIVEN], enrolled, moved)
    text = str(refused.value)
    assert "cam-00, cam-01" in text and "cam-09 and 2 more" in text and "cam-10" not in text
    assert "edgectl up --host hub.local --api-port 8443 --mqtt-port 8883 --offload-port 8500" in text
    assert "--force" in text and "edgectl device claim" in text
    check_reachable([GIVEN], enrolled, replace(moved, force=True))


def test_addresses_are_remembered_once_and_a_damaged_file_is_said(tmp_path: Path) -> None:
    """A start with the same addresses adds nothing, whatever the time is."""
    given_addresses.remember(tmp_path, [], GIVEN)
    history = given_addresses.read_history(tmp_path)
    assert history == [GIVEN]
    given_addresses.remember(tmp_path, history, msgspec.structs.replace(GIVEN, since=300.0))
    assert given_addresses.read_history(tmp_path) == [GIVEN]
    (tmp_path / given_addresses.FILE).write_text("[")
    with pytest.raises(UsageError, match="damaged"):
        given_addresses.read_history(tmp_path)
