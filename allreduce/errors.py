"""Every error this library raises on purpose, as one tree.

    AllreduceError
    ├── UsageError            a call, argument or setting is wrong (is a ValueError)
    │   ├── ShapeError        shapes or dtypes that do not fit together
    │   ├── DeviceError       a device name that is malformed or does not exist
    │   └── ClosedError       use of an object after close(), or after an error ended it
    ├── JoinError             this process cannot join the job it says it belongs to
    ├── TimeoutError          a wait ran out (is a builtins.TimeoutError)
    ├── PeerLostError         a member died or left while needed (is a ConnectionError)
    ├── MismatchError         members disagree about a call or about data (is a ValueError)
    ├── UnsupportedError      a combination that is not implemented (is a NotImplementedError)
    ├── OutOfMemoryError      no memory for a buffer or region (is a MemoryError)
    ├── NumericsError         a value that must be finite is not (is an ArithmeticError)
    └── InternalError         a bug of this library: please report it

A message names the rank, the object, the expected and the found value, and the remedy.
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

_LIBRARIES = frozenset((__name__.partition(".")[0], "numpy", "grpc"))
_STANDARD = (os.path.dirname(os.__file__), "<frozen ")  # where Python's own files are
_INSTALLED = ("/site-packages/", "/dist-packages/")


@dataclass(frozen=True)
class Finding:
    """Why a communicator has ended: the part that its members' errors share.

    Attributes:
        fault: "mismatch", "timeout", "lost", "left" or "aborted".
        before: The text of the message up to the call.
        call: The call that could not complete, "barrier() #41"; empty if none is named.
        after: The rest of the text.
        interrupted: As `PeerLostError.interrupted`.
    """

    fault: str
    before: str
    call: str = ""
    after: str = ""
    interrupted: bool = False

    def __str__(self) -> str:
        return f"{self.before}{self.call}{self.after}"


class AllreduceError(Exception):
    """Root of the tree; catch it to catch every deliberate error of this library.

    Attributes:
        everywhere: Whether all ranks raise it at the same place, so that all can continue.
        finding: Why the communicator has ended, if that is the error or its cause.
    """

    everywhere = False
    finding: Finding | None = None


_Error = TypeVar("_Error", bound=AllreduceError)


def everywhere(error: _Error) -> _Error:
    """Mark an error that all ranks raise at the same place."""
    error.everywhere = True
    return error


def reworded(error: _Error, text: str) -> _Error:
    """Copy an error with another message, keeping its class, attributes and notes."""
    made = type(error)(text)
    vars(made).update(vars(error))
    return made


class UsageError(AllreduceError, ValueError):
    """A call, an argument or a setting is wrong."""


class ShapeError(UsageError):
    """Shapes or dtypes do not fit together."""


class DeviceError(UsageError):
    """A device name is malformed, or names a device that does not exist."""


class ClosedError(UsageError):
    """Something was used after `close()`, or after an error made it unusable."""


class JoinError(AllreduceError):
    """This process cannot join the job it says it belongs to."""


class TimeoutError(AllreduceError, builtins.TimeoutError):
    """A wait ran out of time."""


class PeerLostError(AllreduceError, ConnectionError):
    """A member died or left while the others still needed it.

    Attributes:
        interrupted: Whether it was interrupted, as by Ctrl-C; a program that ends by this error
            then prints one line instead of a traceback.
    """

    interrupted = False


def is_interrupt(error: object) -> bool:
    """Return whether an error comes from an interrupt such as Ctrl-C, here or on another rank."""
    lost = isinstance(error, PeerLostError) and error.interrupted
    return lost or isinstance(error, KeyboardInterrupt)


def is_user_code(frame: FrameType) -> bool:
    """Return whether a frame is of the user's program, and not of a library."""
    installed = any(part in frame.f_code.co_filename for part in _INSTALLED)
    return not (installed or _is_ours(frame))


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame is of this library, NumPy, gRPC or Python's own."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if module in sys.stdlib_module_names:  # else a package of the user's of the same name
        return frame.f_code.co_filename.startswith(_STANDARD)
    return module in _LIBRARIES


def raised_here(error: BaseException) -> bool:
    """Return whether the `try` block of the caller raised an error, and no function called there.

    That is so of arguments that do not fit a function's parameters, and of errors of NumPy's own.
    """
    trace = error.__traceback__
    return trace is not None and trace.tb_next is None


def leave_out_library(error: BaseException) -> None:
    """Have a traceback end at the last frame of other code, such as the user's.

    That of a bug stays whole, and `python -X dev` shows all frames.
    """
    if sys.flags.dev_mode or isinstance(error, InternalError):
        return
    last, trace = None, error.__traceback__
    while trace is not None:
        if not _is_ours(trace.tb_frame):
            last = trace
        trace = trace.tb_next
    if last is None:
        error.__traceback__ = None
    else:
        last.tb_next = None


class MismatchError(AllreduceError, ValueError):
    """Members disagree about a call or its data.

    Attributes:
        lists: Rank and name of two members whose lists of arrays differ; empty for other calls.
        calls: The two calls as their callers wrote them, if known.
    """

    lists: tuple[tuple[int, str], ...] = ()
    calls: tuple[str, ...] = ()


class UnsupportedError(AllreduceError, NotImplementedError):
    """A combination that is not implemented."""


class OutOfMemoryError(AllreduceError, MemoryError):
    """There is no memory for a buffer or a shared region."""


class NumericsError(AllreduceError, ArithmeticError):
    """A value that must be finite is not."""


class InternalError(AllreduceError):
    """A bug of this library."""


def unknown_name(kind: str, name: object, known: Iterable[str], where: str = "") -> UsageError:
    """Build the error for a name that is not in a table; it lists the names and suggests one.

    Args:
        kind: The kind of object: "loss", "optimizer".
        name: The given name.
        known: The names that exist.
        where: A prefix for the message, such as the call.
    """
    names = sorted(known)
    hint = did_you_mean(name, names)
    before = f"{where}: " if where else ""
    return UsageError(f"{before}unknown {kind} {name!r}: there are {', '.join(names)}{hint}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or "".

    Considers other letter case, abbreviations, typing errors, and other libraries' names.
    """
    import difflib  # rarely needed

    by_folded = {each.casefold(): each for each in sorted(known, reverse=True)}
    folded = str(name).casefold()
    elsewhere = _ELSEWHERE.get(folded)
    near = [elsewhere] if elsewhere in by_folded else []
    if not near and folded.replace("_", "") in _OTHER_THINGS:
        return ""
    near = near or difflib.get_close_matches(folded, by_folded, n=1)
    if not near and len(folded) > 1:
        near = [each for each in sorted(by_folded) if each.startswith(folded)]
    if not near:  # a known name with a suffix, as "mse_loss"
        near = [each for each in sorted(by_folded) if folded.startswith(f"{each}_")]
    return f"; did you mean {by_folded[near[0]]!r}?" if near else ""


# Names of MPI, torch.distributed, NumPy and Keras, and their equivalents here.
_ELSEWHERE: dict[str, str] = {
    "add": "sum",
    "average": "mean",
    "avg": "mean",
    "band": "bitwise_and",
    "bor": "bitwise_or",
    "bxor": "bitwise_xor",
    "cce": "categorical_crossentropy",
    "cross_entropy": "sparse_categorical_crossentropy",
    "kaiming": "he_uniform",
    "kaiming_normal": "he_normal",
    "kaiming_uniform": "he_uniform",
    "land": "logical_and",
    "lor": "logical_or",
    "maximum": "max",
    "minimum": "min",
    "mul": "prod",
    "multiply": "prod",
    "normal": "random_normal",
    "product": "prod",
    "rmse": "root_mean_squared_error",
    "uniform": "random_uniform",
    "xavier": "glorot_uniform",
    "xavier_normal": "glorot_normal",
    "xavier_uniform": "glorot_uniform",
}

# What other libraries have and this one has not, without underscores. The nearest name here is
# another thing ("nadam" and "adam"), so none is suggested.
_OTHER_THINGS = frozenset(
    [
        # optimizers, losses, metrics
        *("adadelta", "adafactor", "adamax", "ftrl", "lossscaleoptimizer", "muon", "nadam"),
        *("radam", "rprop", "sgdw", "bcewithlogits", "categoricalgeneralizedcrossentropy"),
        *("categoricalhinge", "circle", "crossentropy", "ctc", "dice", "logcosh", "mape"),
        *("meanabsolutepercentageerror", "meansquaredlogarithmicerror", "msle", "nll", "nllloss"),
        *("poisson", "rmse", "squaredhinge", "tversky", "binaryiou", "fbetascore", "iou"),
        *("meaniou", "meanrelativeerror", "onehotiou", "onehotmeaniou", "precisionatrecall"),
        *("recallatprecision", "sensitivityatspecificity", "specificityatsensitivity"),
        *("topkaccuracy",),
        # activations, initializers
        *("celu", "elu", "glu", "hardsigmoid", "hardtanh", "leakyrelu", "logsigmoid", "logsoftmax"),
        *("prelu", "relu6", "selu", "tanhshrink", "constant", "identity", "lecunnormal"),
        *("lecununiform", "orthogonal", "truncatednormal", "variancescaling"),
        # layers, callbacks
        *("additiveattention", "alphadropout", "attention", "average", "averagepooling1d"),
        *("averagepooling3d", "conv1d", "conv1dtranspose", "conv2dtranspose", "conv3d"),
        *("conv3dtranspose", "depthwiseconv1d", "depthwiseconv2d", "einsumdense"),
        *("gaussiandropout", "globalaveragepooling1d", "globalaveragepooling3d"),
        *("globalmaxpooling1d", "globalmaxpooling2d", "globalmaxpooling3d", "groupnormalization"),
        *("groupqueryattention", "maxpooling1d", "maxpooling3d", "multiply", "normalization"),
        *("separableconv1d", "separableconv2d", "spatialdropout1d", "spatialdropout2d"),
        *("spatialdropout3d", "subtract", "unitnormalization", "baselogger", "callbacklist"),
    ]
)
