"""The child process that makes compressed variants: `python -m edgesplit_partitioner.compression.maker_child FOLDER`.

The folder holds the model, `maker.json` and the samples. Each line on standard input is a `MakeJob`, answered by a
line, a `MakeResult`; the file is written beside the model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np

from edgesplit.runtime import Tensors
from edgesplit_partitioner.compression.maker_job import (
    GIVEN_FILE,
    START_FILE,
    CannotCompress,
    MakeJob,
    MakeResult,
    MakerStart,
)
from edgesplit_partitioner.sandbox.child_process import child_main
from edgesplit_partitioner.sandbox.limits import out_of_memory


def main(folder: Path) -> None:
    """Make what is asked for, until standard input ends."""
    answers = _take_standard_output()
    os.chdir(folder)
    start = msgspec.json.decode((folder / START_FILE).read_bytes(), type=MakerStart)
    samples = [
        {name: np.load(folder / file, allow_pickle=False) for name, file in files.items()} for files in start.samples
    ]
    maker: Maker | None = None
    for line in sys.stdin.buffer:
        job = msgspec.json.decode(line, type=MakeJob)
        try:
            maker = maker or _maker(start, folder, samples)
            result = maker.make(job, folder / job.file)
        except CannotCompress as error:
            result = MakeResult(refused=str(error))
        except MemoryError:
            result = MakeResult(refused=out_of_memory())
        answers.write(msgspec.json.encode(result) + b"\n")
        answers.flush()


class Maker(Protocol):
    """Makes variants of one model in one format."""

    def make(self, job: MakeJob, target: Path) -> MakeResult:
        """Write the variant to `target`; CannotCompress says why there is none."""
        ...


def _maker(start: MakerStart, folder: Path, samples: Sequence[Tensors]) -> Maker:
    if start.format == "onnx":
        from edgesplit_partitioner.compression.onnx_maker import OnnxMaker

        return OnnxMaker(folder / GIVEN_FILE, samples)
    from edgesplit_partitioner.compression.tflite_maker import TfliteMaker  # LiteRT is an extra

    return TfliteMaker(folder / GIVEN_FILE, samples)


def _take_standard_output() -> BinaryIO:
    """Standard output for answers alone: what quantisers print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    child_main(main)
