"""Calibration: a designed grid, timed in a child process, fitted, and written as a profile that predicts its points."""

from __future__ import annotations

import math
import random

import msgspec
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner

from edgesplit.device_profile import DeviceProfile, load_profile, parse_profile
from edgesplit.errors import UsageError
from edgesplit.runtime.options import EngineOptions
from edgesplit_cli.main import cli
from edgesplit_partitioner.calibration import calibrate, child, operator_grid
from edgesplit_partitioner.calibration.calibrate import profile_text
from edgesplit_partitioner.calibration.child import BatchTimes, CalibrationJob
from edgesplit_partitioner.calibration.design import Engine, design_of, has_spinning_pool
from edgesplit_partitioner.calibration.fits import (
    CalibrationTimes,
    NetworkTime,
    datatype_factors,
    fit_jobs,
    fit_networks,
    fit_points,
)
from edgesplit_partitioner.calibration.networks import calibration_networks
from edgesplit_partitioner.costs.predict import Predictor, predict_intervals
from edgesplit_partitioner.ir.graph import Layer, LayerGraph, OperatorWork, Tensor
from edgesplit_partitioner.sandbox.child_process import run_child
from edgesplit_partitioner.sandbox.limits import measurement_limits
from support.tflite_models import prepared

GRID = operator_grid.grid()
SLOWER = 1.2
"""Whole networks of the made-up machine take so much longer than their operators."""


def made_up_s(work: OperatorWork) -> float:
    """Seconds of an operator on a machine that follows a roofline."""
    return 3e-7 + work.flops / 4e10 + work.bytes_moved / 1.5e10


@pytest.fixture(scope="module")
def times() -> CalibrationTimes:
    """Two visits to everything on the made-up machine, the second one disturbed."""
    rng = random.Random(5)
    found = CalibrationTimes()
    for factor in (1.0, 1.0 + rng.random()):
        seconds = {place: factor * made_up_s(operator_grid.point_work(point)) for place, point in enumerate(GRID[:600])}
        found.add(BatchTimes(batches=2, whole=False, empty_s=4e-6, tensor_s=5e-7, seconds=seconds))
        whole = {}
        for place, raw in enumerate(calibration_networks()):
            works = operator_grid.model_work(onnx.load_model_from_string(raw))
            whole[place] = factor * (4e-6 + SLOWER * sum(map(made_up_s, works)))
        found.add(BatchTimes(batches=2, whole=True, empty_s=4e-6, tensor_s=5e-7, seconds=whole))
    return found


@pytest.fixture(scope="module")
def profile(times: CalibrationTimes) -> DeviceProfile:
    """The made-up machine's."""
    fit = fit_points(times, machine="made up", runtime="onnxruntime", today="2026-11-21")
    return calibrate.to_profile("mine", fit, times, load_profile("generic-x86"), 1)


def test_the_calibration_grid_is_deterministic_and_balanced() -> None:
    """Points are designed, not drawn; the first fifth holds every family that the whole holds but the smallest."""
    assert operator_grid.grid() == GRID
    families = {operator_grid.point_work(point).family for point in GRID}
    assert families - {operator_grid.point_work(point).family for point in GRID[: len(GRID) // 5]} <= {"free"}
    assert "" not in families


def test_every_kind_of_grid_point_is_a_runnable_model() -> None:
    """One point per operator type, with two copies, loads and runs without optimisation."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    kinds = {(point.operator, operator_grid.point_work(point).family): point for point in GRID}
    for (operator, _), point in kinds.items():
        raw = operator_grid.build(point, 2)
        session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        assert sum(node.op_type == operator for node in onnx.load_model_from_string(raw).graph.node) == 2
        assert len(session.get_outputs()) == 1


def test_a_calibrated_profile_predicts_held_back_operators(profile: DeviceProfile) -> None:
    """Operators of the grid that were held back are predicted within a third, most within a tenth."""
    held = [operator_grid.point_work(point) for point in GRID[600:]]
    graph = _graph(held)
    predicted = predict_intervals(graph, profile)
    errors = sorted(
        abs(predicted[str(place)].seconds / (SLOWER * made_up_s(work)) - 1)
        for place, work in enumerate(held)
        if work.family
    )

    assert errors[len(errors) // 2] < 0.1 and errors[int(0.95 * len(errors))] < 0.35


def test_whole_networks_correct_the_sum_over_operators(profile: DeviceProfile) -> None:
    """The factor between a whole network and the sum of its operators is found in spite of a second, disturbed
    measurement."""
    assert profile.fit is not None
    assert profile.fit.correction == pytest.approx(SLOWER, rel=0.05)
    assert profile.fit.run_s == pytest.approx(4e-6)


def test_the_cost_of_uncached_weights_is_found() -> None:
    """Networks beyond 8 MiB cost a nanosecond a byte more: size and price are found."""
    size = [2.0**power for power in range(16, 27)]
    networks = [NetworkTime(1e-5, 1.1e-3 + (1e-9 * one if one > 8 << 20 else 0.0), 1e-3, one, 1.0) for one in size]
    found = fit_networks(networks)

    assert found.correction == pytest.approx(1.1) and found.cached_bytes == 8 << 20
    assert found.uncached_s_per_byte == pytest.approx(1e-9)
    assert max(map(abs, found.residuals)) < 1e-6


def test_a_datatype_whose_networks_are_slower_is_priced_so() -> None:
    """Kernels of one datatype that take 1.3 times as long in networks as alone; empty runs of tiny ones say nothing."""
    one_s = 1e-3
    networks = [NetworkTime(1e-5, one_s, one_s, 1e5, 1.0, "fp32") for _ in range(8)]
    networks += [NetworkTime(1e-5, 1.3 * one_s, one_s, 1e5, 1.0, "int8") for _ in range(5)]
    networks += [NetworkTime(1e-5, 1e-6, 5e-6, 1e5, 1.0, "int8") for _ in range(6)]
    factors = datatype_factors(networks)

    assert factors["int8"] / factors["fp32"] == pytest.approx(1.3)


@pytest.mark.parametrize(("engine", "first_s"), [("onnxruntime", 1.2e-6), ("litert", 0.5e-6)])
def test_operators_on_threads_that_spin_are_found_from_networks(engine: Engine, first_s: float) -> None:
    """A machine on which two threads halve convolutions and products after 0.5 or 1.2 us, and leave the others as they
    are: an operator's price on them is that, though it was timed on one thread only."""
    optimise = "exact" if engine == "litert" else "fast"
    one = EngineOptions(optimise=optimise)
    two = msgspec.structs.replace(one, threads=2, spinning=engine == "onnxruntime")
    design = design_of(engine)
    works = {index: design.point_work(index) for index in range(design.point_count) if index % 2}

    def on_two_s(work: OperatorWork) -> float:
        part = 0.5 if work.operator in ("conv", "depthwise", "gemm") else 1.0
        return first_s + part * made_up_s(work) if work.flops or work.bytes_moved else 0.0

    def on_one_s(work: OperatorWork) -> float:
        return made_up_s(work) if work.flops or work.bytes_moved else 1e-9

    times = []
    for seconds in (on_one_s, on_two_s):
        found = CalibrationTimes()
        whole = {
            index: 4e-6 + sum(map(seconds, design.network_works(index, fused=optimise == "fast")))
            for index in range(design.network_count)
        }
        found.add(BatchTimes(batches=2, whole=True, empty_s=4e-6, tensor_s=5e-7, seconds=whole))
        if seconds is on_one_s:
            points = {index: on_one_s(work) for index, work in works.items()}
            found.add(BatchTimes(batches=2, whole=False, empty_s=4e-6, tensor_s=5e-7, seconds=points))
        times.append(found)
    fits = fit_jobs(times, [(engine, one), (engine, two)], machine="made up", today="2026-11-23")
    profile = calibrate.to_profile("mine", fits[1], times[0], load_profile("generic-x86"), 1)
    convolutions = [work for index, work in works.items() if work.operator == "conv" and made_up_s(work) > 3e-6]
    errors = sorted(
        abs(math.log(Predictor(profile, "tflite" if engine == "litert" else "onnx").layer_s(layer) / on_two_s(work)))
        for work, layer in zip(convolutions, _graph(convolutions).layers, strict=True)
    )

    assert has_spinning_pool(engine, two) and not has_spinning_pool(engine, one)
    assert errors[len(errors) // 2] < 0.1 and errors[int(0.9 * len(errors))] < 0.3


def test_quantised_operators_of_the_grid_ran_on_other_kernels_than_those_of_models() -> None:
    """XNNPACK left depthwise uint8 convolutions to kernels 2.6 times slower, for a dimension named beside one scale."""
    design = design_of("litert")
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    chosen = {
        (work.operator, work.family.partition("/")[2]): index
        for index in range(design.point_count)
        if (work := design.point_work(index)).operator in ("conv", "depthwise", "gemm") and work.family
    }
    assert len(chosen) == 9
    for index in chosen.values():
        loaded = interpreter.Interpreter(model_content=design.point_model(index, 2), num_threads=1)
        loaded.allocate_tensors()
        assert "DELEGATE" in {operator["op_name"] for operator in loaded._get_ops_details()}


@pytest.mark.parametrize("as_json", [False, True])
def test_a_profile_round_trips_through_its_file(profile: DeviceProfile, as_json: bool) -> None:
    """As YAML and as JSON, number by number."""
    assert parse_profile(profile_text(profile, as_json), "mine") == profile


@pytest.mark.parametrize("as_json", [False, True])
def test_a_calibration_of_the_whole_grid_was_refused_as_too_many_lists(as_json: bool) -> None:
    """ "more than 1000 lists and tables": a real calibration has 1,299, one for each measured point among them."""
    rng = random.Random(7)
    found = CalibrationTimes()
    seconds = {place: made_up_s(operator_grid.point_work(point)) for place, point in enumerate(GRID)}
    seconds = {place: one * rng.uniform(0.8, 1.25) for place, one in seconds.items()}
    found.add(BatchTimes(batches=2, whole=False, empty_s=4e-6, tensor_s=5e-7, seconds=seconds))
    whole = {
        place: 4e-6 + sum(map(made_up_s, operator_grid.model_work(onnx.load_model_from_string(raw))))
        for place, raw in enumerate(calibration_networks())
    }
    found.add(BatchTimes(batches=2, whole=True, empty_s=4e-6, tensor_s=5e-7, seconds=whole))
    fit = fit_points(found, machine="made up", runtime="onnxruntime", today="2026-11-22")
    calibrated = calibrate.to_profile("here", fit, found, load_profile("generic-x86"), 1)

    text = profile_text(calibrated, as_json)

    assert text.count("[") > 1_000 or as_json
    assert parse_profile(text, "here.yaml") == calibrated


def test_every_prediction_lies_inside_its_interval(profile: DeviceProfile) -> None:
    """Of a fit as of rates; and a slice of many operators is known better than one operator."""
    graph = _graph([operator_grid.point_work(point) for point in GRID[::40]])
    for device_profile in (profile, load_profile("raspberrypi4"), load_profile("coral-usb-rpi4")):
        for prediction in predict_intervals(graph, device_profile).values():
            assert 0 <= prediction.low_s <= prediction.seconds <= prediction.high_s
    predictor = Predictor(profile)
    together = predictor.predict_sum(graph.layers)
    alone = [predictor.predict_sum((layer,)) for layer in graph.layers]
    assert together.high_s / together.seconds < max(item.high_s / max(item.seconds, 1e-12) for item in alone)


def test_an_operator_without_a_family_is_predicted_by_its_class(profile: DeviceProfile) -> None:
    """TFLite's operators and unknown ones are predicted from their operations and bytes, in proportion."""
    small, large = OperatorWork("conv", 1e6, 1e5), OperatorWork("conv", 1e8, 1e7)
    predicted = predict_intervals(_graph([small, large]), profile)

    assert 0 < predicted["0"].seconds < predicted["1"].seconds
    assert predicted["1"].seconds == pytest.approx(SLOWER * made_up_s(large), rel=1.0)


@pytest.mark.parametrize("name", ["mine", "coral-usb-rpi4"])
def test_plans_left_out_what_a_run_costs(profile: DeviceProfile, name: str) -> None:
    """4 ms of USB for each run on an Edge TPU: all layers together take the sum of their operators and one run."""
    chosen = profile if name == "mine" else load_profile(name)
    graph = _graph([operator_grid.point_work(point) for point in GRID[::80]])
    predicted = predict_intervals(graph, chosen)

    assert chosen.fit is not None
    total_s = Predictor(chosen).predict_sum(graph.layers).seconds + chosen.fit.run_s
    assert sum(prediction.seconds for prediction in predicted.values()) == pytest.approx(total_s)
    assert predicted["0"].seconds == pytest.approx(
        Predictor(chosen).predict_sum(graph.layers[:1]).seconds + chosen.fit.run_s
    )


def test_threads_beyond_the_cores_fought_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are refused before anything is measured."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)

    with pytest.raises(UsageError, match="5 threads on 4 cores"):
        calibrate.measure_points(1.0, EngineOptions(threads=5))


def test_a_calibration_measures_what_agents_choose_among() -> None:
    """Slices as they were cut; fused on one thread and on all; spinning; and LiteRT, which fuses in the file."""
    assert [str(setup) for _, setup in calibrate.measured_jobs(1, 4)] == [
        "1 thread, exact", "1 thread, fast, merged", "4 threads, fast, merged", "4 threads, spinning, fast, merged",
        "1 thread, exact", "4 threads, exact",
    ]  # fmt: skip
    assert [engine for engine, _ in calibrate.measured_jobs(1, 1)] == ["onnxruntime", "onnxruntime", "litert"]


def test_a_profile_with_tuned_fits_is_read_as_it_was_written(times: CalibrationTimes) -> None:
    """As YAML and as JSON; each fit names its options."""
    setups = [EngineOptions(), EngineOptions(threads=2, optimise="fast", merge=True)]
    fits = [
        fit_points(times, machine="made up", runtime="onnxruntime", today="2026-11-21", setup=setup) for setup in setups
    ]
    made = calibrate.to_profile("mine", fits[0], times, load_profile("generic-x86"), 1, tuple(fits[1:]))

    for as_json in (False, True):
        assert parse_profile(profile_text(made, as_json), "mine") == made
    assert made.setup == setups[0] and made.tuned[0].setup == setups[1]


@pytest.mark.parametrize(
    ("engine", "setup"),
    [
        ("onnxruntime", EngineOptions(threads=1, optimise="fast", merge=True)),
        ("onnxruntime", EngineOptions(threads=1, optimise="fast", merge=True, spinning=True)),
        ("litert", EngineOptions(threads=1)),
        ("litert", EngineOptions(threads=2)),
    ],
)
def test_every_engine_and_option_is_measured(engine: Engine, setup: EngineOptions) -> None:
    """Networks and operators, by real runs; with threads that spin, as LiteRT's always do, networks alone."""
    job = CalibrationJob(seconds=0.01, visits=1, batch=20, most_points=40, setup=setup, engine=engine)
    lines: list[bytes] = []
    limits = measurement_limits(0, None, 300.0)
    run_child(calibrate.CHILD, limits=limits, limit_s=300.0, job=msgspec.json.encode(job), on_line=lines.append)
    measured = [msgspec.json.decode(line, type=BatchTimes) for line in lines]
    design = design_of(engine)

    assert {index for batch in measured if batch.whole for index in batch.seconds} == set(range(design.network_count))
    assert any(not batch.whole for batch in measured) is not has_spinning_pool(engine, setup)
    assert all(seconds > 0 for batch in measured for seconds in batch.seconds.values())


def test_fused_operators_were_charged_with_conversions_of_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a network's ends convert: an engine that takes 5 ms to convert and 1 ms for each convolution is found to
    take 1 ms, however few copies are timed."""

    class MadeUpSession:
        def __init__(self, raw: bytes, setup: EngineOptions) -> None:
            graph = onnx.load_model_from_string(raw).graph
            self.seconds = 0.001 * len(graph.node) + 0.005 * bool(graph.initializer) * (setup.optimise == "fast")

        def __call__(self) -> float:
            return self.seconds

    monkeypatch.setattr(child, "_TimedSession", MadeUpSession)
    job = CalibrationJob(seconds=0.01, setup=EngineOptions(optimise="fast", merge=True))
    design = design_of("onnxruntime")
    convolutions = [index for index in range(100) if design.point_work(index).operator in ("conv", "depthwise")]
    few_copies = [index for index in convolutions if design.copies(index) < 4]
    found = CalibrationTimes()
    found.add(child._measure_batch(few_copies, False, job, 1))

    assert few_copies and found.operator_s() == pytest.approx(dict.fromkeys(few_copies, 0.001))


def test_a_difference_with_a_disturbed_smaller_term_does_not_count() -> None:
    """The least of each term counts over all visits, not the least difference; what noise leaves is above 0."""
    found = CalibrationTimes()
    for around_s in (0.002, 0.0029):
        around = {0: around_s, 1: 0.004}
        batch = BatchTimes(
            batches=1, whole=False, empty_s=0.0, tensor_s=0.0, seconds={0: 0.003, 1: 0.003}, around=around
        )
        found.add(batch)

    assert found.operator_s()[0] == pytest.approx(0.001) and 0 < found.operator_s()[1] < 0.0002


def test_litert_operators_have_families_by_datatype() -> None:
    """Floats, int8 and uint8 run on different kernels; the same families are found in models."""
    design = design_of("litert")
    families = {design.point_work(index).family for index in range(design.point_count)} - {""}
    kinds = {family.partition("/")[2] for family in families}

    assert {family.partition("/")[0] for family in families} >= {"conv1", "convk", "depthwise", "gemm", "gemv"}
    assert kinds == {"fp32", "int8", "uint8"}
    found = {
        work.family for name in ("chain", "quantised") for layer in prepared(name).graph.layers for work in layer.work
    }
    assert {"convk/fp32", "conv1/int8", "gemv/fp32"} <= found


def test_a_slow_machine_was_fitted_by_its_widest_networks_alone() -> None:
    """However little time there is, the child measures every network, small ones among them, and some operators."""
    job = CalibrationJob(seconds=0.01, visits=1, batch=20, most_points=100)
    lines: list[bytes] = []
    limits = measurement_limits(0, None, 300.0)
    run_child(calibrate.CHILD, limits=limits, limit_s=300.0, job=msgspec.json.encode(job), on_line=lines.append)
    measured = [msgspec.json.decode(line, type=BatchTimes) for line in lines]
    networks, points = ({i for times in measured if times.whole == whole for i in times.seconds} for whole in (1, 0))

    assert networks == set(range(len(calibration_networks())))
    assert points and points <= set(range(100))
    assert all(seconds > 0 for times in measured for seconds in times.seconds.values())


def test_missing_networks_are_reported() -> None:
    """Without networks there is nothing to check the sum with."""
    few = CalibrationTimes()
    few.add(BatchTimes(batches=1, whole=False, empty_s=1e-6, tensor_s=0.0, seconds={0: 1e-3, 1: 1e-3}))
    with pytest.raises(UsageError, match="more minutes"):
        fit_points(few, machine="m", runtime="r", today="d")
    with pytest.raises(UsageError, match="minute"):
        calibrate.measure_points(0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--name", "raspberrypi4"], "profile of your own"),
        (["--name", "My Board"], "profile of your own"),
        (["--out", "profile.txt"], "ends with .yaml or .json"),
        (["--out", "nowhere/profile.yaml"], "no folder"),
        (["--base", "toaster"], "no device profile"),
        (["--minutes", "0"], "minute"),
        (["--minutes", "nan"], "minute"),
    ],
)
def test_invalid_arguments_fail_before_measuring(arguments: list[str], said: str) -> None:
    """Names, files and minutes are checked first."""
    result = CliRunner().invoke(cli, ["calibrate", *arguments])

    assert said in (str(result.exception) if isinstance(result.exception, UsageError) else result.output)
    assert result.exit_code


def _graph(works: list[OperatorWork]) -> LayerGraph:
    layers = tuple(Layer(str(place), (place,), ("x",), ("y",), (), 0, (work,)) for place, work in enumerate(works))
    return LayerGraph(layers, {name: Tensor(name, "FP32", (1,), 4) for name in ("x", "y")}, ("x",), ("y",))
