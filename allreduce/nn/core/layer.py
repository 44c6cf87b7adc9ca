"""The base of layers and models: variables, made at the first call, and a call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from allreduce.devices import options
from allreduce.devices.integers import switch
from allreduce.errors import ShapeError, UsageError, unknown_name
from allreduce.graph.core.naming import snake_case, unique_name
from allreduce.graph.core.pytree import map_leaves
from allreduce.graph.core.scope import asked_for, part, surroundings, users_line, within
from allreduce.graph.core.spec import Shape
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.arguments import as_dtype
from allreduce.graph.placement.placement import check_exists
from allreduce.graph.replicate.owner import current_replicator, scope_of
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.variable import Variable
from allreduce.keywords import Refusing, explain
from allreduce.nn import initializers
from allreduce.nn.core import calls, configs, keras_names, symbols

# Whether a class's `call` has a `training` argument. Weakly: the methods of a class defined in a
# function may refer to a model.
_takers: WeakKeyDictionary[type, bool] = WeakKeyDictionary()


class Layer(Refusing):
    """A function with variables.

    A subclass makes its variables in `build` (or takes other layers as attributes in `__init__`)
    and computes in `call`. The variables belong to the strategy's scope in which the layer was
    made. They are placed, and `call` computes, on the device of the `ar.device` scopes around its
    constructor.

    Args:
        name: Its name in summaries and errors.
        dtype: The dtype of its computation; `ar.config.floatx()` by default. Floating inputs are
            cast to it.
        trainable: Whether optimizers change its variables.
    """

    # Whether from_config also takes a function that makes layers, because its config describes
    # other layers.
    holds_layers: ClassVar[bool] = False
    # Whether `call` takes one tensor, never a list, tuple or dict of several.
    one_tensor: ClassVar[bool] = False

    _elsewhere = keras_names.OF_LAYERS

    def __init__(
        self, *, name: str | None = None, dtype: str | None = None, trainable: bool = True
    ) -> None:
        self.replicator = current_replicator()
        self._scopes = surroundings()
        self.dtype = dtype or options.current().floatx
        if self.dtype not in options.FLOATS:
            raise unknown_name("dtype of a layer", dtype, options.FLOATS)
        if name is not None and not isinstance(name, str):
            raise UsageError(f"the name of a layer is a string, not {name!r}")
        self.name = name or snake_case(type(self).__name__)
        asked = asked_for()
        if asked is not None:
            what = f"layer {self.name!r} ({type(self).__name__})"
            check_exists(what, asked, self.replicator.places[0])
        self.trainable = switch("trainable", trainable)
        self.path: str | None = None  # "model/0", once it is known where the layer stands
        self.built = False
        self.input_shape: Shape | None = None  # of the latest call, for summaries
        self.output_shape: Shape | None = None

    if not TYPE_CHECKING:  # else type checkers would believe that it has every attribute

        def __getattr__(self, name: str) -> Any:
            if "replicator" not in vars(self):
                raise AttributeError(
                    f"{type(self).__name__}.__init__ has to call super().__init__() before "
                    f"self.{name} is asked for",
                    name="",
                    obj=self,
                )
            if name in keras_names.METHODS:
                raise AttributeError(
                    f"{type(self).__name__} has no {name!r}: {keras_names.METHODS[name]}",
                    name="",
                    obj=self,
                )
            return object.__getattribute__(self, name)  # raises as it has

    def build(self, input_shape: Any) -> None:
        """Make the variables; called once, before the first call.

        Args:
            input_shape: `(batch, …)`; its first size may be a named dimension.
        """

    def call(self, inputs: Any) -> Any:  # noqa: ARG002
        """Compute; a layer that behaves differently in training also takes `training`."""
        raise UsageError(f"layer {type(self).__name__} has no call(self, inputs)")

    @explain()
    def __call__(self, inputs: Any, training: bool | None = None) -> Any:
        """Compute the outputs; inside a model `training` is the model's unless it is given."""
        if symbols.has_symbols(inputs):
            return symbols.record(self, inputs, training)
        tensors = map_leaves(self._cast, inputs)
        if training is None:
            training = calls.in_training()
        elif not isinstance(training, bool | np.bool_):
            raise UsageError(
                f"{users_line()}: layer {self.path or self.name!r} ({type(self).__name__}) takes "
                "its inputs as one argument, several as a tuple; the second argument is training, "
                f"True or False, not a {type(training).__name__}"
            )
        if self.one_tensor:
            check_one_tensor(self, tensors)
        self._place()
        with calls.calling(self, training), part(self.path or ""), within(*self._scopes):
            if not self.built:
                self._build_once(tensors)
            kind: Any = type(self)
            if _takes_training(kind):
                outputs = self.call(tensors, training=training)  # type: ignore[call-arg]
            else:
                outputs = self.call(tensors)
        if outputs is None:
            raise UsageError(
                f"{users_line()}: layer {self.path!r} gave None; return the outputs from "
                f"{kind.__name__}.call"
            )
        self.built = True
        self.input_shape, self.output_shape = _shape(tensors), _shape(outputs)
        return outputs

    def _cast(self, value: Any) -> Tensor | None:
        if value is None:  # left out
            return None
        tensor = as_tensor(value)
        if np.issubdtype(tensor.dtype, np.floating) and tensor.dtype != self.dtype:
            return ops.cast(tensor, self.dtype)
        return tensor

    def _place(self) -> None:
        """Set the paths of this layer and of the layers directly inside it."""
        if self.path is None:
            self._stand_alone()
        for key, layer in self.children():
            if layer.path is None:
                layer.path = f"{self.path}/{key}"

    def _stand_alone(self) -> None:
        owner = calls.caller()
        if owner is not None:
            raise UsageError(
                f"{users_line()}: {type(owner).__name__} {owner.name!r} calls the layer "
                f"{self.name!r}, which is not one of its attributes, so its variables would never "
                "be trained or saved; make it in __init__ (self.… = …), alone or in a list"
            )
        self.path = unique_name(self.name)

    def _build_once(self, tensors: Any) -> None:
        before = dict(vars(self))
        try:
            with scope_of(self.replicator):  # to which layers that are made now belong, too
                self.build(_shape(tensors))
        except BaseException:
            vars(self).clear()  # of variables made so far too, so that it can be built again
            vars(self).update(before)
            raise
        self._place()  # the layers that `build` has made
        self.built = True  # before `call`: a call that fails must not make variables twice

    def add_variable(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: str = "glorot_uniform",
        *,
        dtype: Any = None,
        trainable: bool = True,
    ) -> Variable:
        """Make a variable of this layer; its first value depends on the seed and its path alone.

        Args:
            name: The attribute that it becomes; unique within the layer.
            shape: Known sizes only.
            initializer: A row of `allreduce.nn.initializers.TABLE`.
            dtype: The layer's by default.
            trainable: Whether optimizers are to change it.

        Raises:
            UsageError: The layer has an attribute of that name, the shape is none, or there is no
                such initializer.
        """
        if inspect.getattr_static(self, name, None) is not None:
            raise UsageError(
                f"{users_line()}: layer {self.path or self.name!r} has an attribute {name!r} "
                "already; call the variable something else"
            )
        path = f"{self.path}/{name}"
        shape = _sizes(path, shape)
        calls.check_size(path, shape)
        make = initializers.get(initializer)
        variable = Variable(
            lambda: make(shape, as_dtype(dtype or self.dtype), path),
            name=path,
            trainable=trainable,
            replicator=self.replicator,
        )
        self.__dict__[name] = variable
        return variable

    def children(self) -> Iterator[tuple[str, Layer]]:
        """Go through the layers among the attributes, in lists and dicts too, with their keys."""
        for attribute, value in vars(self).items():
            yield from parts_in(attribute, value, Layer)

    @property
    def layers(self) -> list[Layer]:
        """The layers directly inside this one."""
        return [layer for _, layer in self.children()]

    def named_variables(self) -> dict[str, Variable]:
        """Return all variables by their path below this layer: "0/kernel"."""
        return {key: variable for key, variable, _ in self._walk("", True, set())}

    @property
    def variables(self) -> list[Variable]:
        """All variables, including the ones of inner layers."""
        return [variable for _, variable, _ in self._walk("", True, set())]

    @property
    def trainable_variables(self) -> list[Variable]:
        """The variables that optimizers are to change."""
        return [variable for _, variable, wanted in self._walk("", True, set()) if wanted]

    def _walk(
        self, prefix: str, trainable: bool, seen: set[Layer | Variable]
    ) -> Iterator[tuple[str, Variable, bool]]:
        """Go through (path, variable, whether to train it), a shared one where it comes first."""
        seen.add(self)
        trainable = trainable and self.trainable
        for attribute, value in vars(self).items():
            for key, variable in parts_in(attribute, value, Variable):
                if variable not in seen:
                    seen.add(variable)
                    yield prefix + key, variable, trainable and variable.trainable
        for key, layer in self.children():
            if layer not in seen:
                yield from layer._walk(f"{prefix}{key}/", trainable, seen)

    def count_params(self) -> int:
        """Count the elements of all variables."""
        return sum(variable.storage[0].size for variable in self.variables)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, as plain data that JSON can hold.

        A subclass whose constructor takes more than the library's class adds its own.
        """
        config = {key: getattr(self, key) for key in configs.OPTIONS}
        taken = inspect.signature(type(self)).parameters
        if all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
            config = {key: value for key, value in config.items() if key in taken}
        own = [] if self.holds_layers else configs.arguments(type(self))
        return config | {name: configs.plain(getattr(self, name)) for name in own}

    def describe(self) -> dict[str, Any]:
        """Return the class's name and the config as plain data, as files contain them.

        Options of all layers that the config lacks are added.
        """
        kind, config = type(self), self.get_config()
        configs.check(self, config)
        own = not kind.__module__.startswith("allreduce.nn.")
        options = {
            key: kind_of(getattr(self, key))
            for key, kind_of in configs.OPTIONS.items()
            if key not in config
        }
        beside = {"options": options} if options else {}
        return {"class": kind.__name__, "config": config, **beside, "own": own}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Layer:
        """Make the layer that `get_config` described."""
        return cls(**config)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path or self.name!r}>"


def _takes_training(kind: type[Layer]) -> bool:
    found = _takers.get(kind)
    if found is None:
        found = _takers[kind] = "training" in inspect.signature(kind.call).parameters
    return found


def _shape(tensors: Any) -> Any:
    """Return the shape of one tensor; of several, their shapes in the same structure."""
    if isinstance(tensors, Tensor):
        return tensors.shape
    return map_leaves(lambda leaf: leaf.shape if isinstance(leaf, Tensor) else None, tensors)


def _sizes(path: str, shape: Any) -> tuple[int, ...]:
    """Read the shape of a variable; one size alone is that of a vector."""
    try:
        sizes = (shape,) if isinstance(shape, int | np.integer) else shape
        found = tuple(operator.index(size + 0) for size in sizes)  # a named dimension refuses + 0
    except TypeError:
        found = (-1,)
    if min(found, default=0) < 0:
        raise UsageError(
            f"{users_line()}: the shape of variable {path!r} is a tuple of sizes from 0, not "
            f"{shape!r:.60}"
        )
    return found


def check_one_tensor(layer: Layer, inputs: Any) -> None:
    """Refuse a list, tuple or dict of arrays where a layer takes one array."""
    if isinstance(inputs, Tensor):
        return
    found, remedy = repr(inputs), "pass an array"
    if isinstance(inputs, Mapping):
        found = f"a dict of {', '.join(map(repr, inputs)) or 'nothing'}"
        remedy = "pass one of its values, or join several with ar.nn.Concatenate"
    elif isinstance(inputs, list | tuple):
        found = f"a {type(inputs).__name__} of {len(inputs)}"
        remedy = "make one array of it with np.asarray, or join several with ar.nn.Concatenate"
    raise ShapeError(
        f"{users_line()}: layer {layer.path or layer.name!r} ({type(layer).__name__}) takes one "
        f"array, but got {found}; {remedy}"
    )


P = TypeVar("P")


def parts_in(key: str, value: Any, kind: type[P]) -> Iterator[tuple[str, P]]:
    """Go through the parts of a kind in an attribute: itself, or in lists and dicts."""
    if isinstance(value, kind):
        yield key, value
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from parts_in(f"{key}/{index}", item, kind)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from parts_in(f"{key}/{name}", item, kind)
