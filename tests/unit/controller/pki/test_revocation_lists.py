"""Revocation lists live a month and are renewed at a third of it; one that has expired stops nobody and is reported."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from time import time

import pytest

from edgesplit.trust.revocation import RevocationList, authority_key, parse_revocation_list
from edgesplit_controller.pki.authority import BROKER_LIST_LIFE, LEAF_LIFE, LIST_LIFE, Authority
from edgesplit_controller.pki.revocation import Revocations
from edgesplit_offload.revocation import RevokedSerials

DAY_S = 86_400.0


class ListReader:
    """Counts how often it was told of a new list."""

    told = 0

    def reload(self) -> None:
        self.told += 1


class Bench:
    """The lists of one installation, and a clock that is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "keys")
        self.later_s = 0.0
        self.broker, self.offload = folder / "broker.pem", folder / "offload.pem"
        self.lists = Revocations(
            self.authority, lambda: [7], {self.broker: BROKER_LIST_LIFE, self.offload: LIST_LIFE}, ("127.0.0.1", 1),
            now=self.now,
        )  # fmt: skip
        self.reader = ListReader()
        self.lists.add_reader(self.reader)
        self.lists.publish()

    def now(self) -> float:
        return time() + self.later_s

    def published(self, file: Path) -> RevocationList:
        return parse_revocation_list(file.read_bytes(), authority_key(self.authority.certificate_file))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_list_lived_ten_years_so_that_a_withheld_one_was_never_noticed(bench: Bench) -> None:
    """Offload servers' lists live thirty days. A broker's lives as long as the broker's certificate: mosquitto refuses
    everybody by a list that has expired."""
    assert bench.published(bench.offload).expires - time() == pytest.approx(LIST_LIFE.total_seconds(), abs=600)
    assert timedelta(days=30) <= LIST_LIFE < BROKER_LIST_LIFE == LEAF_LIFE
    assert bench.published(bench.broker).expires - time() == pytest.approx(LEAF_LIFE.total_seconds(), abs=600)


def test_lists_are_renewed_at_a_third_of_their_validity(bench: Bench) -> None:
    """All of them, whether anything was revoked or not, and whoever delivers them is told: also a broker elsewhere."""
    before = bench.offload.read_bytes(), bench.broker.read_bytes()
    bench.later_s = 8 * DAY_S
    bench.lists.publish_if_due()
    assert bench.reader.told == 1 and (bench.offload.read_bytes(), bench.broker.read_bytes()) == before
    bench.later_s = 10 * DAY_S
    bench.lists.publish_if_due()
    assert bench.reader.told == 2
    assert bench.offload.read_bytes() != before[0] and bench.broker.read_bytes() != before[1]
    assert bench.published(bench.offload).serials == {7}


@pytest.mark.parametrize("damage", [b"", b"no list"])
def test_a_list_that_was_lost_or_damaged_is_published_again(bench: Bench, damage: bytes) -> None:
    """At the next look."""
    bench.offload.write_bytes(damage) if damage else bench.offload.unlink()
    bench.lists.publish_if_due()
    assert bench.published(bench.offload).serials == {7}


def test_an_expired_list_stays_in_force_and_stops_no_device(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """What it revokes stays revoked, every other certificate is served, and the log says it once an hour."""
    bench.later_s = 31 * DAY_S
    revoked = RevokedSerials(bench.offload, bench.authority.certificate_file, look_every_s=0.0, now=bench.now)
    with caplog.at_level(logging.ERROR):
        assert all(7 in revoked and 8 not in revoked for _ in range(5))
    assert revoked.expires < bench.now()
    assert [record.message for record in caplog.records if "has expired" in record.message].__len__() == 1
    bench.lists.publish()
    bench.later_s = 0.0
    assert 7 in revoked and revoked.expires > bench.now()
