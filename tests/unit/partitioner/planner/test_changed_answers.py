"""A limit on the share of answers that change: codecs used, promises made, and how often they are wrong."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from edgesplit.errors import UsageError
from edgesplit.plan import Link, Row
from edgesplit_cli.main import cli
from edgesplit_cli.options.plan_limits import to_options
from edgesplit_partitioner import plan
from edgesplit_partitioner.bounds.binomial import lower_share
from edgesplit_partitioner.costs.model import ChangeCounts, CodecCost, Costs, LayerCost, TensorCost
from edgesplit_partitioner.planner.changed_answers import DELTA, MOST_TENSORS, confirm
from edgesplit_partitioner.planner.planner import tensors_to_confirm

LINK = {"device-cloud": Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.01)}
BYTES = {"fp16": 500_000, "int8": 250_000, "int6": 170_000, "int4": 90_000}


def codec(name: str, changed: int, samples: int = 300, chosen: int = 0, loss: float = 0.01) -> CodecCost:
    """A codec that changed so many of the confirming samples' answers."""
    counts = ChangeCounts(chosen=chosen, choosing_samples=16, confirmed=changed, confirming_samples=samples)
    return CodecCost(
        bytes=BYTES[name], loss=loss, confirmed_loss=loss, clip=0.5 if name == "int4" else 1.0, changes=counts
    )


def costs(codecs: Mapping[str, CodecCost]) -> Costs:
    """x -> a -> t -> b -> y: the cut at t is best, and its bytes are what it costs."""
    layers = (
        LayerCost(
            name="a", reads=("x",), seconds={"device": 0.1, "cloud": 0.1},
            writes={"t": TensorCost(bytes=1_000_000, codecs=dict(codecs))},
        ),
        LayerCost(name="b", reads=("t",), seconds={"device": 5.0, "cloud": 0.1}, writes={"y": TensorCost(bytes=4)}),
    )  # fmt: skip
    return Costs(
        model="m@1", tiers=("device", "cloud"), inputs={"x": TensorCost(bytes=9_000_000)}, outputs=("y",),
        layers=layers,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "allowed", "taken"),
    [
        ({"fp16": 0, "int8": 0, "int6": 0, "int4": 0}, 0.01, "int4"),
        ({"fp16": 0, "int8": 0, "int6": 0, "int4": 40}, 0.01, "int6"),
        ({"fp16": 0, "int8": 0, "int6": 1, "int4": 0}, 0.01, "int8"),
        ({"fp16": 0, "int8": 0, "int6": 1, "int4": 0}, 0.02, "int4"),
        ({"fp16": 9, "int8": 0, "int6": 0, "int4": 0}, 0.01, "raw"),
        ({"fp16": 0, "int8": 0, "int6": 0, "int4": 0}, 0.0, "raw"),
    ],
)
def test_the_coarsest_codec_before_the_first_that_fails_is_used(
    changed: Mapping[str, int], allowed: float, taken: str
) -> None:
    """From the finest to the coarsest, and no further than the first whose bound exceeds the limit. The row says what
    is promised, and how int4 divides its range."""
    made = plan(
        costs({name: codec(name, count) for name, count in changed.items()}), LINK, limits={"max_changed": allowed}
    )

    assert made.row.codecs.get("t", "raw") == taken and made.row.split_after == "a"
    assert made.row.clips == ({"t": 0.5} if taken == "int4" else {})
    if taken == "raw":
        assert made.row.changed is None
    else:
        assert made.row.changed is not None and made.row.changed.differing == changed[taken]
        percent = f"{100 * allowed:g}"
        assert made.row.changed.text == f"at most {percent} % of answers differ (90 % sure, 300 samples)"


def test_a_codec_that_changed_too_many_choosing_answers_is_not_tried() -> None:
    """And one that was compared on no sample that chose nothing is not used at all."""
    tried = costs({"int8": codec("int8", 0), "int6": codec("int6", 0, chosen=4)})
    unknown = costs({"int8": CodecCost(bytes=250_000, loss=0.01, confirmed_loss=0.01)})

    assert plan(tried, LINK, limits={"max_changed": 0.02}).row.codecs == {"t": "int8"}
    assert not plan(unknown, LINK, limits={"max_changed": 0.02}).row.codecs
    assert tensors_to_confirm(unknown, LINK, limits={"max_changed": 0.02}) == ("t",)
    assert tensors_to_confirm(unknown, LINK) == ()


def test_both_limits_hold_at_once() -> None:
    """Few answers change, but outputs move too far; and the other way about."""
    moved = costs({"int8": codec("int8", 0, loss=0.001), "int6": codec("int6", 0, loss=0.2)})

    assert plan(moved, LINK, limits={"max_changed": 0.01}).row.codecs == {"t": "int6"}
    assert plan(moved, LINK, limits={"max_changed": 0.01, "max_loss": 0.01}).row.codecs == {"t": "int8"}
    changed = costs({"int8": codec("int8", 0), "int6": codec("int6", 60)})
    assert plan(changed, LINK, limits={"max_loss": 0.5}).row.codecs == {"t": "int6"}
    assert plan(changed, LINK, limits={"max_changed": 0.01, "max_loss": 0.5}).row.codecs == {"t": "int8"}


def test_too_few_samples_say_how_many_it_takes() -> None:
    """230 without a changed answer for 1 %, and those that choose beside them."""
    with pytest.raises(UsageError, match=r"it takes 230 .* there are 229 beside the 16 .* give 246"):
        plan(costs({"int8": codec("int8", 0, samples=229)}), LINK, limits={"max_changed": 0.01})
    assert plan(costs({"int8": codec("int8", 0, samples=230)}), LINK, limits={"max_changed": 0.01}).row.changed


def skipping(generator: random.Random, confirmed: bool) -> Costs:
    """A chain whose every second layer also reads the tensor before the last, with some codecs on each tensor."""
    count = generator.randint(2, 5)
    layers = []
    for number in range(count):
        reads = (f"t{number - 1}",) if number else ("x",)
        if number > 1 and number % 2 == 0:
            reads = (*reads, f"t{number - 2}")
        size = generator.randint(1, 40) * 10_000
        codecs = {}
        for place, name in enumerate(("fp16", "int8", "int6", "int4")):
            if generator.random() < 0.7:
                failed = not confirmed and generator.random() < 0.4
                counts = ChangeCounts(choosing_samples=16, confirmed=5_000 * failed, confirming_samples=10_000)
                codecs[name] = CodecCost(
                    bytes=size >> (place + 1), changes=counts, encode_s={"device": generator.random() * 0.02}
                )
        write = {f"t{number}": TensorCost(bytes=size, codecs=codecs if number < count - 1 else {})}
        seconds = {"device": generator.random(), "cloud": generator.random() * 0.2}
        layers.append(LayerCost(name=f"l{number}", reads=reads, writes=write, seconds=seconds))
    return Costs(
        model="m@1", tiers=("device", "cloud"), inputs={"x": TensorCost(bytes=generator.randint(1, 90) * 10_000)},
        outputs=(f"t{count - 1}",), layers=tuple(layers),
    )  # fmt: skip


def least_s(given: Costs, link: Link, usable: Mapping[str, set[str]]) -> float:
    """By trying every prefix on the device, with every usable codec on at most one of the tensors that cross."""
    best = []
    for count in range(len(given.layers) + 1):
        here, there = given.layers[:count], given.layers[count:]
        made = {"x", *(name for layer in here for name in layer.writes)}
        sent = {name for layer in there for name in layer.reads} & made
        base = sum(layer.seconds["device"] for layer in here) + sum(layer.seconds["cloud"] for layer in there)
        if not there:
            best.append(base)
            continue
        tensors = given.tensors
        base += link.rtt_s + tensors[given.outputs[0]].bytes / link.down_bytes_per_s
        raw = sum(tensors[name].bytes for name in sent)
        for lossy in ("", *sorted(sent)):
            for name in usable.get(lossy, set()) if lossy else {""}:
                cost = tensors[lossy].codecs[name] if lossy else None
                size = raw if cost is None else raw - tensors[lossy].bytes + cost.bytes
                encode_s = cost.encode_s["device"] if cost else 0.0
                best.append(base + encode_s + size / link.up_bytes_per_s)
    return min(best)


@pytest.mark.parametrize("seed", range(30))
def test_plans_equal_brute_force_over_cuts_and_one_codec(seed: int) -> None:
    """Where every codec is confirmed: the best over all cuts with at most one lossy tensor. Where some fail: never
    better than the best of those that hold, never worse than lossless, and each lossy row has its promise."""
    generator, link = random.Random(seed), LINK["device-cloud"]
    held = skipping(generator, confirmed=True)
    every = {name: set(tensor.codecs) for name, tensor in held.tensors.items()}

    assert plan(held, LINK, limits={"max_changed": 0.01}).value == pytest.approx(least_s(held, link, every), rel=1e-9)

    partly = skipping(generator, confirmed=False)
    kept: dict[str, set[str]] = {}
    for name, tensor in partly.tensors.items():
        for codec_name in ("fp16", "int8", "int6", "int4"):
            if codec_name in tensor.codecs:
                changes = tensor.codecs[codec_name].changes
                if changes is None or changes.confirmed:
                    break
                kept.setdefault(name, set()).add(codec_name)
    made = plan(partly, LINK, limits={"max_changed": 0.01})
    assert least_s(partly, link, kept) <= made.value * (1 + 1e-9)
    assert made.value <= least_s(partly, link, {}) * (1 + 1e-9)
    for row in made.table.rows:
        lossy = {name: used for name, used in row.codecs.items() if used != "raw"}
        assert len(lossy) <= 1 and all(used in kept[name] for name, used in lossy.items())
        assert (row.changed is not None) == bool(lossy)


@pytest.mark.parametrize("tensors", [1, 3, MOST_TENSORS + 2])
def test_promises_are_broken_no_more_often_than_they_say(tensors: int) -> None:
    """Simulated worlds at the limit: each codec truly changes just more than is allowed, or far less. In at most a
    tenth of the worlds is any codec confirmed that changes too much (99 % sure)."""
    seed, worlds, samples, allowed = 17 + tensors, 2_000, 400, 0.02
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)
    truth = {"fp16": 0.0, "int8": 0.001, "int6": 1.01 * allowed, "int4": 1.01 * allowed}
    rows = [Row(name=f"cut-{number}", remote=("b",), codecs={f"t{number}": "int4"}) for number in range(tensors)]
    broken = confirmed = 0
    for _ in range(worlds):
        inputs = {
            f"t{number}": TensorCost(
                bytes=1_000_000,
                codecs={
                    name: codec(name, int(generator.binomial(samples, share)), samples) for name, share in truth.items()
                },
            )
            for number in range(tensors)
        }
        promises = confirm(rows, msgspec.structs.replace(costs({}), inputs=inputs), allowed)
        broken += any(truth[name] > allowed for _, name in promises)
        confirmed += any(name == "int8" for _, name in promises)

    assert lower_share(broken, worlds, 0.01) <= DELTA
    assert confirmed > worlds // 2  # and it is no refusal of everything


def test_a_costs_file_is_planned_with_a_limit_on_changed_answers(tmp_path: Path) -> None:
    """`edgectl plan COSTS.json --allow-changed 1% --explain` says what is promised; too few samples end it."""
    file = tmp_path / "costs.json"
    file.write_bytes(msgspec.json.encode(costs({"int6": codec("int6", 0)})))
    arguments = ["plan", str(file), "--link", "8mbit/10ms", "--allow-changed", "1%"]

    told = CliRunner().invoke(cli, [*arguments, "--explain"])
    assert told.exit_code == 0, told.output
    words = " ".join(told.output.split())
    assert "answers: at most 1 % of answers differ (90 % sure, 300 samples); 0 of the samples' differ" in words
    assert "Its codecs change answers: at most 1 % of answers differ (90 % sure, 300 samples)." in words
    file.write_bytes(msgspec.json.encode(costs({"int6": codec("int6", 0, samples=100)})))
    refused = CliRunner().invoke(cli, arguments)
    assert isinstance(refused.exception, UsageError)
    assert "--allow-changed 1%: too few samples: it takes 230" in to_options(str(refused.exception))
