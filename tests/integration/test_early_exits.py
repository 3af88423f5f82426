"""An early exit from a pushed model to answers: planned on its samples, signed, verified, and served by an engine whose
offload server runs the rest; each answer bit for bit that of the whole model or of its exit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edgesplit.cascade import EXIT
from edgesplit.errors import InfeasibleLimits, UsageError
from edgesplit.links import parse_link
from edgesplit.offload_client.pool import OffloadClient
from edgesplit.release_store import open_release
from edgesplit.runtime import Tensors
from edgesplit.runtime.dispatch import DispatchingRuntime
from edgesplit_agent.releases.loaded_release import check_golden, load_release
from edgesplit_agent.serving.engine import Engine
from edgesplit_agent.worker.host import in_process
from edgesplit_controller.model_registry.golden import run_whole
from edgesplit_controller.planning.planner_service import PlanOptions
from edgesplit_offload.server import OffloadServer
from edgesplit_partitioner.model_loader import prepare_model
from edgesplit_partitioner.planner.cascade_calibration import CascadeRequest
from support.early_exit_model import EXIT_LAYERS, exit_model, images
from support.edgesplit_processes import Cloud
from support.registry_harness import npz
from support.release_maker import CLASS, ReleaseMaker

COUNT = 24
ASKED = CascadeRequest(changed=0.5, certainty=0.8, exit_output="early")
LINK = {CLASS: parse_link("wifi")}
LONG_S = 30.0


@pytest.fixture
def maker(tmp_path: Path) -> ReleaseMaker:
    """The model, with samples that need no labels."""
    made = ReleaseMaker(tmp_path, exit_model())
    made.registry.add_samples(made.model, tensors=[npz(image=image) for image in images(COUNT)])
    return made


def whole(maker: ReleaseMaker) -> list[dict[str, Any]]:
    """Both outputs of the whole model for each image."""
    inputs: list[Tensors] = [{"image": image} for image in images(COUNT)]
    return run_whole(maker.registry.load(maker.model).prepared, inputs)


@contextmanager
def served(maker: ReleaseMaker, options: PlanOptions, threshold: float | None = None) -> Iterator[tuple[Engine, Any]]:
    """The model as released, by an engine with a real offload server; with another threshold where one is given."""
    digest, _ = maker.releasing.prepare(maker.model, LINK, options)
    maker.releasing.publish(maker.model, digest, options)
    folder, root = maker.folder / "offload", maker.repository.root_bytes
    stored = open_release(folder, digest, root)
    release = load_release(stored, CLASS, in_process(lambda plan: DispatchingRuntime(threads=1)))
    if threshold is not None:
        assert release.plan.cascade is not None
        other = msgspec.structs.replace(release.plan.cascade, threshold=threshold, audit_share=0.0)
        release.plan = msgspec.structs.replace(release.plan, cascade=other)
    server = OffloadServer(folder, root)
    server.start()
    engine = Engine(CLASS, OffloadClient(f"http://127.0.0.1:{server.port}"))
    engine.serve("small", release)
    engine.start()
    try:
        yield engine, server
    finally:
        engine.stop()
        server.stop()


def test_the_release_has_one_output_and_a_boundary_at_the_exit(maker: ReleaseMaker) -> None:
    """The exit is computed by slices of its own, by every row, on the device; golden answers verify it too."""
    digest, manifest = maker.releasing.prepare(maker.model, LINK, PlanOptions(cascade=ASKED))
    assert [spec.name for spec in manifest.outputs] == ["probabilities"]
    before = manifest.slices_for("early")
    assert {layer for name in before for layer in manifest.slice(name).layers} == set(EXIT_LAYERS)
    plan = manifest.plans[CLASS]
    assert all(set(before) <= set(row.device) and "early" not in row.receives for row in plan.rows)
    cascade = plan.cascade
    assert cascade is not None and (cascade.exit_output, cascade.answer) == ("early", "class:probabilities")
    assert cascade.changed.samples == COUNT
    maker.releasing.publish(maker.model, digest, PlanOptions(cascade=ASKED))
    assert maker.releasing.prepare(maker.model, LINK, PlanOptions(cascade=ASKED))[0] == digest
    stored = open_release(maker.folder / "offload", digest, maker.repository.root_bytes)
    loaded = load_release(stored, CLASS, in_process(lambda plan: DispatchingRuntime(threads=1)))
    for golden in manifest.golden:
        assert set(check_golden(loaded, golden, maker.registry.blobs.get)) == {"early", "probabilities"}
    with pytest.raises(UsageError, match="not by a recut"):
        maker.releasing.prepare(maker.model, LINK, PlanOptions(cascade=ASKED), recut=True)


@pytest.mark.parametrize("partition", ["auto", "device", "relu + early-softmax"])
def test_every_answer_is_the_exits_or_the_whole_models(maker: ReleaseMaker, partition: str) -> None:
    """Bit for bit: by a cut over a real offload server, on the device, and when that server is gone."""
    expected = whole(maker)
    scores = sorted(float(np.sort(one["early"].ravel())[-2:] @ [-1.0, 1.0]) for one in expected)
    options = PlanOptions(partition=partition, cascade=ASKED)
    with served(maker, options, threshold=scores[COUNT // 2]) as (engine, server):
        reports = []
        for number, (image, want) in enumerate(zip(images(COUNT), expected, strict=True)):
            if number == COUNT * 3 // 4:
                server.stop()
            answer = engine.infer("small", {"image": image}, deadline_s=LONG_S)
            given = want["probabilities" if answer.report.escalated else "early"]
            assert list(answer.outputs) == ["probabilities"] and not answer.report.unsure
            assert answer.outputs["probabilities"].tobytes() == given.tobytes(), (partition, number)
            reports.append(answer.report)
        assert sum(report.escalated for report in reports) == COUNT // 2
        assert {report.row for report in reports if not report.escalated} == {EXIT}
        sent = [report.up_bytes > 0 for report in reports if report.escalated]
        if partition == "device":
            assert not any(sent)
        if partition.startswith("relu"):
            assert any(sent)


def test_answers_are_compared_once_and_without_labels(maker: ReleaseMaker) -> None:
    """They are stored until the model has more samples."""
    expected = whole(maker)
    answers = maker.planning.exit_answers(maker.model, "early")
    assert answers.variants["exit"].labels == tuple(int(one["early"].argmax()) for one in expected)
    assert answers.variants["whole"].labels == answers.truth
    assert answers.truth == tuple(int(one["probabilities"].argmax()) for one in expected)
    described = maker.planning.describe(maker.model, CLASS, "wifi", PlanOptions(cascade=ASKED))
    assert described["exit"]["cascade"]["changed"]["samples"] == COUNT
    maker.registry.add_samples(maker.model, tensors=[npz(image=image) for image in images(2, seed=9)])
    assert maker.planning.exit_answers(maker.model, "early").samples == COUNT + 2


def test_what_cannot_be_an_exit_is_refused(tmp_path: Path) -> None:
    """With what to do."""
    for name, changes, told in (
        ("classes", {"early_classes": 4}, "early has 4 classes of FP32 and probabilities 5"),
        ("softmax", {"has_softmax": False}, "gives probabilities and the other one does not"),
        ("outputs", {"further": True}, "beside it the model has 2: probabilities, p2"),
    ):
        made = ReleaseMaker(tmp_path / name, exit_model(**changes))  # type: ignore[arg-type]
        made.registry.add_samples(made.model, tensors=[npz(image=image) for image in images(4)])
        with pytest.raises(UsageError, match=told):
            made.planning.exit_answers(made.model, "early")


def test_what_cannot_be_planned_is_refused(maker: ReleaseMaker) -> None:
    """A cascade of no exit, an Edge TPU, and too few samples, with how many it takes."""
    asked = CascadeRequest(changed=0.02, exit_output="early")
    with pytest.raises(InfeasibleLimits, match=r"24 samples are too few .*at least 114"):
        maker.releasing.prepare(maker.model, LINK, PlanOptions(cascade=asked))
    with pytest.raises(UsageError, match="or of a model with an output of its first layers"):
        maker.releasing.prepare(maker.model, LINK, PlanOptions(cascade=CascadeRequest(changed=0.5)))
    with pytest.raises(UsageError, match="compiled as one"):
        maker.planning.plan(maker.model, "coral-usb-rpi4", LINK[CLASS], PlanOptions(cascade=ASKED))
    with pytest.raises(UsageError, match="no output 'erly' to exit by"):
        maker.planning.exit_answers(maker.model, "erly")


def test_the_products_own_commands_push_plan_deploy_and_ask(cloud: Cloud, tmp_path: Path) -> None:
    """With real processes, in whose worker the slices run: each answer is the exit's or the whole model's."""
    raw, samples = exit_model(), tmp_path / "samples"
    (tmp_path / "exits.onnx").write_bytes(raw)
    samples.mkdir()
    for number, image in enumerate(images(COUNT)):
        (samples / f"{number:02}.npz").write_bytes(npz(image=image))
    cloud.edgectl("model", "push", str(tmp_path / "exits.onnx"), "--name", "exits")
    cloud.edgectl("profile", "exits", "--samples", str(samples))
    asked = ("exits", "--cascade", "--exit", "early", "--changed", "50%", "--certainty", "80%")
    planned = cloud.json("plan", *asked, "--device", "raspberrypi4")["exit"]
    assert planned["part"]["layers"] == len(EXIT_LAYERS) and planned["gain_text"]
    device = cloud.agent("pi4-exits")
    deployed = cloud.json("deploy", *asked, "--to", "pi4-exits", "--wait", "60")
    signed = deployed["plans"][0]["cascade"]
    assert (signed["exit_output"], signed["threshold"]) == ("early", planned["cascade"]["threshold"])
    inputs: list[Tensors] = [{"image": image} for image in images(COUNT)]
    for given, want in zip(inputs, run_whole(prepare_model(raw), inputs), strict=True):
        answer = device.client.infer("exits", given, deadline_s=LONG_S)
        expected = want["probabilities" if answer.report.escalated else "early"]
        assert answer.report.score is not None
        assert answer.outputs["probabilities"].tobytes() == expected.tobytes()
