"""The native member of the shared transport, asked without a communicator."""

from __future__ import annotations

import numpy as np
import pytest

from allreduce import _native
from allreduce.comm.selection.choosing import choices_for

NUMBERS = np.zeros(3, "float32")
TEXTS = np.zeros(3, "U1")


@pytest.mark.parametrize(("x", "out"), [(TEXTS, NUMBERS), (NUMBERS, TEXTS), (None, TEXTS)])
def test_no_array_of_a_wrong_type_is_ignored(x: np.ndarray | None, out: np.ndarray) -> None:
    member = _native.Member(_native.Group(-1, 1, 1, choices_for("shared", 1).native), 0)
    with pytest.raises(TypeError, match="supported type"):
        member.start_message(x, out, 0, 0, b"")
