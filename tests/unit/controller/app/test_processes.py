"""Additional processes of one controller: their numbers, names and settings."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from edgesplit.errors import UsageError
from edgesplit.identifiers import device_name
from edgesplit_controller.app import main
from edgesplit_controller.app.assembly import retention_rules
from edgesplit_controller.app.processes import acquire_slot, decode_settings, encode_settings
from edgesplit_controller.messaging.broker import CONTROLLERS
from edgesplit_controller.settings import MAX_PROCESSES, RETENTION_FIELDS, Settings
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


def test_a_process_that_joins_has_the_retention_rules_of_the_first_one(tmp_path: Path) -> None:
    """Garbage collection through it would otherwise delete what the first one is told to keep."""
    url = "postgresql://localhost/shared"
    first = Settings(data=tmp_path, database=url, keep_releases=9, keep_history_s=5.0)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ca.pem").touch()
    (tmp_path / "controller.json").write_text(json.dumps(main._addresses(first)))
    joined = main._settings_of_joining(Settings(data=tmp_path, database=url, join=True, api_port=0))
    assert retention_rules(joined) == retention_rules(first) != retention_rules(Settings(data=tmp_path))


@pytest.mark.parametrize("name", RETENTION_FIELDS)
def test_a_negative_retention_rule_is_refused(tmp_path: Path, name: str) -> None:
    """It would keep less than nothing."""
    with pytest.raises(UsageError, match="not negative"):
        replace(Settings(data=tmp_path), **{name: -1})
