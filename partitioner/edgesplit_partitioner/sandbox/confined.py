"""Entry point of every child process: `python -m edgesplit_partitioner.sandbox.confined LIMITS MODULE ARGUMENTS`.

It confines itself, then runs the module as if it had been started with `-m`.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile

import msgspec

from edgesplit.process.confinement import Confinement, confine


def main() -> None:
    """Confine this process, then run the module."""
    limits = msgspec.json.decode(sys.argv[1], type=Confinement)
    module, sys.argv = sys.argv[2], sys.argv[2:]
    if limits.folder:
        os.environ["TMPDIR"] = tempfile.tempdir = limits.folder
    confine(limits)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
