"""What the doctor reports of an Edge TPU: present, accessible, usable or not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgesplit.runtime.tflite import edge_tpu_problem
from edgesplit_agent.service.doctor_edge_tpu import check_edge_tpu, delegate_problem


def plugged(root: Path, vendor: str = "18d1", product: str = "9302") -> Path:
    """A device at USB."""
    device = root / "sys/bus/usb/devices/2-1"
    device.mkdir(parents=True)
    (device / "idVendor").write_text(vendor + "\n")
    (device / "idProduct").write_text(product + "\n")
    return root


def test_no_finding_without_an_accelerator(tmp_path: Path) -> None:
    """Nor for another USB device."""
    assert list(check_edge_tpu(plugged(tmp_path, "046d", "c31c"), lambda: "")) == []


@pytest.mark.parametrize(("vendor", "product"), [("18d1", "9302"), ("1a6e", "089a")])
def test_accelerator_with_a_loading_delegate_is_good(tmp_path: Path, vendor: str, product: str) -> None:
    """Its USB id differs before and after its firmware is loaded."""
    (found,) = check_edge_tpu(plugged(tmp_path, vendor, product), lambda: "")
    assert found.level == "good" and "its delegate loads" in found.said


def test_delegate_that_does_not_load_is_reported_with_advice(tmp_path: Path) -> None:
    """Including that an agent may be using it."""
    (found,) = check_edge_tpu(plugged(tmp_path), lambda: "libedgetpu.so.1: no such file")
    assert found.level == "bad" and "no such file" in found.said and "--coral-deb" in found.todo


def test_crashing_library_is_reported() -> None:
    """It ends only the process that tried it."""
    assert "another LiteRT" in delegate_problem([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    assert "does not answer" in delegate_problem(["/nowhere"])


def test_library_is_tried_in_a_process_of_its_own() -> None:
    """Without a stand-in: where it is missing, that is what is reported."""
    assert delegate_problem() == edge_tpu_problem()
