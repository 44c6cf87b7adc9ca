"""`ar.colocate_with`: place operators on the device of a value."""

from __future__ import annotations

from contextlib import AbstractContextManager

from allreduce.errors import UsageError
from allreduce.graph.core.scope import SameDeviceAs, users_line, within
from allreduce.graph.core.tensor import ConcreteTensor, Tensor, TracedTensor
from allreduce.graph.trace.trace import current_trace
from allreduce.graph.trace.variable import Variable


def colocate_with(value: Tensor | Variable) -> AbstractContextManager[None]:
    """Place the operators that the block calls on the device of a tensor or a variable.

    It takes the place of the `ar.device` scopes around it; one inside of it wins.

    Raises:
        UsageError: It is neither, or a tensor of another traced function.
    """
    if not isinstance(value, Tensor | Variable):
        raise UsageError(
            f"{users_line()}: colocate_with takes a tensor or a variable, not {value!r:.60}"
        )
    tensor = value.__tensor__() if isinstance(value, Variable) else value
    if isinstance(tensor, TracedTensor):
        if tensor.trace is not current_trace():
            raise UsageError(
                f"{users_line()}: colocate_with got a tensor of another traced function, or of one "
                "whose trace has ended"
            )
        return within(SameDeviceAs(id(tensor.trace), tensor.id))
    assert isinstance(tensor, ConcreteTensor)
    return within(tensor.device)
