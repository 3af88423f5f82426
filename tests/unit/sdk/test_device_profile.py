"""Device profiles: every figure present, sourced and consistent; errors name what is wrong."""

from __future__ import annotations

from copy import deepcopy
from importlib import resources
from pathlib import Path

import pytest
import yaml

from edgesplit.device_profile import NAME, PROFILE_PACKAGE, list_profiles, load_profile, parse_profile
from edgesplit.errors import UsageError
from edgesplit.runtime.options import EngineOptions

PROMISED = ["generic-x86", "jetson-nano", "raspberrypi3b+", "raspberrypi4"]
PROMISED += ["raspberrypi5", "jetson-orin-nano", "coral-usb-rpi4"]


def text_with(**changes: object) -> str:
    """The profile of a Raspberry Pi 4 with some fields changed, as YAML."""
    fields = yaml.safe_load(resources.files(PROFILE_PACKAGE).joinpath("raspberrypi4.yaml").read_text("utf-8"))
    fields.update(changes)
    return yaml.safe_dump({name: value for name, value in fields.items() if value is not None})


def test_expected_profiles_ship() -> None:
    """The device classes of the demo and of issue 3, by the names that users type."""
    assert set(PROMISED) <= set(list_profiles())


@pytest.mark.parametrize("name", list_profiles())
def test_every_shipped_profile_is_complete(name: str) -> None:
    """A shipped profile loads, carries its file's name, and gives a source for every figure."""
    profile = load_profile(name)

    assert profile.name == name
    assert NAME.fullmatch(name) and "." not in name
    assert len(profile.figure_rows()) in (13, 16) and all(all(row) for row in profile.figure_rows())
    assert all(figure.value > 0 and len(figure.source) > 20 for figure in profile.named_figures().values())


@pytest.mark.parametrize("name", list_profiles())
def test_assumed_derived_and_published_figures_give_their_source(name: str) -> None:
    """An assumption has its reasoning; a derived figure names what it was derived from; a published one names a
    document and its year."""
    for figure_name, figure in load_profile(name).named_figures().items():
        if figure.basis == "published":
            assert any(str(year) in figure.source for year in range(2012, 2100)), figure_name
        if figure.basis == "derived":
            assert any(sign in figure.source for sign in ("/", "*", "mean", "_per_s")), figure_name


@pytest.mark.parametrize("name", [name for name in list_profiles() if name != "generic-x86"])
def test_scaled_figures_follow_their_formulas(name: str) -> None:
    """What is scaled from generic-x86 moves with it: change one and this test says which others to recompute."""
    profile, host = load_profile(name), load_profile("generic-x86")
    slowdown = host.rates.memory_bytes_per_s.value / profile.rates.memory_bytes_per_s.value

    assert profile.zstd_slowdown.value == pytest.approx(slowdown, rel=0.01)
    assert profile.rates.jpeg_pixels_per_s.value == pytest.approx(
        host.rates.jpeg_pixels_per_s.value / profile.zstd_slowdown.value, rel=0.01
    )


@pytest.mark.parametrize("name", [name for name in list_profiles() if name not in ("generic-x86", "coral-usb-rpi4")])
def test_boards_have_rates_for_integers(name: str) -> None:
    """int8 is no fixed factor faster: each board has rates of its own, within what its processor could gain."""
    rates = load_profile(name).rates
    assert rates.dense_conv_int8_flops_per_s and rates.depthwise_int8_flops_per_s and rates.gemm_int8_flops_per_s
    assert 1.0 < rates.dense_conv_int8_flops_per_s.value / rates.dense_conv_flops_per_s.value < 4.0
    assert 0.8 < rates.depthwise_int8_flops_per_s.value / rates.depthwise_flops_per_s.value < 4.0


def test_a_profile_without_rates_for_integers_is_read() -> None:
    """Profiles written before there were such rates stay valid, and none is made up."""
    fields = yaml.safe_load(text_with())["rates"]
    older = {figure: value for figure, value in fields.items() if "int8" not in figure}
    profile = parse_profile(text_with(rates=older), "older.yaml")
    assert profile.rates.dense_conv_int8_flops_per_s is None
    assert len(profile.figure_rows()) == 13


def test_depthwise_has_another_rate_than_dense_convolution() -> None:
    """One rate for both would be wrong by ten times: no profile has that."""
    for name in list_profiles():
        rates = load_profile(name).rates
        assert rates.depthwise_flops_per_s.value < rates.dense_conv_flops_per_s.value / 5


@pytest.mark.parametrize(("typed", "meant"), [("rasberypi4", "raspberrypi4"), ("Jetson_Nano", "jetson-nano")])
def test_misspelt_name_suggests_near_names(typed: str, meant: str) -> None:
    """The error lists the profiles with similar names."""
    with pytest.raises(UsageError, match=f"did you mean .*{meant}"):
        load_profile(typed)


def test_unknown_name_lists_all_names() -> None:
    """And says that a file works too."""
    with pytest.raises(UsageError, match=r"generic-x86, jetson-nano.*\.yaml"):
        load_profile("toaster")


def test_own_file_is_a_profile(tmp_path: Path) -> None:
    """A path to a YAML file is read as a profile, whatever its name."""
    file = tmp_path / "mine.yaml"
    file.write_text(text_with(name="my-board"))

    assert load_profile(str(file)).name == "my-board"
    assert load_profile(file) == load_profile(str(file))


def test_numbers_may_have_a_short_exponent() -> None:
    """24e9, which YAML 1.1 takes for text, is a number here."""
    figure = "{value: 3e-5, basis: assumption, source: because it is an example}"
    profile = parse_profile(text_with(operator_overhead_s=None) + f"operator_overhead_s: {figure}\n", "mine")

    assert profile.operator_overhead_s.value == 3e-5


FIGURE = {"value": 1.0, "basis": "assumption", "source": "because it is an example"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"idle_watts": None}, "idle_watts"),
        ({"idle_watts": {**FIGURE, "value": 0}}, r"idle_watts\.value"),
        ({"idle_watts": {**FIGURE, "value": -1}}, r"idle_watts\.value"),
        ({"idle_watts": {**FIGURE, "value": float("inf")}}, "not a finite number"),
        ({"idle_watts": {"value": 1, "basis": "assumption"}}, "source"),
        ({"idle_watts": {**FIGURE, "source": "mine"}}, r"idle_watts\.source"),
        ({"idle_watts": {**FIGURE, "source": " " * 20}}, "idle_watts has no source"),
        ({"idle_watts": {**FIGURE, "basis": "guess"}}, r"idle_watts\.basis"),
        ({"idle_watts": {**FIGURE, "value": 99.0}}, "active_watts is below idle_watts"),
        ({"name": "my.board"}, "not a name"),
        ({"name": "../board"}, "not a name"),
        ({"threads": 0}, "threads"),
        ({"error": {**FIGURE, "low": 0.5, "high": 0.9, "coverage": 0.9}}, "error"),
        ({"fit": {"operators": []}}, "fit"),
        ({"turbo": True}, "turbo"),
        ({"host": "toaster"}, "host 'toaster'"),
        ({"host": "raspberrypi4"}, "host 'raspberrypi4'"),
        ({"format": "edgesplit.device-profile/9"}, "format"),
    ],
)
def test_error_names_the_wrong_field(changes: dict[str, object], said: str) -> None:
    """A figure that is missing, unsourced or out of range, and an unknown field, are refused by name."""
    with pytest.raises(UsageError, match=said):
        parse_profile(text_with(**changes), "mine.yaml")


FIT = {
    "runtime": "onnxruntime",
    "machine": "mine",
    "taken": "2026-11-21",
    "run_s": 1e-6,
    "tensor_s": 0.0,
    "correction": 1.0,
    "cached_bytes": 1e6,
    "uncached_s_per_byte": 0.0,
    "whole": {"low": 0.9, "high": 1.1, "coverage": 0.9, "basis": "measured", "source": "because it is an example"},
}
LINE = {
    "family": "Relu",
    "centre": [5.0],
    "scale": [1.0],
    "lowest": [1.0],
    "highest": [9.0],
    "trend": [-9.0, 1.0],
    "points": [[3.0]],
    "bends": [0.1],
    "low": 0.9,
    "high": 1.1,
}


def test_profiles_of_earlier_versions_stay_readable() -> None:
    """They name no engine options: slices ran as they were cut, on the profile's threads."""
    profile = parse_profile(text_with(threads=2, fit={**FIT, "operators": [LINE]}), "mine")

    assert profile.priced_setup == EngineOptions(threads=2) and profile.tuned == ()
    assert parse_profile(text_with(threads=3), "mine").priced_setup.optimise in ("exact", "fast")


def test_a_profile_names_the_options_that_it_was_measured_with() -> None:
    """Of the rates, of the fit, and of every tuned fit, which is checked like the first."""
    fast = {"threads": 2, "optimise": "fast", "merge": True}
    fits: list[dict[str, object]] = [deepcopy({**FIT, "operators": [LINE], "setup": setup}) for setup in ({}, fast)]
    profile = parse_profile(text_with(setup=dict(fast), fit=fits[0], tuned=fits[1:]), "mine")

    assert profile.priced_setup == EngineOptions()
    assert profile.tuned[0].setup == EngineOptions(threads=2, optimise="fast", merge=True)
    with pytest.raises(UsageError, match="the fit of 'Relu' is inconsistent"):
        parse_profile(text_with(tuned=[{**FIT, "operators": [{**LINE, "bends": []}]}]), "mine")
    with pytest.raises(UsageError, match="the fit has impossible numbers"):
        parse_profile(text_with(tuned=[{**FIT, "correction": float("inf"), "operators": []}]), "mine")


def test_calibrated_profile_has_its_fit() -> None:
    """Plain numbers, checked for consistency, never executed."""
    profile = parse_profile(text_with(fit={**FIT, "operators": [LINE]}), "mine")

    assert profile.fit is not None and profile.fit.operators[0].points == ((3.0,),)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trend": [1.0]}, "is inconsistent"),
        ({"points": [[1.0, 2.0]]}, "is inconsistent"),
        ({"bends": []}, "is inconsistent"),
        ({"scale": [0.0]}, "impossible numbers"),
        ({"trend": [float("nan"), 1.0]}, "impossible numbers"),
        ({"width": 0.0}, "impossible numbers"),
        ({"low": -1.0}, "low"),
        ({"low": 2.0, "high": 0.1}, "impossible numbers"),
        ({"points": [[0.0]]}, "impossible numbers"),
        ({"lowest": [-1.0]}, "impossible numbers"),
        ({"highest": [0.0]}, "impossible numbers"),
        ({"code": "import os"}, "code"),
    ],
)
def test_invalid_fit_is_refused(changes: dict[str, object], said: str) -> None:
    """Columns of one length, a bend per point, finite numbers, and nothing else."""
    with pytest.raises(UsageError, match=said):
        parse_profile(text_with(fit={**FIT, "operators": [{**LINE, **changes}]}), "mine")


BOMB = "a: &a [1, 1, 1, 1]\nb: &b [*a, *a, *a, *a]\nfit: {operators: [*b, *b, *b, *b]}\n"
WRONG_VALUES = ["a: !!int x", "a: !!timestamp x", "a: 2026-13-45", "a: 0x_", "a: !!binary x"]


@pytest.mark.parametrize(
    "text", ["", "- 1\n", "{", "!!python/object/apply:os.system ['true']", "a: &a [*a]", BOMB, "[" * 5_000]
)
@pytest.mark.parametrize("tail", ["", "x" * 600_000])
def test_malformed_profile_is_refused(text: str, tail: str) -> None:
    """Other YAML, broken YAML, YAML that would run code, and endless files are refused, never executed."""
    with pytest.raises(UsageError, match="device profile mine"):
        parse_profile(text + tail, "mine")


@pytest.mark.parametrize("text", WRONG_VALUES)
def test_unconstructible_yaml_value_is_refused(text: str) -> None:
    """A date without such a month, a malformed number: PyYAML raises errors of several types, which were a
    traceback."""
    with pytest.raises(UsageError, match="device profile mine"):
        parse_profile(text, "mine")


def test_yaml_aliases_are_refused_by_name() -> None:
    """A few kilobytes of aliases stand for gigabytes; the error says what to write instead."""
    text = text_with().replace("basis: assumption", "basis: &a assumption", 1)

    with pytest.raises(UsageError, match=r"aliases \(\*a\) are not supported"):
        parse_profile(text + "again: *a\n", "mine")


def test_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    """A path to nothing, or to bytes that are no text."""
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(UsageError, match="cannot read"):
        load_profile(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_profile(tmp_path / "binary.yaml")
