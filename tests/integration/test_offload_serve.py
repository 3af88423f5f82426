"""`edgectl offload serve`: on a machine without a controller, and what it says when it is called wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from edgesplit_cli.main import cli
from support.offload_processes import PATIENCE_S, Serving, Signed, signed_release


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Signed:
    return signed_release(tmp_path_factory.mktemp("release"))


def test_any_folder_of_releases_is_served(signed: Signed) -> None:
    """One line with the address once it listens; ready, asked, and ended by SIGINT with 0."""
    command = "from edgesplit_cli.main import main; main()"
    words = ["offload", "serve", "--releases", signed.releases, "--root", signed.root, "--port", 0, "--processes", 2]
    process = subprocess.Popen(
        [sys.executable, "-c", command, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout
        url = process.stdout.readline().rpartition(" ")[2].strip()
        with urllib.request.urlopen(f"{url}/v2/models/{signed.model}", timeout=PATIENCE_S) as reply:
            assert json.load(reply)["inputs"][0]["name"] == "mid"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/v2/models/none", timeout=PATIENCE_S)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--root", "root.json"], "--root goes with --releases"),
        (["--releases", "{here}", "--root", "{here}/none.json"], "cannot read"),
        (["--releases", "{here}", "--root", "{root}", "--bind", "0.0.0.0"], "only loopback"),
        (["--releases", "{here}", "--root", "{root}", "--memory", "much"], "not a size"),
        (["--releases", "{here}", "--root", "{root}", "--cert", "x"], "go together"),
    ],
)
def test_a_wrong_call_of_offload_serve_prints_advice(
    signed: Signed, tmp_path: Path, words: list[str], says: str
) -> None:
    """Exit code 2, and no process is started."""
    filled = [word.format(here=tmp_path, root=signed.root) for word in words]
    ended = CliRunner().invoke(cli, ["--data", str(tmp_path), "offload", "serve", *filled])
    assert ended.exit_code == 2, ended.output
    assert says in ended.output + str(ended.exception)


def test_a_fast_server_answers_the_same(signed: Signed) -> None:
    """`--mode fast` reaches the serving process, which loads and runs the slices."""
    with Serving(signed, "--processes", 1, "--mode", "fast") as serving:
        assert np.allclose(serving.answer(3), 6.0)
