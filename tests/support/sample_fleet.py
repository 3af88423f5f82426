"""A fleet that exists on paper only: devices as a controller's database would hold them, all made up from a seed and
marked as simulated. For pages that show fleets, and pictures of them; nothing here ran anywhere."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from edgesplit.mqtt.messages import CascadeCounts, StillCounts
from edgesplit_controller.fleet.audits import AnswerAudits
from edgesplit_controller.history.buckets import (
    SPANS,
    Span,
    bucket_start,
    content_of_message,
    content_of_window,
    merged,
)
from edgesplit_controller.rollout.terms import Portion, Rate, RateState, Terms
from edgesplit_controller.storage.database import Database
from edgesplit_controller.storage.tables.core import Deployment, Desired, Device, TelemetryRow
from edgesplit_controller.storage.tables.device_state import (
    DeviceBucketRow,
    DeviceSessionRow,
    ModelBucketRow,
    RunningRow,
)
from edgesplit_controller.storage.tables.replan import ProposalRow
from edgesplit_controller.storage.tables.rollout import RolloutDeviceRow, RolloutRow, RolloutStageRow

SESSION = 3
RTT_S = 0.06
CLASSES = ("raspberrypi4", "raspberrypi5", "jetson-nano", "coral")
GROUPS = ("doors", "dock", "kiosks", "lab", "roof")
SITES = ("oslo", "bergen", "turku", "gdansk")
TROUBLES = (
    ("failed", "chunk 3f9c0d1e2b4a59687 did not match its digest after 5 tries"),
    ("rolled back", "golden input 2 differs by 0.031, at most 0.01"),
    ("failed", "golden input 1 failed: not enough memory for 187 MB"),
)


class Cut(NamedTuple):
    """A row of a plan, as far as a report shows it."""

    name: str
    device_s: float
    remote_s: float
    up_bytes: int

    def seconds(self, mbit: float) -> float:
        """Of an answer, over an uplink of so many Mbit/s."""
        return self.device_s + self.remote_s + (RTT_S + self.up_bytes / (mbit * 125_000) if self.up_bytes else 0.0)


CUTS = (Cut("local", 0.115, 0.0, 0), Cut("remote", 0.031, 0.009, 22_500))


def device_row(
    name: str,
    *,
    model: str = "",
    release: str = "",
    cuts: Sequence[Cut] = CUTS,
    rng: random.Random | None = None,
    now: float | None = None,
    state: str = "online",
    trouble: tuple[str, str] | None = None,
    group: str = "doors",
    device_class: str = "raspberrypi4",
) -> Device:
    """One device with its newest report."""
    rng, now = rng or random.Random(name), now or time.time()
    silent = {"online": rng.uniform(0, 9), "stale": rng.uniform(400, 4_000), "offline": rng.uniform(4_000, 90_000)}
    session = SESSION
    models = []
    if model:
        word, detail = trouble or ("running", "")
        models = [
            {
                "model": model.partition("@")[0],
                "release": release,
                "desired_release": release,
                "state": word,
                "detail": detail,
            }
        ]
    told = telemetry(rng, model, release, cuts) if model else None
    return Device(
        name=name, device_class=device_class, group=group,
        labels={"site": rng.choice(SITES), "floor": str(rng.randrange(1, 5))}, link="lte",
        certificate_serial=str(rng.getrandbits(60)), public_key_sha256="0" * 64, enrolled=now - 86_400 * 30,
        revoked=None, counter=int(now) - 5_000, statement=None, session=session, alive=state != "offline",
        last_seen=now - silent[state],
        birth={
            "session": session, "agent_uptime_s": 9.0, "version": "0.1.0", "device_class": device_class,
            "emulated": True,
            "simulated": True, "local_url": "http://127.0.0.1:1",
        },
        reported={"session": session, "statement_counter": int(now) - 5_000, "models": models, "safe_mode": "",
        "statement_problem": ""},
        telemetry={"at": now - silent[state], **told} if told else None,
    )  # fmt: skip


def telemetry(
    rng: random.Random, model: str, release: str, cuts: Sequence[Cut] = CUTS, mbit: float | None = None
) -> dict[str, Any]:
    """One report, with figures that hang together: the best cut at this bandwidth, and what it takes."""
    mbit = mbit if mbit is not None else max(0.3, rng.lognormvariate(2.0, 0.6))
    cut = min(cuts, key=lambda one: one.seconds(mbit))
    requests, late = rng.randrange(20, 60), rng.random() < 0.15
    device_s, remote_s = cut.device_s * rng.uniform(0.97, 1.1), cut.remote_s * rng.uniform(0.95, 1.3)
    link_s = (cut.seconds(mbit) - cut.device_s - cut.remote_s) * rng.uniform(0.95, 1.15)
    total_s = device_s + link_s + remote_s
    return {
        "session": SESSION, "sequence": 0, "emulated": True, "remote_usable": True, "up_bytes_per_s": mbit * 125_000,
        "rtt_s": RTT_S * rng.uniform(0.9, 1.15),
        "models": [{
            "model": model.partition("@")[0], "release": release, "row": cut.name, "requests": requests, "failed": 0,
            "fallbacks": rng.randrange(1, 6) if late else 0, "switches": 0, "emulation_overruns": 0,
            "up_bytes": cut.up_bytes * requests,
            "latency_p50_s": total_s, "latency_p95_s": total_s * rng.uniform(1.1, 1.5), "predicted_s": total_s,
            "device_s": device_s, "link_s": link_s, "remote_s": remote_s, "problem": "",
        }],
        "power": {
            "mode": "performance", "watts": 2.9 + rng.uniform(0, 1.4), "watts_source": "rails",
            "celsius": 51 + rng.uniform(0, 9), "under_voltage": False,
        },
    }  # fmt: skip


def make_fleet(
    database: Database,
    count: int,
    *,
    model: str = "",
    release: str = "",
    cuts: Sequence[Cut] = CUTS,
    classes: Sequence[str] = CLASSES,
    seed: int = 7,
) -> list[str]:
    """Devices of every kind and state; their names."""
    rng = random.Random(seed)
    names = []
    with database.write() as session:
        for number in range(count):
            drawn = rng.random()
            state = "offline" if drawn > 0.985 else "stale" if drawn > 0.965 else "online"
            trouble = TROUBLES[number % len(TROUBLES)] if rng.random() < 0.02 else None
            device_class, group = rng.choice(list(classes)), rng.choice(GROUPS)
            name = f"{group}-{rng.choice(SITES)}-{number:04}"
            names.append(name)
            session.add(
                device_row(
                    name, model=model, release=release, cuts=cuts, rng=rng, state=state, trouble=trouble, group=group,
                    device_class=device_class,
                )
            )  # fmt: skip
        session.flush()
        session.add_all(DeviceSessionRow(device=name, session=SESSION, emulated=True, simulated=True) for name in names)
    return names


def want(database: Database, names: Sequence[str], model: str, release: str, deployment: int) -> None:
    """What these devices shall run."""
    with database.write() as session:
        session.add_all(Desired(device=name, model=model, release=release, deployment=deployment) for name in names)


def make_history(
    database: Database, name: str, model: str, release: str, cuts: Sequence[Cut] = CUTS, *, reports: int = 240
) -> None:
    """Reports over the last hour on a link that comes and goes."""
    rng, now = random.Random(name), time.time()
    mbit = 9.0
    with database.write() as session:
        for number in range(reports):
            mbit = min(25.0, max(0.5, mbit * rng.lognormvariate(-0.01, 0.16)))
            told = telemetry(rng, model, release, cuts, mbit)
            at = now - 15.0 * (reports - number)
            session.add(
                TelemetryRow(
                    device=name, at=at, stored=at, session=SESSION, sequence=number, from_backlog=False, content=told
                )
            )
        device = session.get(Device, name)
        assert device is not None
        device.telemetry, device.last_seen, device.alive = {"at": now, **told}, now, True


def make_past(database: Database, name: str, model: str, *, group: str = "doors") -> None:
    """A year of one device and of its model in the fleet, as hours, days and months add up."""
    rng, now = random.Random(name), time.time()
    spans: tuple[tuple[Span, int], ...] = (("hour", 48), ("day", 60), ("month", 12))
    with database.write() as session:
        for span, count in spans:
            begins = {bucket_start(span, now - number * SPANS[span].bucket_s) for number in range(1, count + 1)}
            for at in sorted(begins):
                told = telemetry(rng, model, "")
                window = {**told["models"][0], "joules": rng.uniform(0.3, 0.6), "joules_basis": "measured"}
                content = merged(content_of_window(window), content_of_window(window))
                place = {"span_s": SPANS[span].bucket_s, "begins": at}
                bare = model.partition("@")[0]
                own = content_of_message(told, from_backlog=False)
                session.add(DeviceBucketRow(device=name, model="", content=own, **place))
                session.add(DeviceBucketRow(device=name, model=bare, content=content, **place))
                many = {**content, "origins": {"simulated": content["requests"]}}
                session.add(ModelBucketRow(model=bare, group=group, content=many, **place))


def make_audits(database: Database, names: Sequence[str], model: str, release: str) -> None:
    """What these devices counted of a cascade and of still frames: the first one has broken its promise."""
    with database.write() as session:
        for number, name in enumerate(names):
            changed = 4 if number else 31
            cascade = CascadeCounts(
                sure=21_400, escalated=8_300, unsure=310, audited=412, changed=changed, unaudited=12,
                alarms=0 if number else 1, threshold=0.8125, allowed=0.02, answered={"small": 21_710, "large": 8_300},
            )  # fmt: skip
            still = StillCounts(repeated=12_900, audited_same=640, changed=3, unaudited=5, allowed=0.01)
            sums = msgspec.to_builtins(AnswerAudits(cascade=cascade, still=still))
            session.merge(RunningRow(
                device=name, model=model.partition("@")[0], release=release, desired_release=release, state="running",
                cause="", detail="", cut="", audits={release: sums},
            ))  # fmt: skip


def make_cascade_past(database: Database, model: str) -> None:
    """An hour of a cascade and of still frames in the fleet, minute by minute: who answered, and ever more audits."""
    rng, now = random.Random(model), time.time()
    with database.write() as session:
        for number in range(1, 60):
            escalated = rng.randrange(20, 40)
            cascade = CascadeCounts(
                sure=97 - escalated, escalated=escalated, unsure=3, audited=6, changed=number % 20 == 7, threshold=0.8,
                allowed=0.02, answered={"small": 100 - escalated, "large": escalated},
            )  # fmt: skip
            still = StillCounts(repeated=40, audited_same=4, changed=number == 31, allowed=0.01)
            counts = {"cascade": msgspec.to_builtins(cascade), "still": msgspec.to_builtins(still)}
            window = {**telemetry(rng, model, "")["models"][0], "requests": 100, **counts}
            at = bucket_start("minute", now - 60.0 * number)
            content = {**content_of_window(window), "origins": {"simulated": 100}}
            session.add(
                ModelBucketRow(model=model.partition("@")[0], group="audited", content=content, span_s=60, begins=at)
            )


def make_proposal(database: Database, names: Sequence[str], *, model: str, release: str, device_class: str) -> int:
    """A proposal that waits for an operator's word; its number."""
    drift = (
        ("uplink", "bytes/s", 731_250.0, 190_000.0), ("round trip", "s", 0.06, 0.11),
        ("device slice-1", "s", 0.031, 0.052), ("server remote", "s", 0.009, 0.0092),
    )  # fmt: skip
    rows = [{"name": "remote", "split_after": "", "device_s": 0.0, "remote_s": 0.009, "up_bytes": 22_500}]
    local = {"name": "local", "split_after": "scores", "device_s": 0.115, "remote_s": 0.0, "up_bytes": 0}
    told = {
        "reason": "the device in the middle would save 31 % of its time per request", "gain": 0.31,
        "gain_between": [0.08, 0.44], "broken_limits": {"now": 0.0, "then": 0.0},
        "seconds": {"now": 0.21, "then": 0.145},
        "measured_devices": len(names), "basis": "simulated", "rows": rows, "proposed_rows": [local, *rows],
        "drift": [
            {"quantity": quantity, "unit": unit, "assumed": assumed, "measured": measured, "factor": measured / assumed}
            for quantity, unit, assumed, measured in drift
        ],
    }  # fmt: skip
    with database.write() as session:
        row = ProposalRow(
            model=model, release=release, device_class=device_class, group="", devices=list(names), state="open",
            summary=told, measured={}, created=time.time() - 600, decided=None,
        )  # fmt: skip
        session.add(row)
        session.flush()
        return row.id


def make_rollout(
    database: Database, number: int, names: Sequence[str], *, model: str, release: str, state: str = "waiting"
) -> None:
    """A rollout in stages over these devices: the first stage is done, some of it failed, and the next waits."""
    rng, now = random.Random(number), time.time()
    sizes = (max(1, len(names) // 10), len(names) // 2, len(names))
    terms = Terms(
        stages=(Portion(part=0.1), Portion(part=0.5), Portion(part=1.0)),
        rate=Rate(per_s=100 / 60),
        abort_when_failed=Portion(part=0.2),
        approve=(1,),
    )
    with database.write() as session:
        session.add(
            Deployment(
                id=number, release=release, model=model, targets=["all"], devices=list(names), options={},
                created=now - 900,
            )
        )  # fmt: skip
        session.flush()
        session.add(
            RolloutRow(
                id=number, model=model.partition("@")[0], release=release, state=state,
                terms=msgspec.to_builtins(terms),
                stage=0, approved=-1, excused=-1, reason="", outcome="", following=False, superseded_by=0,
                rate_state=msgspec.to_builtins(RateState()), who="anna", created=now - 900, began=now - 880,
                ended=0.0, changed=now,
            )
        )  # fmt: skip
        session.flush()
        for stage, part in enumerate(("10%", "50%", "100%")):
            session.add(
                RolloutStageRow(rollout=number, number=stage, size=part, began=now - 880 if stage == 0 else 0.0)
            )
        session.flush()
        for position, name in enumerate(names):
            stage = next(place for place, size in enumerate(sizes) if position < size)
            session.add(_made_member(rng, number, name, stage, position, now))


def _made_member(rng: random.Random, number: int, name: str, stage: int, position: int, now: float) -> RolloutDeviceRow:
    drawn = rng.random()
    cause, kind, state = "", "", "queued" if stage else "succeeded"
    if not stage and drawn < 0.06:
        cause, kind, state = "p95 of 212 ms over 50 requests, at most 150 ms", "gate p95", "rolled back"
    elif not stage and drawn < 0.1:
        cause, kind, state = "golden input 2 differs by 0.031, at most 0.01", "golden inputs", "rolled back"
    return RolloutDeviceRow(
        rollout=number, device=name, stage=stage, position=position, state=state, previous="", cause=cause, kind=kind,
        counter=0, assigned_at=now - 870 + position if not stage else 0.0, ran_at=0.0, rolls_back=False,
        sent_back=bool(kind), counts=bool(kind), unjudged=False,
    )  # fmt: skip
