"""numpy's types by the names of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

DATATYPES: dict[str, str] = {
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "object": "BYTES"},
}
"""The protocol's name of each numpy dtype."""
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for dtype, name in DATATYPES.items()}
"""The numpy dtype of each of the protocol's names; BYTES is an object array of `bytes`."""
KNOWN: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}
"""As `DATATYPES`, without making a name first: it is asked for each tensor."""
