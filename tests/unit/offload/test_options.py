"""The offload server's command line: sizes, how many processes and runs by the cores, and what makes no sense."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from edgesplit.errors import UsageError
from edgesplit.runtime.options import EngineOptions
from edgesplit_controller.app.offload_process import offload_command
from edgesplit_controller.settings import Settings
from edgesplit_offload import options as given

ALWAYS = ["--releases", "r", "--root", "root.json"]


def parsed(*words: str) -> argparse.Namespace:
    return given.validate(given.parser().parse_args([*ALWAYS, *words]))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("800MB", 800_000_000),
        ("2GB", 2 * 10**9),
        ("1GiB", 2**30),
        ("1.5g", 1_500_000_000),
        ("64 kib", 65_536),
        ("7", 7),
    ],
)
def test_sizes_are_parsed_with_decimal_and_binary_units(text: str, count: int) -> None:
    """In any case."""
    assert parsed("--memory", text).memory == count


@pytest.mark.parametrize("text", ["", "much", "0", "-1GB", "1XB", "nan", "1e9", "9" * 40])
def test_invalid_sizes_are_refused_with_an_example(text: str) -> None:
    """The message shows a valid size."""
    with pytest.raises(UsageError, match="as in 2GB"):
        parsed(f"--memory={text}")


@pytest.mark.parametrize(
    ("cores", "wanted", "count"), [(1, 0, 1), (2, 0, 1), (3, 0, 3), (4, 0, 4), (8, 0, 4), (64, 0, 16), (4, 8, 8)]
)
def test_number_of_processes_follows_the_cores_by_default(cores: int, wanted: int, count: int) -> None:
    """A few cores have one each, many have one for four."""
    assert given.process_count(wanted, cores) == count


@pytest.mark.parametrize(
    ("cores", "processes", "threads", "runs"), [(4, 3, 1, 2), (4, 1, 1, 4), (4, 1, 4, 1), (2, 3, 1, 1), (64, 3, 2, 11)]
)
def test_threads_per_run_divide_the_cores(cores: int, processes: int, threads: int, runs: int) -> None:
    """Rounded up, one at least."""
    assert given.runs_at_once(processes, threads, cores) == runs


@pytest.mark.parametrize(("stack", "threads", "cores", "may"), [(4, 1, 4, True), (4, 1, 3, False), (4, 4, 8, False)])
def test_batches_use_several_threads_where_there_are_cores(stack: int, threads: int, cores: int, may: bool) -> None:
    """And where that is more than a run takes anyway."""
    assert given.has_cores_for(stack, threads, cores) == may


@pytest.mark.parametrize(
    "words",
    [
        ("--processes", "-1"),
        ("--threads", "0"),
        ("--drain", "-1"),
        ("--hung-after", "nan"),
        ("--concurrent-runs", "-2"),
    ],
)
def test_numbers_out_of_range_are_refused_by_option_name(words: tuple[str, str]) -> None:
    """By the option's name."""
    with pytest.raises(UsageError, match=words[0]):
        parsed(*words)


def test_exact_mode_is_the_default() -> None:
    """`--mode fast` must be given; threads work with either mode."""
    assert given.engine(parsed()).setup == EngineOptions()
    assert given.engine(parsed("--mode", "fast", "--threads", "2")).setup == EngineOptions(threads=2, optimise="fast")


def test_the_controller_passes_the_mode_to_its_offload_server(tmp_path: Path) -> None:
    """`edgectl up --offload-mode fast`; bits stay the default."""
    root = tmp_path / "offload" / "root.json"
    root.parent.mkdir()
    root.write_text("{}")
    for settings, mode in ((Settings(tmp_path), "exact"), (Settings(tmp_path, offload_mode="fast"), "fast")):
        command = offload_command(settings)
        assert command[command.index("--mode") + 1] == mode
        assert given.validate(given.parser().parse_args(command[3:])).mode == mode
