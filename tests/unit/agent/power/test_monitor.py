"""The engine under a power mode: what battery, supply and clock change from one request to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from edgesplit.offload_client.pool import OffloadClient
from edgesplit.plan import Power, Row
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.power.mode import UNDER_VOLTAGE_S, PowerSettings
from edgesplit_agent.power.monitor import PowerMonitor
from edgesplit_agent.power.sensors import Readings
from edgesplit_agent.serving.engine import Engine, Settings
from edgesplit_agent.telemetry.windows import TelemetryWindows
from edgesplit_agent.updates.download_window import DownloadWindow, NotNow
from support.agent_engine import CLASS, CUT, EXPECTED, INPUT, LOCAL, REMOTE, ScriptedCloud, active, record

POWER = Power(idle_watts=2.0, busy_watts=5.0)
QUICK_LOCAL = msgspec.structs.replace(LOCAL, device_s=0.02, device_joules=0.3)
SLOW_REMOTE = msgspec.structs.replace(REMOTE, remote_s=0.024)
"""Slower than the device, and cheaper: it waits for 25 ms at 2 W."""
UNPLUGGED = Readings(battery_percent=10.0, discharging=True)


@contextmanager
def powered(watch: PowerMonitor, *rows: Row, power: Power | None = POWER, **kind: bool) -> Iterator[Engine]:
    """An engine that serves the tiny model by a plan with power figures; its cloud answers at once."""
    cloud = ScriptedCloud()
    cloud.start()
    engine = Engine(CLASS, OffloadClient(cloud.server.url), settings=Settings(idle_probe_s=3600.0), power=watch)
    release = active(*rows, **kind)
    engine.serve("tiny", replace(release, plan=msgspec.structs.replace(release.plan, power=power)))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        cloud.stop()


def row_of(engine: Engine) -> str:
    answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)
    assert (answer.outputs["y"] == EXPECTED).all()
    return answer.report.row


def test_request_after_under_voltage_takes_the_low_power_row() -> None:
    """E6, A10: the fast row before, the low-power row from the next request on, the fast row again afterwards; every
    request is answered."""
    watch = PowerMonitor()
    with powered(watch, QUICK_LOCAL, SLOW_REMOTE) as engine:
        assert row_of(engine) == "local"
        watch.on_readings(Readings(under_voltage=True), 100.0)
        assert row_of(engine) == "remote"
        watch.on_readings(Readings(under_voltage=False), 100.0 + UNDER_VOLTAGE_S)
        assert row_of(engine) == "local"


def test_low_battery_changes_the_row() -> None:
    """Under `auto`; an explicit policy is kept."""
    for policy, row in (("auto", "remote"), ("performance", "local"), ("saver", "remote")):
        watch = PowerMonitor(PowerSettings(policy))  # type: ignore[arg-type]
        watch.on_readings(UNPLUGGED, 0.0)
        with powered(watch, QUICK_LOCAL, SLOW_REMOTE) as engine:
            assert row_of(engine) == row


def test_every_policy_takes_the_fastest_row_without_power_figures() -> None:
    """Answering has priority."""
    with powered(PowerMonitor(PowerSettings("saver", 0.1)), QUICK_LOCAL, SLOW_REMOTE, power=None) as engine:
        answer = engine.infer("tiny", {"x": INPUT}, deadline_s=10)
        assert (answer.report.row, answer.report.joules_basis) == ("local", "")


def test_race_beside_a_local_row_is_no_fallback() -> None:
    """An uncertain cloud is tried beside the local row; whichever wins, the answer is correct, and the device's own win
    is reported as the local row."""
    watch = PowerMonitor()
    with powered(watch, QUICK_LOCAL, REMOTE, emulated=True) as engine:
        meter = LinkEstimate(
            rtt_s=0.0, up_s_per_byte=0.03 / 300, down_s_per_byte=1e-7, spread=1.4, fades=0.0, transfers=20
        )
        raced = []
        while (
            engine.hedge_budget.counts["hedges"] == 0 and len(raced) < 200
        ):  # a busy machine's figures may not ask for a race
            engine.own_target._estimate = meter
            raced.append(engine.infer("tiny", {"x": INPUT}, deadline_s=10))
        assert engine.hedge_budget.counts["hedges"] >= 1 and engine.breaker.state == "closed"
    for answer in raced:
        assert (answer.outputs["y"] == EXPECTED).all()
        assert answer.report.row in ("local", "remote") and not answer.report.fallback and not answer.report.cause


class CappedMonitor(PowerMonitor):
    """Sensors that say how much slower the device's clock is."""

    cap = 1.0

    @property
    def slowdown(self) -> float:
        return self.cap


def test_capped_clock_counts_at_the_next_request() -> None:
    """Predicted from the sensors: at a tenth of its clock the device is no longer the faster way."""
    watch = CappedMonitor()
    with powered(watch, QUICK_LOCAL, SLOW_REMOTE) as engine:
        assert row_of(engine) == "local"
        assert engine.conditions.device_slowdown < 5
        watch.cap = 1e6
        assert row_of(engine) == "remote"
        assert engine.conditions.device_slowdown > 100


def test_answers_report_joules_and_telemetry_their_mean() -> None:
    """By the plan's figures and the measured times, and marked as predicted."""
    windows = TelemetryWindows()
    with powered(PowerMonitor(), QUICK_LOCAL, CUT) as engine:
        for _ in range(3):
            report = engine.infer("tiny", {"x": INPUT}, deadline_s=10).report
            assert report.joules_basis == "predicted"
            assert 0 < report.joules <= 2 * POWER.busy_watts * report.latency_s
            windows.finished(record(report))
        told = windows.close_windows(engine.serving, engine.conditions)[0]
    assert told.joules_basis == "predicted" and told.joules > 0


def test_reasons_that_defer_an_update() -> None:
    """Under-voltage defers every update, a low battery those that are not urgent; the reason is reported."""
    watch = PowerMonitor()
    hours = DownloadWindow(hold=watch.update_hold)
    hours.check()
    watch.on_readings(UNPLUGGED, 0.0)
    assert hours.is_held() and not hours.is_held(urgent=True)
    hours.check(urgent=True)
    with pytest.raises(NotNow, match=r"waiting for power: the battery is at 10 %"):
        hours.check()
    watch.on_readings(Readings(under_voltage=True), 10.0)
    assert hours.is_held(urgent=True)
    with pytest.raises(NotNow, match="under-voltage"):
        hours.check_power(urgent=True)
    watch.on_readings(Readings(), 10.0 + UNDER_VOLTAGE_S)
    hours.check()


def test_emulated_device_reads_no_host_sensors() -> None:
    """Nothing is known unless a folder is named."""
    watch = PowerMonitor(emulated=True)
    watch.start()
    assert watch.readings == Readings() and watch.to_telemetry().watts is None
    watch.stop()
