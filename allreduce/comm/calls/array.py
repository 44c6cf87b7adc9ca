"""What stands for an array of NumPy's, of whatever dtype and shape, in signatures."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
