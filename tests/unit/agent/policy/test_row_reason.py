"""The sentence on why a row was chosen: its causes are the inputs without which another row would have been."""

from __future__ import annotations

import msgspec
import pytest

from edgesplit.mqtt.telemetry import ROW_REASON_CHARS
from edgesplit.plan import Link, Plan, Power, Row
from edgesplit_agent.policy.link_estimator import LinkEstimate
from edgesplit_agent.policy.row_reason import REFRESH_S, RowReasons, explain
from edgesplit_agent.policy.row_selection import Decision, RowChoice, RowSelector, SelectionContext, select_row
from edgesplit_agent.power.mode import PERFORMANCE, PowerMode

LINK = Link(up_bytes_per_s=662_500, down_bytes_per_s=662_500, rtt_s=0.05)
LOCAL = Row(name="local", device=("a", "b"), device_s=0.127, device_joules=1.0)
CUT = Row(
    name="cut-1", split_after="Equal", device=("a",), remote=("b",), device_s=0.01, up_bytes=500_000, device_joules=0.1
)
REMOTE = Row(name="remote", remote=("a", "b"), up_bytes=66_250, remote_s=0.06)
PLAN = Plan(model="m@1", device_class="pi", rows=(REMOTE, CUT, LOCAL), link=LINK)
LAYERS = {"a": 1, "b": 311}
AT_1402 = 1_700_056_920.0
"""A day's 14:02 UTC, in Unix seconds."""


def measured(rate: float = LINK.up_bytes_per_s, **more: float) -> LinkEstimate:
    """A link that was measured often."""
    return LinkEstimate(0.05, 1 / rate, 1 / rate, transfers=20, heard_at=100.0, spread=0.05, **more)  # type: ignore[arg-type]


def decided(estimate: LinkEstimate, plan: Plan = PLAN, mode: PowerMode = PERFORMANCE, **more: object) -> Decision:
    """What is chosen at second 100, without races."""
    context = SelectionContext(estimate, 100.0, may_race=False, may_hedge=False, **more)  # type: ignore[arg-type]
    choice = select_row(plan, context, mode)
    assert choice is not None
    return Decision(plan, choice, context, mode, LAYERS)


def test_sentence_names_the_slowdown_that_sent_the_request_away() -> None:
    """Why the cloud, now: the device is believed slow since a time, and the link is enough."""
    slow = measured(device_slowdown=2.6, computed_at=100.0, slow_since=100.0 - 600.0)
    assert explain(decided(slow), AT_1402 + 600.0) == (
        "the cloud: this device is believed 2.6 times slower than planned since 14:02 UTC, and 5.3 Mbit/s is enough "
        "(about 210 ms, this device 330 ms)"
    )


@pytest.mark.parametrize(
    ("decision", "sentence"),
    [
        (decided(measured()), "this device: as planned (about 127 ms, the cloud 210 ms)"),
        (
            decided(measured(rate=5e6)),
            "the cloud: the uplink is 40 Mbit/s, planned 5.3 Mbit/s (about 123 ms, this device 127 ms)",
        ),
        (
            decided(measured(rate=5e7, device_slowdown=2.6, computed_at=100.0)),
            "cut-1, after Equal (1 of 312 layers here): the uplink is 400 Mbit/s, planned 5.3 Mbit/s "
            "(about 86 ms, this device 330 ms)",
        ),
        (
            decided(measured(device_slowdown=2.6, computed_at=100.0, server_load=9.0, load_heard_at=100.0)),
            "this device: the server is believed 9.0 times slower than idle (about 330 ms, the cloud 690 ms)",
        ),
        (decided(measured(), remote_usable=False), "this device: nothing can be offloaded now (about 127 ms)"),
        (
            decided(measured(), msgspec.structs.replace(PLAN, forced_row="cut-1")),
            "cut-1, after Equal (1 of 312 layers here): the plan forces it (",
        ),
        (decided(measured(), msgspec.structs.replace(PLAN, rows=(LOCAL,))), "this device: the plan has no other row"),
        (
            decided(
                measured(),
                msgspec.structs.replace(PLAN, power=Power(idle_watts=0.1)),
                PowerMode("saver", reason="12 %"),
            ),
            "the cloud: power mode saver (12 %), and 5.3 Mbit/s is enough (about 210 ms, this device 127 ms)",
        ),
    ],
)
def test_sentence_names_the_inputs_that_decided(decision: Decision, sentence: str) -> None:
    """What was put back to the plan's value and changed the row is a cause; what did not change it is not named."""
    assert explain(decision, AT_1402).startswith(sentence)


def test_sentence_names_the_row_of_each_figure() -> None:
    """A race's figure stood without a name beside the device's own; a row that was kept, without that of the row that
    is not clearly faster."""
    context = SelectionContext(measured(), 100.0, may_race=False, may_hedge=False)
    choice = RowChoice(REMOTE, early_s=0.0, local_was_chosen=True, why="to measure the link")
    raced = Decision(PLAN, choice, context, PERFORMANCE, LAYERS)
    assert explain(raced, AT_1402) == (
        "this device, raced by the cloud: to measure the link (remote about 210 ms, this device 127 ms)"
    )
    kept = Decision(PLAN, RowChoice(REMOTE), context, PERFORMANCE, LAYERS)
    assert explain(kept, AT_1402) == (
        "the cloud: kept from the request before, and this device, 127 ms, is not clearly faster "
        "(about 210 ms, this device 127 ms)"
    )


def test_sentence_is_bounded_whatever_the_layers_are_called() -> None:
    """It goes into telemetry, whose receivers refuse what is longer."""
    long = msgspec.structs.replace(CUT, split_after=" + ".join(["layer/" * 50] * 9))
    plan = msgspec.structs.replace(PLAN, rows=(long, LOCAL), forced_row="cut-1", objective="latency" * 99)
    assert len(explain(decided(measured(), plan), AT_1402)) <= ROW_REASON_CHARS


def test_sentence_is_composed_anew_only_when_the_outcome_changes_or_a_second_passed() -> None:
    """Composing selects several times, which no request should pay for."""
    times = iter([0.0, 1.0, 2.0])
    selector = RowSelector()
    reasons = RowReasons(selector, lambda: next(times))
    for now in (100.0, 100.5, 100.0 + REFRESH_S):
        selector.select("m", PLAN, SelectionContext(measured(), now), layer_counts=LAYERS)
        assert reasons.of("m").startswith("this device")
    assert next(times) == 2.0
    assert reasons.of("other") == ""
