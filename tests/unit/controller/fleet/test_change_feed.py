"""Changes read from the database and sent to followers: none is missed, slow followers are bounded, and scoped
operators receive only their groups."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, update

from edgesplit.errors import Busy, LinkError
from edgesplit_controller.fleet import live_events
from edgesplit_controller.fleet.change_feed import Change, ChangeFeed, kind_of
from edgesplit_controller.fleet.live_events import CHECK_S, MAX_QUEUED, FollowerQueue, LiveEventHub
from edgesplit_controller.storage.database import Database, record_event
from edgesplit_controller.storage.tables.core import Device
from support.sample_fleet import device_row

NOW = 1_800_000_000.0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Three devices of two groups."""
    opened = Database(f"sqlite:///{tmp_path / 'controller.db'}")
    with opened.write() as session:
        session.add_all([device_row("a", group="doors"), device_row("b", group="doors"), device_row("c", group="roof")])
    yield opened
    opened.close()


def test_first_poll_reports_no_existing_rows_as_changes(database: Database) -> None:
    """The first poll records the present state, however recently it was written."""
    assert ChangeFeed(database, stale_after_s=60).read() == []


def test_each_device_update_is_reported_once(database: Database) -> None:
    """By the row's change mark: a bulk update counts like an update of an object."""
    changes = ChangeFeed(database, stale_after_s=1e9)
    changes.start()
    with database.write() as session:
        session.execute(update(Device).where(Device.group == "doors").values(link="wifi"))
    assert changes.read() == [Change("device", "a", "doors"), Change("device", "b", "doors")]
    assert changes.read() == []
    with database.write() as session:
        found = session.get(Device, "c")
        assert found is not None
        found.alive = False
    assert changes.read() == [Change("device", "c", "roof")]


def test_the_removal_of_a_device_is_a_change_for_its_group(database: Database) -> None:
    """Its row is gone from the pages that showed it; followers of other groups do not learn the name."""
    changes = ChangeFeed(database, stale_after_s=1e9)
    changes.start()
    with database.write() as session:
        session.execute(delete(Device).where(Device.name == "c"))
        record_event(session, NOW, "operator", "device.removed", "c", group="roof")
    (change,) = changes.read()
    assert change == Change("device", "c", "roof")
    queue = FollowerQueue({"doors"})
    queue.put([change])
    assert queue.drain() == []
    assert changes.read() == []


def test_a_change_committed_after_a_later_poll_is_not_missed(database: Database) -> None:
    """Another process stamps the row and commits later, or its clock is behind."""
    clock = [0.0]
    changes = ChangeFeed(database, stale_after_s=1e9, now=lambda: clock[0])
    with database.write() as session:
        session.execute(update(Device).values(changed=NOW))
    clock[0] = NOW + 60
    changes.start()
    with database.write() as session:
        session.execute(update(Device).where(Device.name == "a").values(changed=clock[0] - live_events.POLL_S - 2))
    clock[0] += live_events.POLL_S
    assert changes.read() == [Change("device", "a", "doors")]


def test_a_device_becoming_stale_is_a_change(database: Database) -> None:
    """No write marks a device as stale: the poll detects it, and reports it once."""
    clock = [NOW]
    with database.write() as session:
        session.execute(update(Device).values(last_seen=NOW - 50, alive=True, changed=NOW - 50))
        session.execute(update(Device).where(Device.name == "b").values(alive=False, changed=NOW - 50))
    changes = ChangeFeed(database, stale_after_s=60, now=lambda: clock[0])
    changes.start()
    assert changes.read() == []
    clock[0] += 15
    assert changes.read() == [Change("device", "a", "doors"), Change("device", "c", "roof")]
    assert changes.read() == []


def test_events_report_changes_of_models_rollouts_and_alerts(database: Database) -> None:
    """Each is reported through its event, with the group of the device that an alert is about."""
    changes = ChangeFeed(database, stale_after_s=1e9)
    changes.start()
    with database.write() as session:
        record_event(session, NOW, "operator", "model.pushed", "digits@1")
        record_event(session, NOW, "operator", "rollout.paused", "7")
        record_event(session, NOW, "c", "device.flooding", "c")
        record_event(session, NOW, "operator", "keys.changed", "root")
    told = [Change("model", "digits@1"), Change("rollout", "7"), Change("alert", "c", "roof")]
    assert changes.read() == told
    assert changes.read() == []


@pytest.mark.parametrize(
    ("what", "kind"),
    [("device.born", "device"), ("device.copied", "alert"), ("release.made", "model"), ("keys.changed", None)],
)
def test_event_kind_is_the_prefix_of_its_name(what: str, kind: str | None) -> None:
    """The prefix of the event's name decides."""
    assert kind_of(what) == kind


def test_a_mailbox_coalesces_subjects_and_is_bounded() -> None:
    """A slow reader receives one request to reload everything, then the changes after it."""
    mailbox = FollowerQueue(None)
    for _ in range(3):
        mailbox.put([Change("device", "a", "doors")])
    assert mailbox.drain() == [b'event: device\ndata: {"subject":"a"}\n\n']
    mailbox.put([Change("device", str(number), "doors") for number in range(MAX_QUEUED + 1)])
    mailbox.put([Change("device", "a", "doors")])
    assert mailbox.drain() == [b"event: everything\ndata: {}\n\n"]
    assert mailbox.drain() == []
    mailbox.put([Change("device", "a", "doors")])
    assert len(mailbox.drain()) == 1


def test_scoped_operators_receive_no_changes_of_other_groups() -> None:
    """They do not even learn that something changed."""
    mailbox = FollowerQueue({"doors"})
    mailbox.put([Change("device", "c", "roof")])
    assert mailbox.drain() == [] and not mailbox.has_events.is_set()
    mailbox.put([Change("device", "a", "doors"), Change("rollout", "7")])
    assert b"".join(mailbox.drain()).count(b"event: ") == 2


def test_line_breaks_in_a_name_stay_inside_the_event_json() -> None:
    """A subject with line breaks cannot forge a second server-sent event."""
    raw = live_events.encode_event("device", {"subject": "a\n\nevent: everything\ndata: {}"})
    assert raw.count(b"\n") == 3
    assert json.loads(raw.split(b"data: ", 1)[1])["subject"].startswith("a\n")


class ChangeFeedHarness:
    """Changes that tests hand to a hub."""

    def __init__(self, **more: Any) -> None:
        self.waiting: list[Change] = []
        self.readings = 0
        self.failing = False
        self.clock = [0.0]
        options = {"heartbeat_s": 60.0, "clock": lambda: self.clock[0], **more}
        self.hub = LiveEventHub(lambda: None, self.read, poll_s=0.001, **options)

    def read(self) -> Sequence[Change]:
        """Once each."""
        self.readings += 1
        if self.failing:
            self.failing = False
            raise OSError("the database is away")
        found, self.waiting = self.waiting, []
        return found


async def next_kind(stream: AsyncIterator[bytes]) -> str:
    """The next event's kind."""
    raw = await asyncio.wait_for(anext(stream), 60)
    return raw.split(b"\n")[0].removeprefix(b"event: ").decode()


def run(story: Callable[[ChangeFeedHarness], Coroutine[Any, Any, None]], **more: Any) -> None:
    """Tell a story on an event loop of its own."""

    async def whole() -> None:
        await story(ChangeFeedHarness(**more))

    asyncio.run(whole())


def test_one_poll_serves_every_follower() -> None:
    """Two followers receive the same change; after both have left, polling stops."""

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow()) as one, aclosing(world.hub.follow()) as other:
            assert [await next_kind(one), await next_kind(other)] == ["hello", "hello"]
            world.waiting = [Change("device", "a")]
            assert [await next_kind(one), await next_kind(other)] == ["device", "device"]
        polls = asyncio.all_tasks() - {asyncio.current_task()}
        assert len(polls) == 1
        await asyncio.wait_for(asyncio.gather(*polls), 60)

    run(story)


def test_streams_survive_an_unavailable_database() -> None:
    """A poll that fails ends no stream."""

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow()) as stream:
            assert await next_kind(stream) == "hello"
            world.failing, world.waiting = True, [Change("device", "a")]
            assert await next_kind(stream) == "device"

    run(story)


def test_a_stream_ends_when_the_operator_is_revoked() -> None:
    """While nothing changes there are heartbeats, and each checks whether the operator may still read."""
    allowed = [True, True, False]

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow("vic", None, lambda: allowed.pop(0))) as stream:
            kinds = [raw.split(b"\n")[0].removeprefix(b"event: ").decode() async for raw in stream]
            assert kinds == ["hello", "heartbeat", "heartbeat"]

    run(story, heartbeat_s=0.001, check_s=0.001, clock=time.monotonic)


def test_a_stream_ends_after_logout_however_much_happens() -> None:
    """Access is checked by the clock: a fleet in which something changes all the time does not keep the stream open."""
    allowed = [True]

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow("vic", None, lambda: allowed[0])) as stream:
            assert await next_kind(stream) == "hello"
            for number in range(50):
                world.waiting = [Change("device", str(number))]
                assert await next_kind(stream) == "device"
            allowed[0] = False
            world.clock[0] = CHECK_S
            world.waiting = [Change("device", "secret")]
            with pytest.raises(StopAsyncIteration):
                await next_kind(stream)

    run(story)
    assert CHECK_S + live_events.POLL_S <= 2.0


def test_a_stream_ends_at_once_when_its_operator_changes_here() -> None:
    """The hub is told by whatever ended the session in this process, on any thread; other operators' streams stay."""
    allowed = {"vic": True}

    async def story(world: ChangeFeedHarness) -> None:
        follow = world.hub.follow
        async with aclosing(follow("vic", None, lambda: allowed["vic"])) as vic, aclosing(follow("ada")) as ada:
            assert [await next_kind(vic), await next_kind(ada)] == ["hello", "hello"]
            allowed["vic"] = False
            await asyncio.to_thread(world.hub.check_access, "vic")
            with pytest.raises(StopAsyncIteration):
                await next_kind(vic)
            world.waiting = [Change("device", "a")]
            assert await next_kind(ada) == "device"

    run(story)


@pytest.mark.parametrize("error", [LinkError("away"), Busy("away")])
def test_no_change_is_told_while_access_cannot_be_checked(error: Exception) -> None:
    """A database that is away ends no stream, and nothing but heartbeats is sent until it says that the reader may
    read; what happened meanwhile follows then."""
    errors = [error]

    def allowed() -> bool:
        if errors:
            raise errors.pop()
        return True

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow("vic", None, allowed)) as stream:
            assert await next_kind(stream) == "hello"
            world.hub.check_access("vic")
            world.waiting = [Change("device", "a")]
            world.clock[0] = 61.0
            assert await next_kind(stream) == "heartbeat"
            world.hub.check_access("vic")
            assert await next_kind(stream) == "device"

    run(story)


def test_one_operator_cannot_take_every_stream() -> None:
    """Each has a limit of its own below that of the process."""

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow("vic")) as one, aclosing(world.hub.follow("vic")) as two:
            assert [await next_kind(one), await next_kind(two)] == ["hello", "hello"]
            with pytest.raises(Busy, match="vic has 2 pages"):
                world.hub.follow("vic")
            async with aclosing(world.hub.follow("ada")) as three:
                assert await next_kind(three) == "hello"
        async with aclosing(world.hub.follow("vic")) as again:
            assert await next_kind(again) == "hello"

    run(story, max_of_one=2)
    assert live_events.MAX_FOLLOWERS_OF_ONE < live_events.MAX_FOLLOWERS


def test_streams_that_begin_together_stay_within_the_limit() -> None:
    """Of several that were admitted before any had begun, those beyond the limit end at once."""

    async def story(world: ChangeFeedHarness) -> None:
        streams = [world.hub.follow("vic") for _ in range(3)]
        assert await next_kind(streams[0]) == "hello"
        for late in streams[1:]:
            with pytest.raises(StopAsyncIteration):
                await next_kind(late)
        async with aclosing(streams[0]):
            pass

    run(story, max_of_one=1)


def test_shutdown_ends_all_streams() -> None:
    """Shutdown comes from another thread, as in `edgectl up`."""

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow()) as stream:
            assert await next_kind(stream) == "hello"
            await asyncio.to_thread(world.hub.request_stop)
            with pytest.raises(StopAsyncIteration):
                await next_kind(stream)

    run(story)


def test_number_of_followers_is_bounded() -> None:
    """A follower beyond the limit is refused with a retry hint."""

    async def story(world: ChangeFeedHarness) -> None:
        async with aclosing(world.hub.follow()) as stream:
            assert await next_kind(stream) == "hello"
            with pytest.raises(Busy):
                world.hub.follow()

    run(story, max_followers=1)


def test_a_deleted_device_does_not_break_the_feed(database: Database) -> None:
    """A row that was deleted between poll and read is skipped."""
    changes = ChangeFeed(database, stale_after_s=60)
    changes.start()
    with database.write() as session:
        session.execute(delete(Device).where(Device.name == "a"))
    assert changes.read() == []
