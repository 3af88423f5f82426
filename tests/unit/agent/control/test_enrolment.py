"""What a refused enrolment leaves on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgesplit.errors import LinkError, TrustError, UsageError
from edgesplit.trust.identity import Claim
from edgesplit_agent import main as agent
from edgesplit_agent.control import enrolment
from edgesplit_agent.control.enrolment import enrol, enrol_with_retries, removed_if_refused
from edgesplit_agent.state.data_folder import DataFolder

CLAIM = Claim(
    device="cam-9", device_class="pi4", token="t", controller_url="https://c:1", ca_pem="", tuf_root="{}", expires=1
)


def refuse(*_: object) -> bytes:
    """The controller's answer to a used claim."""
    raise TrustError("the controller refused the claim (403): it was used")


def test_a_refused_claim_left_a_folder_behind(tmp_path: Path) -> None:
    """A folder that this process made goes again; one that was there stays, with its key."""
    for existed in (False, True):
        folder = DataFolder(tmp_path / f"existed-{existed}")
        if existed:
            folder.path.mkdir()
        folder.acquire()
        with pytest.raises(TrustError), removed_if_refused(folder):
            enrol(folder, CLAIM, post_enrolment=refuse)
        folder.release()
        assert folder.path.exists() == folder.key_file.exists() == existed


def test_a_key_that_the_controller_may_know_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer was lost, the second is a refusal: with its key the same claim may still be good."""
    failures = iter(
        [LinkError("the answer is lost"), TrustError("the controller refused the claim (403): it was used")]
    )

    def post(_request: bytes) -> bytes:
        raise next(failures)

    monkeypatch.setattr(enrolment, "_by_https", lambda url, ca_pem: post)
    folder = DataFolder(tmp_path / "cam-9")
    folder.acquire()
    with pytest.raises(TrustError), removed_if_refused(folder):
        enrol_with_retries(folder, CLAIM, None, lambda _: False)
    folder.release()
    assert folder.key_file.exists()


def test_a_misspelt_claim_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command itself."""
    monkeypatch.setattr(agent, "_keep_private", lambda: None)
    words = ["enrol", "--data", str(tmp_path / "cam-9"), "--claim", str(tmp_path / "typo.json")]
    assert agent.main(words) == UsageError.exit_code
    assert "cannot read the claim" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
