"""`edgectl flash --batch`: many cards, a name and a claim for each, and no card written twice."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edgesplit.errors import MediumFailed, NotFound
from edgesplit_cli.main import cli
from edgesplit_provisioning.image import card as cards
from edgesplit_provisioning.image import session
from edgesplit_provisioning.image.target_checks import resolve_target
from support.card_images import CLAIM, MIB, TRIXIE, Machine, boot_of, make_image, make_kit, needs_card_tools


class Controller:
    """Makes claims, each with a token of its own; knows no device."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(body)
        return {**CLAIM, "device": body["device"], "token": f"token-{len(self.asked)}"}

    def get(self, path: str, **query: Any) -> Any:
        raise NotFound("no such device")


class FlashBatchCommand:
    """Types `edgectl flash` with an image of Trixie."""

    def __init__(self, folder: Path, controller: Controller) -> None:
        self.folder, self.controller = folder, controller
        self.image = make_image(folder / "trixie.img", TRIXIE)
        self.kit = make_kit(folder / "kit", "3.13")

    def flash(self, *words: str, typed: str = "") -> Result:
        """Its error rises."""
        asked = [
            "flash",
            "--device",
            "raspberrypi4",
            "--image",
            str(self.image),
            "--kit",
            str(self.kit),
            "--yes",
            *words,
        ]
        result = CliRunner().invoke(cli, asked, input=typed)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def table(self, name: str, *lines: str) -> Path:
        """A table of devices."""
        file = self.folder / name
        file.write_text("\n".join(("hostname,group,labels", *lines)) + "\n")
        return file


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FlashBatchCommand:
    needs_card_tools()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Controller()
    monkeypatch.setattr("edgesplit_cli.commands.flash.connect", lambda data: made)
    return FlashBatchCommand(tmp_path, made)


def claim_on(card: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(boot_of(card).read("edgesplit/claim.json"))
    return found


def test_a_batch_resumes_after_the_cards_in_its_journal(bench: FlashBatchCommand) -> None:
    """Each card gets a name and a claim; a card that the journal lists as done is not written again; a second call
    finds nothing to do."""
    table = bench.table("cams.csv", "hall-1,halls,room=a;floor=1", "hall-2,halls,", "hall-3,,")
    (bench.folder / "cams.csv.journal").write_text('{"hostname": "hall-2"}\n{"hostname": "hal')

    told = json.loads(bench.flash("--batch", str(table), "--to", str(bench.folder / "{hostname}.img"), "--json").stdout)

    assert [card["device"] for card in told] == ["hall-1", "hall-3"]
    claims = [claim_on(bench.folder / f"{name}.img") for name in ("hall-1", "hall-3")]
    assert [claim["device"] for claim in claims] == ["hall-1", "hall-3"] and claims[0]["token"] != claims[1]["token"]
    assert not (bench.folder / "hall-2.img").exists()
    assert bench.controller.asked[0]["group"] == "halls"
    assert bench.controller.asked[0]["labels"] == {"room": "a", "floor": "1"}
    again = bench.flash("--batch", str(table), "--to", str(bench.folder / "{hostname}.img"))
    assert "has its card" in again.stdout


def test_a_batch_with_one_reader_refuses_a_card_already_written(
    bench: FlashBatchCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second card is the first, inserted again: it is refused, and the prompt repeats until another is inserted."""
    machine = Machine(bench.folder / "machine")
    node = machine.disk("sdb", 48 * MIB)
    monkeypatch.setattr(session, "resolve_target", functools.partial(resolve_target, root=machine.root))
    first, write = bench.folder / "first.img", cards.write
    blank = iter([False, True])

    def another_card(*arguments: Any) -> None:
        write(*arguments)
        if not first.exists():
            first.write_bytes(node.read_bytes())

    whose = cards.card_owner

    def looked_at(path: Path) -> str:
        """Before the last try, somebody puts in another card."""
        if first.exists() and next(blank):
            node.write_bytes(bytes(48 * MIB))
        return whose(path)

    monkeypatch.setattr(cards, "write", another_card)
    monkeypatch.setattr(cards, "card_owner", looked_at)
    table = bench.table("two.csv", "door-1,,", "door-2,,")

    result = bench.flash("--batch", str(table), "--to", "/dev/sdb", typed="\n\n\n")

    assert "this is the card of door-1, which is done" in result.stderr
    assert result.stderr.count("press Enter") == 3
    assert claim_on(first)["device"] == "door-1" and claim_on(node)["device"] == "door-2"


def test_a_failed_card_is_repeated_by_the_next_batch(bench: FlashBatchCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that was pulled out is in no journal, has no partition table, and its device gets another."""
    table, write = bench.table("fails.csv", "gate-1,,", "gate-2,,"), cards.write

    def pulled_out(image: Any, medium: Any, files: Any, *rest: Any) -> None:
        if b"gate-2" in files.files["edgesplit/card.json"]:
            raise MediumFailed("it was pulled out")
        write(image, medium, files, *rest)

    to = str(bench.folder / "{hostname}.img")
    with monkeypatch.context() as patched:
        patched.setattr(cards, "write", pulled_out)
        with pytest.raises(MediumFailed):
            bench.flash("--batch", str(table), "--to", to)
    assert (bench.folder / "gate-2.img").read_bytes()[:512] == bytes(512)

    told = json.loads(bench.flash("--batch", str(table), "--to", to, "--json").stdout)
    assert [card["device"] for card in told] == ["gate-2"]
