"""`edgectl flash` against a real controller: claims of its own for each card, devices that come online with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgesplit.errors import UsageError
from edgesplit_cli.main import cli
from edgesplit_provisioning.image.wait_online import wait_online
from support.card_images import TRIXIE, boot_of, make_image, make_kit, needs_card_tools
from support.edgesplit_processes import Agent, Cloud


class Bench:
    """Types `edgectl flash` with an image of Trixie."""

    def __init__(self, folder: Path, cloud: Cloud) -> None:
        self.folder, self.cloud = folder, cloud
        self.image = make_image(folder / "trixie.img", TRIXIE)
        self.kit = make_kit(folder / "kit", "3.13")

    def flash(self, *words: str, typed: str = "") -> Result:
        """Its error rises."""
        asked = ["--data", str(self.cloud.data), "flash", "--device", "raspberrypi4", "--image", str(self.image)]
        result = CliRunner().invoke(cli, [*asked, "--kit", str(self.kit), "--yes", *words], input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result


@pytest.fixture
def bench(tmp_path: Path, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Bench:
    needs_card_tools()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Bench(tmp_path, cloud)


def test_a_device_comes_online_with_the_claim_on_its_card(bench: Bench) -> None:
    """Flashed with group and label; the real agent, given the card's claim, is online, and the wait ends."""
    card, claim = bench.folder / "card.img", bench.folder / "claim.json"

    bench.flash("--to", str(card), "--hostname", "cam-1", "--group", "cams", "--label", "room=hall")
    claim.write_bytes(boot_of(card).read("edgesplit/claim.json"))
    agent = Agent(bench.cloud, "cam-1", claim)
    bench.cloud.agents.append(agent)
    agent.process.start()
    seen = wait_online(bench.cloud.api, ["cam-1"], 120, lambda _: None)

    assert seen.online == ["cam-1"]
    shown = bench.cloud.json("device", "show", "cam-1")
    assert shown["group"] == "cams" and shown["labels"] == {"room": "hall"}
    assert shown["device_class"] == "raspberrypi4"
    with pytest.raises(UsageError, match="--replace"):
        bench.flash("--to", str(card), "--hostname", "cam-1")

    table = bench.folder / "two.csv"
    table.write_text("hostname,group,labels\nhall-1,halls,room=a;floor=1\nhall-2,,\n")
    bench.flash("--batch", str(table), "--to", str(bench.folder / "{hostname}.img"))
    claims = [
        json.loads(boot_of(bench.folder / f"{name}.img").read("edgesplit/claim.json")) for name in ("hall-1", "hall-2")
    ]
    assert [one["device"] for one in claims] == ["hall-1", "hall-2"] and claims[0]["token"] != claims[1]["token"]
    shown = bench.cloud.json("device", "show", "hall-1")
    assert shown["group"] == "halls" and shown["labels"] == {"room": "a", "floor": "1"}
