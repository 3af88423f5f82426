"""Types of the arrays that the planning packages share, and the relative tolerance at which two costs are equal."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]

TIE = 1e-12
"""Two costs are equal when they differ by less than this fraction, the rounding error of adding doubles."""
