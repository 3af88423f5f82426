"""Releases for devices behind a gateway: planned, cut and signed over three tiers, and served by each."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import NotFound, UsageError
from edgesplit.links import parse_link
from edgesplit.oip.protocol import remote_name
from edgesplit.release.manifest import Manifest, gateway_slices
from edgesplit.runtime.onnx import OnnxRuntime
from edgesplit_controller.planning.planner_service import GatewayHop, PlanOptions
from edgesplit_offload.models.repository import ModelRepository
from edgesplit_offload.server import release_opener
from support.release_maker import CLASS, ReleaseMaker

UPLINK = parse_link("lte")


@pytest.fixture
def maker(tmp_path: Path) -> ReleaseMaker:
    return ReleaseMaker(tmp_path)


def release(
    maker: ReleaseMaker, partition: str = "auto", *, gateway: bool = True, recut: bool = False, **wish: object
) -> str:
    """As the controller deploys it to a device behind a gateway, or with none."""
    through = {CLASS: GatewayHop("jetson-nano", UPLINK)} if gateway else {}
    asked = PlanOptions(partition=partition, limits=wish)
    links = {CLASS: parse_link("wifi")}
    digest, _ = maker.releasing.prepare(maker.model, links, asked, recut=recut, gateways=through)
    maker.releasing.publish(maker.model, digest, asked)
    return digest


def layers_of(maker: ReleaseMaker) -> list[str]:
    return [layer["name"] for layer in maker.model.shown["layers"]]


def test_the_offload_server_serves_every_row_and_its_cloud_part(maker: ReleaseMaker) -> None:
    """Whatever the planner finds, and every forced place for the gateway's part: the cloud's server knows each row of
    the signed release, and what is left of it beyond the gateway, by the slices that lie there."""
    layers = layers_of(maker)
    made = [release(maker, partition) for partition in ("auto", "edge", "cloud")]
    made += [release(maker, layers[0], edge_after=last) for last in (layers[1], layers[-2])]
    shelf = ModelRepository(release_opener(maker.folder / "offload", maker.repository.root_bytes), OnnxRuntime())
    hops = 0
    for digest in made:
        manifest: Manifest = maker.releasing.manifest(digest)
        plan = manifest.plans[CLASS]
        assert plan.tiers == ("device", "edge", "cloud") and maker.releasing.split_by_gateway(digest)
        for row in plan.rows:
            if row.is_local:
                continue
            assert shelf.model(remote_name(digest, CLASS, row.name)).row == row
            for link, hop in enumerate(row.hops, 1):
                hops += 1
                far = shelf.model(remote_name(digest, CLASS, f"{row.name}~{link}"))
                assert [tensor.name for tensor in far.inputs] == list(hop.sends)
                assert [tensor.name for tensor in far.outputs] == list(hop.receives)
                assert set(hop.remote) <= set(row.remote) <= gateway_slices(manifest)
            with pytest.raises(NotFound):
                shelf.model(remote_name(digest, CLASS, f"{row.name}~{len(row.hops) + 1}"))
    assert hops >= 2


def test_two_tier_releases_contain_no_gateway_fields(maker: ReleaseMaker) -> None:
    """No hops, no slices for a gateway, and no layer that could end its part."""
    digest = release(maker, gateway=False)
    manifest = maker.releasing.manifest(digest)
    assert maker.releasing.split_by_gateway(digest) == "" and gateway_slices(manifest) == set()
    assert not any(row.hops for row in manifest.plans[CLASS].rows)
    with pytest.raises(UsageError, match="edge"):
        release(maker, "edge", gateway=False)
    with pytest.raises(UsageError, match="no tier between"):
        release(maker, layers_of(maker)[0], gateway=False, edge_after=layers_of(maker)[1])


def test_the_planner_can_recut_a_release_for_a_gateway(maker: ReleaseMaker) -> None:
    """A device is assigned to a gateway after its model was released: another cut, signed with the planner's key
    alone."""
    base = release(maker, gateway=False)
    maker.lose_the_release_key()
    layers = layers_of(maker)

    digest = release(maker, layers[0], recut=True, edge_after=layers[1])

    manifest = maker.releasing.manifest(digest)
    assert manifest.recut_of == base and manifest.plans[CLASS].rows[0].hops
    assert maker.releasing.split_by_gateway(digest)
