"""A fleet that exists on paper only: devices as a controller's database would hold them, all made up from a seed and
marked as simulated. For pages that show fleets, and pictures of them; nothing here ran anywhere."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from edgesplit_controller.database import Database, Desired, Device, TelemetryRow

CLASSES = ("raspberrypi4", "raspberrypi5", "jetson-nano", "coral")
GROUPS = ("doors", "dock", "kiosks", "lab", "roof")
SITES = ("oslo", "bergen", "turku", "gdansk")
TROUBLES = (
    ("failed", "chunk 3f9c0d1e2b4a59687 did not match its digest after 5 tries"),
    ("rolled back", "golden input 2 differs by 0.031, at most 0.01"),
    ("failed", "golden input 1 failed: not enough memory for 187 MB"),
)


def device_row(
    name: str,
    *,
    model: str = "",
    release: str = "",
    rows: Sequence[str] = ("local",),
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
    session = rng.randrange(1, 90)
    models = []
    if model:
        word, detail = trouble or ("running", "")
        models = [{"model": model, "release": release, "wanted": release, "state": word, "detail": detail}]
    told = telemetry(rng, model, release, rng.choice(list(rows))) if model else None
    return Device(
        name=name, device_class=device_class, group=group,
        labels={"site": rng.choice(SITES), "floor": str(rng.randrange(1, 5))}, link="lte",
        certificate_serial=str(rng.getrandbits(60)), public_key_sha256="0" * 64, enrolled=now - 86_400 * 30,
        revoked=None, counter=int(now) - 5_000, statement=None, session=session, alive=state != "offline",
        last_seen=now - silent[state],
        birth={
            "session": session, "boot_s": 9.0, "version": "0.1.0", "device_class": device_class, "emulated": True,
            "simulated": True, "local_url": "http://127.0.0.1:1",
        },
        reported={"session": session, "counter": int(now) - 5_000, "models": models, "safe_mode": "", "trouble": ""},
        telemetry={"at": now - silent[state], **told} if told else None,
    )  # fmt: skip


def telemetry(rng: random.Random, model: str, release: str, row: str, mbit: float | None = None) -> dict[str, Any]:
    """One report, with figures that hang together."""
    mbit = mbit if mbit is not None else max(0.3, rng.lognormvariate(2.0, 0.6))
    requests = rng.randrange(20, 60)
    late = rng.random() < 0.15
    device_s, remote_s = (0.115, 0.0) if row == "local" else (0.031, 0.009)
    link_s = 0.0 if row == "local" else 0.05 + 0.18 / mbit
    device_s *= rng.uniform(0.95, 1.15)
    total_s = device_s + link_s + remote_s
    return {
        "session": 1, "sequence": 1, "emulated": True, "remote_ok": True, "up_bytes_per_s": mbit * 125_000,
        "rtt_s": rng.uniform(0.04, 0.07),
        "models": [{
            "model": model, "release": release, "row": row, "requests": requests, "failed": 0,
            "fallbacks": rng.randrange(1, 6) if late else 0, "switches": 0, "late": 0, "up_bytes": 40_000 * requests,
            "latency_p50_s": total_s, "latency_p95_s": total_s * rng.uniform(1.1, 1.5), "predicted_s": total_s,
            "device_s": device_s, "link_s": link_s, "remote_s": remote_s, "trouble": "",
        }],
        "power": {
            "mode": "performance", "watts": 2.9 + rng.uniform(0, 1.4), "watts_from": "rails",
            "celsius": 51 + rng.uniform(0, 9), "under_voltage": False,
        },
    }  # fmt: skip


def make_fleet(
    database: Database,
    count: int,
    *,
    model: str = "",
    release: str = "",
    rows: Sequence[str] = ("local",),
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
            device_class, group = rng.choice(CLASSES), rng.choice(GROUPS)
            name = f"{group}-{rng.choice(SITES)}-{number:04}"
            names.append(name)
            session.add(
                device_row(
                    name, model=model, release=release, rows=rows, rng=rng, state=state, trouble=trouble, group=group,
                    device_class=device_class,
                )
            )  # fmt: skip
        session.flush()
    return names


def want(database: Database, names: Sequence[str], model: str, release: str, deployment: int) -> None:
    """What these devices shall run."""
    with database.write() as session:
        session.add_all(Desired(device=name, model=model, release=release, deployment=deployment) for name in names)


def make_history(
    database: Database, name: str, model: str, release: str, rows: Mapping[float, str], *, reports: int = 240
) -> None:
    """Reports over the last hours on a link that comes and goes; `rows`: which is used above so many Mbit/s."""
    rng, now = random.Random(name), time.time()
    mbit = 9.0
    with database.write() as session:
        for number in range(reports):
            mbit = min(30.0, max(0.6, mbit * rng.lognormvariate(0, 0.13)))
            row = rows[max(edge for edge in rows if edge <= mbit)]
            told = telemetry(rng, model, release, row, mbit)
            session.add(TelemetryRow(device=name, at=now - 15.0 * (reports - number), content=told))
        device = session.get(Device, name)
        assert device is not None
        device.telemetry, device.last_seen, device.alive = {"at": now, **told}, now, True
