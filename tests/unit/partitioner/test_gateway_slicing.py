"""A row over three tiers: cut, signed, and executed tier by tier, at every pair of cuts."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import msgspec
import pytest

from edgesplit.device_profile import load_profile
from edgesplit.errors import MalformedMessage, TrustError, UsageError
from edgesplit.links import parse_link
from edgesplit.plan import FURTHER_LINK_MARK, Hop, Plan, Row, gateway_part, remote_half_beyond
from edgesplit.release.manifest import Manifest, decode_manifest, encode_manifest, gateway_slices
from edgesplit.release.recut import check_recut
from edgesplit.runtime import run_slices
from edgesplit.runtime.loader import load_slices
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit_partitioner import Costs, plan
from edgesplit_partitioner.costs.build import build_costs, with_tier
from edgesplit_partitioner.slicing import CutSlice, atoms, cut_sets, cut_slices, to_release_plan
from support import onnx_models as tiny

LINKS = {"device-edge": parse_link("wifi"), "edge-cloud": parse_link("lte")}
CLASS = "raspberrypi4"


@cache
def costs_of(name: str) -> Costs:
    graph = tiny.prepared(name).graph
    layers = {layer.name: 1e-5 for layer in graph.layers}
    two = build_costs("tiny", graph, profile=load_profile(CLASS), cloud_s=layers, tensors={})
    return with_tier(two, graph, "edge", load_profile("jetson-nano"))


def table_of(name: str, **limits: object) -> Plan:
    return plan(costs_of(name), LINKS, limits=limits).table


def cut_for(name: str, table: Plan) -> list[CutSlice]:
    model = tiny.prepared(name)
    return cut_slices(model, model.graph, atoms(model.graph, cut_sets(table)), None)


def manifest_of(name: str, table: Plan) -> tuple[Manifest, list[CutSlice]]:
    """The release of one table, read back as a device reads it."""
    slices = cut_for(name, table)
    seconds = {slice_.slice.name: 0.01 for slice_ in slices}
    made = tiny.manifest_of(tiny.prepared(name), slices)
    made = msgspec.structs.replace(made, plans={CLASS: to_release_plan(table, slices, seconds)})
    return decode_manifest(encode_manifest(made)), slices


def pairs(name: str) -> list[tuple[str, str]]:
    """Where the device's part may end, and the gateway's."""
    layers = [layer.name for layer in tiny.prepared(name).graph.layers]
    return list(itertools.combinations(layers, 2))


@pytest.mark.parametrize("name", ["chain", "branches", "captured", "state"])
def test_every_three_tier_cut_equals_the_whole_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Device part, near half, far half, each given what the row says is sent to it and no more: the whole model's
    answers, bit for bit, for every pair of layers that the parts may end after."""
    model = tiny.prepared(name)
    feeds = tiny.feeds_of(model)
    whole = tiny.run_whole(model.raw, feeds)
    tried = 0
    for number, (device, edge) in enumerate(pairs(name)):
        manifest, slices = manifest_of(name, table_of(name, force_after=device, edge_after=edge))
        row = manifest.plans[CLASS].rows[0]
        if not row.hops:
            continue
        tried += 1
        folder = tmp_path / str(number)
        tiny.write_slices(folder, slices)
        programs = load_slices(manifest, lambda one, at=folder: at / one, OnnxRuntime())
        live = run_slices(programs, row.device, feeds)
        at_edge = run_slices(programs, gateway_part(row).remote, {name: live[name] for name in row.sends})
        far = remote_half_beyond(row)
        beyond = run_slices(programs, far.remote, {name: at_edge[name] for name in far.sends})
        back = {name: at_edge[name] for name in gateway_part(row).receives if name in row.receives}
        back |= {name: beyond[name] for name in far.receives}
        assert set(back) == set(row.receives), (device, edge)
        assert tiny.same_bits({**live, **back}, whole), (device, edge)
        assert gateway_slices(manifest) == set(row.remote)
    assert tried


def test_a_gateway_addresses_the_cloud_part_by_name() -> None:
    """`cut-1~1` is the row that the gateway requests from the cloud; other numbers, and rows without hops, are
    unknown."""
    manifest, _ = manifest_of("chain", table_of("chain", force_after="stem/Conv", edge_after="conv1"))
    made = manifest.plans[CLASS]
    (row,) = (row for row in made.rows if row.hops)
    assert made.has_gateway and made.tiers == ("device", "edge", "cloud")
    assert made.row(f"{row.name}{FURTHER_LINK_MARK}1") == remote_half_beyond(row)
    assert remote_half_beyond(row).device == (*row.device, *gateway_part(row).remote)
    for wrong in ("~", "~0", "~2", "~-1", "~01", "~1~1", "~x", "~1 "):
        with pytest.raises(KeyError):
            made.row(f"{row.name}{wrong}")
    with pytest.raises(KeyError):
        made.row("local~1")


def test_two_chained_gateways_address_their_parts() -> None:
    """With two links beyond the first, each tier's part has a distinct name."""
    row = Row(
        name="cut-1", device=("a",), remote=("b", "c", "d"), sends=("x",), receives=("z",),
        hops=(
            Hop(tier="hub", remote=("c", "d"), sends=("y", "x"), receives=("z",), codecs={"y": "int8"}),
            Hop(tier="cloud", remote=("d",), sends=("w",), receives=("z",), compress=True),
        ),
    )  # fmt: skip
    assert (gateway_part(row).remote, gateway_part(row).receives) == (("b",), ("y",))
    hub = remote_half_beyond(row)
    assert (hub.name, hub.device, hub.codecs, gateway_part(hub).remote) == (
        "cut-1~1",
        ("a", "b"),
        {"y": "int8"},
        ("c",),
    )
    cloud = remote_half_beyond(hub)
    assert (cloud.name, cloud.remote, cloud.compress, cloud.hops) == ("cut-1~2", ("d",), True, ())
    asked = Plan(model="m", device_class=CLASS, rows=(row,), link=parse_link("wifi"), tiers=("device", "e", "h", "c"))
    assert asked.row("cut-1~2") == cloud


def _spoilt(manifest: Manifest, **hop: object) -> Manifest:
    """With another first hop."""
    one = manifest.plans[CLASS]
    row = one.rows[0]
    hops = (msgspec.structs.replace(row.hops[0], **hop),)
    rows = (msgspec.structs.replace(row, hops=hops), *one.rows[1:])
    return msgspec.structs.replace(manifest, plans={CLASS: msgspec.structs.replace(one, rows=rows)})


def test_a_manifest_with_inconsistent_hops_is_refused() -> None:
    """Slices beyond a link that never reach it, outputs without a source, more links than tiers."""
    manifest, _ = manifest_of("chain", table_of("chain", force_after="stem/Conv", edge_after="conv1"))
    row = manifest.plans[CLASS].rows[0]
    spoilt = {
        "the device's slice beyond the gateway": _spoilt(manifest, remote=(*row.device, *row.hops[0].remote)),
        "in another order": _spoilt(manifest, remote=(*row.hops[0].remote, *gateway_part(row).remote)),
        "an answer of nobody": _spoilt(manifest, receives=("nobody",)),
        "no tier for it": msgspec.structs.replace(
            manifest, plans={CLASS: msgspec.structs.replace(manifest.plans[CLASS], tiers=())}
        ),
    }
    for what, one in spoilt.items():
        with pytest.raises(MalformedMessage, match="row"):
            decode_manifest(encode_manifest(one))
            pytest.fail(what)
    private = msgspec.structs.replace(manifest.plans[CLASS], private_tensors=row.hops[0].sends)
    with pytest.raises(MalformedMessage, match="stay on the device"):
        decode_manifest(encode_manifest(msgspec.structs.replace(manifest, plans={CLASS: private})))


def test_a_recut_hop_may_only_carry_its_own_tensors() -> None:
    """A recut's hop carries what its remote half reads, and brings back outputs: anything else is refused."""
    manifest, _ = manifest_of("chain", table_of("chain", force_after="stem/Conv", edge_after="conv1"))
    recut = msgspec.structs.replace(manifest, recut_of="a" * 64)
    check_recut(recut, manifest, None)
    sends = manifest.plans[CLASS].rows[0].hops[0].sends
    for what, more in (("sends more", (*sends, "probabilities")), ("sends nothing", ())):
        with pytest.raises(TrustError, match="sends other tensors"):
            check_recut(_spoilt(recut, sends=more), manifest, None)
            pytest.fail(what)
    lossy = _spoilt(recut, codecs=dict.fromkeys(sends, "int6"))
    with pytest.raises(TrustError, match="loses precision"):
        check_recut(lossy, manifest, None)
    for limit, allows in (("max_loss", True), ("max_changed", True), ("deadline_s", False)):
        plan = msgspec.structs.replace(manifest.plans[CLASS], limits={limit: "0.01"})
        base = msgspec.structs.replace(manifest, plans={CLASS: plan})
        with nullcontext() if allows else pytest.raises(TrustError, match="loses precision"):
            check_recut(lossy, base, None)


def test_the_gateway_part_can_be_forced_only_after_the_devices() -> None:
    """`edge_after` needs `force_after`, a layer's name, and a middle tier; then both cuts are where they were put."""
    layers = [layer.name for layer in tiny.prepared("chain").graph.layers]
    row = table_of("chain", force_after=layers[0], edge_after=layers[2]).rows[0]
    assert (row.layers, row.hops[0].remote) == (tuple(layers[:1]), tuple(layers[3:]))
    streamed = plan(
        costs_of("chain"), LINKS, objective="throughput", limits={"force_after": layers[0], "edge_after": layers[2]}
    )
    assert streamed.cut == {"device": tuple(layers[:1]), "edge": tuple(layers[1:3]), "cloud": tuple(layers[3:])}
    for limits, why in (
        ({"edge_after": layers[0]}, "needs force_after"),
        ({"force_after": layers[0], "edge_after": "conf1"}, "did you mean conv1"),
    ):
        with pytest.raises(UsageError, match=why):
            table_of("chain", **limits)
    with pytest.raises(UsageError, match="no tier between"):
        plan(
            costs_of("chain"),
            {"device-cloud": parse_link("wifi")},
            limits={"force_after": layers[0], "edge_after": layers[1]},
        )
