"""A program that is not Python in a confined child process: this module's arguments are its command.

`sandbox.confined` runs this module. What the kernel took from the process it does not give back to the program.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    os.execv(sys.argv[1], sys.argv[1:])
