"""Power fails at every operation while a device becomes itself: enrolment and renewal (reference fault A4).

A claim serves once. The controller's own rule for that is at work here, over its real database; only the connection to
it is short-circuited.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import edgesplit_agent.control.certificate_renewal as renewal
import edgesplit_agent.control.enrolment as enrolment
from edgesplit.errors import LinkError
from edgesplit.trust.identity import Claim, Enrolled, EnrolmentRequest, Renewal, decode_document, encode_document
from edgesplit_agent.control.certificate_renewal import certificate_in_use, renew
from edgesplit_agent.control.enrolment import credentials, enrol
from edgesplit_agent.state.data_folder import DataFolder, Identity
from edgesplit_controller.fleet.devices import ClaimRequest, Devices
from edgesplit_controller.pki.authority import Authority
from support.device_storage import NOW, imaginary_disks
from support.fresh_database import fresh_database
from support.power_cut import Promised, Recorder, after_cut, read_tree, write_tree

SEED = int(os.environ.get("EDGESPLIT_SEED", "1"))
DEVICE = "cam-1"


class Controller:
    """What enrols and renews."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.authority = Authority(folder / "ca")
        self.database = fresh_database(folder / "c.db")
        self.devices = Devices(self.database, stale_after_s=10.0, now=lambda: NOW)
        self.asked: Callable[[], None] = lambda: None
        self.link = True
        self.bodies: list[bytes] = []

    def claim(self, *, replace: bool = False) -> Claim:
        token, expires = self.devices.claim(ClaimRequest(device=DEVICE, device_class="pi4", replace=replace))
        return Claim(
            device=DEVICE, device_class="pi4", token=token, controller_url="https://c:1", ca_pem=self.authority.ca_pem,
            tuf_root="{}", expires=expires,
        )  # fmt: skip

    def post(self, url: str, path: str, ca_pem: str, body: bytes, what: str) -> bytes:
        """In place of HTTPS. The answer may be lost, and then the request was not."""
        self.bodies.append(body)
        answer = self.answer(path, body)
        self.asked()
        if not self.link:
            raise LinkError("the answer is lost")
        return answer

    def answer(self, path: str, body: bytes) -> bytes:
        if path == "/v1/enrol":
            request = decode_document(body, EnrolmentRequest)
            given = self.devices.enrol(request.token, request.csr_pem.encode(), self.authority.sign_request)
        else:
            from cryptography import x509

            asked = decode_document(body, Renewal)
            old = x509.load_pem_x509_certificate(asked.certificate_pem.encode())
            given = self.devices.renew(old, asked.csr_pem.encode(), self.authority.sign_request)
        return encode_document(
            Enrolled(
                device=given.device, certificate_pem=given.certificate.decode(), ca_pem=self.authority.ca_pem,
                broker_host="h", broker_port=1, offload_url="https://o:1",
            )
        )  # fmt: skip


@pytest.fixture(scope="module")
def shelf() -> Iterator[Path]:
    with imaginary_disks() as folder:
        yield folder


def recorded(folder: Path, controller: Controller, act: Callable[[], object]) -> Recorder:
    """What `act` does to the disk under `folder`, and when it has asked the controller."""
    recorder = Recorder(folder)
    controller.asked = lambda: recorder.tell("asked")
    with recorder.watching():
        act()
    controller.asked = lambda: None
    return recorder


def test_enrolment_is_finished_by_the_same_claim_wherever_power_fails(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the controller was asked, after, and between any two writes: no token is burnt for a key that is lost."""
    tried = 0
    for how in ("lost", "kept", "any"):
        cut = 0
        while True:
            controller = Controller(shelf / f"controller-{how}-{cut}")
            monkeypatch.setattr(enrolment, "post", controller.post)
            claim = controller.claim()
            folder = shelf / f"device-{how}-{cut}"
            folder.mkdir()

            def first(folder: Path = folder, claim: Claim = claim) -> None:
                agent = DataFolder(folder / "agent")  # which is new too
                agent.acquire()
                enrol(agent, claim)
                agent.release()

            recorder = recorded(folder, controller, first)
            seed = f"{SEED}/{how}/{cut}"
            disk = after_cut(recorder.start, recorder.log, cut, how, random.Random(seed))  # type: ignore[arg-type]
            if Promised("asked") not in recorder.log[:cut]:  # then the controller knows nothing of it yet
                shutil.rmtree(controller.folder)
                controller = Controller(controller.folder)
                monkeypatch.setattr(enrolment, "post", controller.post)
                claim = controller.claim()
            shutil.rmtree(folder)
            folder.mkdir()
            write_tree(disk.tree(), folder)
            again = DataFolder(folder / "agent")
            again.acquire()
            identity = enrol(again, claim)
            assert identity.device == DEVICE, seed
            credentials(again).client_context()
            again.release()
            assert DataFolder(folder / "agent").read_identity() == identity, seed
            left = [name for name in read_tree(folder) if name.endswith(".part")]
            assert not left, seed
            done = cut >= len(recorder.log)
            shutil.rmtree(folder)
            shutil.rmtree(controller.folder)
            tried, cut = tried + 1, cut + 1
            if done:
                break
    assert tried > 60
    print(f"{tried} cuts, seed {SEED}")


def test_a_renewal_leaves_the_old_pair_or_the_new_wherever_power_fails(
    shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Key and certificate always fit each other, and the next renewal succeeds."""
    controller = Controller(shelf / "controller")
    monkeypatch.setattr(enrolment, "post", controller.post)
    monkeypatch.setattr(renewal, "post", controller.post)
    folder = shelf / "device"
    folder.mkdir()
    data = DataFolder(folder)
    identity: Identity = enrol(data, controller.claim())
    old = certificate_in_use(data).serial_number
    recorder = recorded(folder, controller, lambda: renew(data, identity))
    new = certificate_in_use(data).serial_number
    for how in ("lost", "kept", "any"):
        for cut in range(len(recorder.log) + 1):
            seed = f"{SEED}/{how}/{cut}"
            disk = after_cut(recorder.start, recorder.log, cut, how, random.Random(seed))  # type: ignore[arg-type]
            place = shelf / f"renewed-{how}-{cut}"
            place.mkdir()
            write_tree(disk.tree(), place)
            left = DataFolder(place)
            credentials(left).client_context()
            assert certificate_in_use(left).serial_number in ((old, new) if cut < len(recorder.log) else (new,)), seed
            renew(left, identity)
            credentials(left).client_context()
            shutil.rmtree(place)


def test_a_lost_enrolment_response_is_retried_with_the_same_key(shelf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller has enrolled the device, and the device never heard of it: asked again, it hears."""
    controller = Controller(shelf / "lost-answer")
    monkeypatch.setattr(enrolment, "post", controller.post)
    claim, folder = controller.claim(), DataFolder(shelf / "lost-device")
    folder.acquire()
    controller.link = False
    with pytest.raises(LinkError):
        enrol(folder, claim)
    controller.link = True
    assert enrol(folder, claim).device == DEVICE
    folder.release()
