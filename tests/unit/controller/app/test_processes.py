"""Additional processes of one controller: their numbers, names and settings."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from edgesplit.errors import UsageError
from edgesplit.identifiers import device_name
from edgesplit_controller.app.processes import acquire_slot, decode_settings, encode_settings
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.settings import MAX_PROCESSES, Settings
from edgesplit_controller.storage.database import Database


def test_each_process_takes_the_lowest_free_number(database_url: str) -> None:
    """At most sixteen; a process that ends frees its number. No device name can equal a process name."""
    database = Database(database_url)
    places = [acquire_slot(database) for _ in range(MAX_PROCESSES)]
    assert [place.number for place in places] == list(range(1, MAX_PROCESSES + 1))
    assert [place.broker_name for place in places] == list(CONTROLLERS)
    assert places[0].file_name("api") == "api" and places[4].file_name("api") == "api.5"
    for place in places:
        with pytest.raises(UsageError):
            device_name(place.broker_name)
    with pytest.raises(UsageError, match="16 processes of this controller run already"):
        acquire_slot(database)
    places[3].lease.release()
    again = acquire_slot(database)
    assert again.number == 4
    for place in (*places, again):
        place.lease.release()
    database.close()


def test_an_additional_process_inherits_every_setting(tmp_path: Path) -> None:
    """Each option of the first process is passed on unchanged."""
    given = Settings(
        data=tmp_path, hosts=("hub.local", "10.0.0.2"), bind="::1", metrics=("127.0.0.1", 9100), broker="mqtts://mq:1",
        database="postgresql://me:s3cret@db/x", on_revocation='cp "$EDGESPLIT_CRL" x', join=True, model_bytes=5,
    )  # fmt: skip
    assert decode_settings(encode_settings(given)) == given
    plain = Settings(data=tmp_path)
    assert decode_settings(encode_settings(plain)) == plain
    assert {field.name for field in fields(Settings)} >= {"database", "broker", "processes"}
