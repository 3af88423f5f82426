"""Maps numpy data types to the names of the Open Inference Protocol."""

from __future__ import annotations

from typing import Any

import numpy as np

NAME_BY_DTYPE_NAME: dict[str, str] = {
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{"bool": "BOOL", "float16": "FP16", "float32": "FP32", "float64": "FP64", "object": "BYTES"},
}
"""The protocol's name of each numpy dtype name."""
DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(dtype) for dtype, name in NAME_BY_DTYPE_NAME.items()}
"""The numpy dtype of each protocol name; BYTES is an object array of `bytes`."""
NAME_BY_DTYPE: dict[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}
"""The protocol's name of each numpy dtype; looked up for every tensor, without making the dtype's name first."""
