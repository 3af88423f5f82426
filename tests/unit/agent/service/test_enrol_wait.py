"""A service enrols by itself: it waits for a claim and the network, and erases the claim after use."""

from __future__ import annotations

from pathlib import Path

from edgesplit.errors import TrustError
from edgesplit.trust.identity import Claim, encode_document
from edgesplit_agent.host.sd_notify import ServiceManager
from edgesplit_agent.service.enrol_wait import discard_claim, enrol_as_service
from edgesplit_agent.state.data_folder import DataFolder, Identity

IDENTITY = Identity(device="cam-1", device_class="pi", broker="b:1", offload="", controller="https://c", tuf_root="{}")


def claim(device: str = "cam-1", token: str = "secret") -> bytes:
    held = Claim(
        device=device, device_class="pi", token=token, controller_url="https://c", ca_pem="", tuf_root="{}", expires=1
    )  # fmt: skip
    return encode_document(held)


def test_enrolment_waits_for_a_claim_and_does_not_reuse_a_refused_one(tmp_path: Path) -> None:
    """No claim, a corrupt one, a refused one, and at last one that the controller accepts: each is sent once."""
    asked: list[str] = []

    def ask(folder: DataFolder, claim: Claim, url: str | None, wait: object) -> Identity:
        asked.append(claim.token)
        if claim.token == "used up":
            raise TrustError("the controller refused the claim (403): used")
        return IDENTITY

    file = tmp_path / "claim.json"
    contents = iter([None, b"{", None, claim(token="used up"), None, None, claim(token="good")])

    def wait(_seconds: float) -> bool:
        content = next(contents)
        if content is not None:
            file.unlink(missing_ok=True)
            file.write_bytes(content)
        return False

    assert enrol_as_service(DataFolder(tmp_path), file, None, wait, ServiceManager(), ask) == IDENTITY
    assert asked == ["used up", "good"]


def test_stop_ends_the_wait_for_a_claim(tmp_path: Path) -> None:
    """A service without a claim ends like any other."""
    assert (
        enrol_as_service(DataFolder(tmp_path), tmp_path / "claim.json", None, lambda _: True, ServiceManager()) is None
    )


def test_only_a_claim_in_the_agents_folder_is_erased(tmp_path: Path) -> None:
    """Its bytes are overwritten too. A claim elsewhere is the operator's; a claim of another device does not change
    this device's name."""
    folder = DataFolder(tmp_path / "data")
    folder.path.mkdir()
    own, other = folder.path / "claim.json", tmp_path / "claim.json"
    own.write_bytes(claim())
    other.write_bytes(claim())
    twin = tmp_path / "twin"
    twin.hardlink_to(own)
    for file in (own, other, folder.path / "none.json"):
        discard_claim(file, folder, IDENTITY)
    assert not own.exists() and other.read_bytes() == claim()
    assert set(twin.read_bytes()) == {0}
    for content in (claim("cam-2"), b"{"):
        own.write_bytes(content)
        discard_claim(own, folder, IDENTITY)
        assert not own.exists()


def test_symlinked_claim_erases_nothing_elsewhere(tmp_path: Path) -> None:
    """The file behind the link stays as it is."""
    folder = DataFolder(tmp_path / "data")
    folder.path.mkdir()
    (tmp_path / "thesis").write_text("words")
    (folder.path / "claim.json").symlink_to(tmp_path / "thesis")
    discard_claim(folder.path / "claim.json", folder, IDENTITY)
    assert (tmp_path / "thesis").read_text() == "words"
