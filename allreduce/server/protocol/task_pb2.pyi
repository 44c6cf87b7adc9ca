from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HEARTBEAT: _ClassVar[Kind]
    RUN: _ClassVar[Kind]
    DONE: _ClassVar[Kind]
    FAILED: _ClassVar[Kind]
    TENSOR: _ClassVar[Kind]
    ABORT: _ClassVar[Kind]
    READ: _ClassVar[Kind]
    ASSIGN: _ClassVar[Kind]
    RELEASE: _ClassVar[Kind]
    TASKS: _ClassVar[Kind]
    LEAVE: _ClassVar[Kind]
    CALL: _ClassVar[Kind]
HEARTBEAT: Kind
RUN: Kind
DONE: Kind
FAILED: Kind
TENSOR: Kind
ABORT: Kind
READ: Kind
ASSIGN: Kind
RELEASE: Kind
TASKS: Kind
LEAVE: Kind
CALL: Kind

class HelloRequest(_message.Message):
    __slots__ = ("protocol", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    nonce: bytes
    def __init__(self, protocol: _Optional[int] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("nonce", "proof", "cluster", "job", "task", "generation", "data_port", "devices", "machine", "local_name", "mpi_job", "mpi_rank", "left")
    class LeftEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DATA_PORT_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_NAME_FIELD_NUMBER: _ClassVar[int]
    MPI_JOB_FIELD_NUMBER: _ClassVar[int]
    MPI_RANK_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    cluster: str
    job: str
    task: int
    generation: int
    data_port: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    machine: str
    local_name: str
    mpi_job: str
    mpi_rank: int
    left: _containers.ScalarMap[str, float]
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ..., cluster: _Optional[str] = ..., job: _Optional[str] = ..., task: _Optional[int] = ..., generation: _Optional[int] = ..., data_port: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., machine: _Optional[str] = ..., local_name: _Optional[str] = ..., mpi_job: _Optional[str] = ..., mpi_rank: _Optional[int] = ..., left: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Caller(_message.Message):
    __slots__ = ("nonces", "proof")
    NONCES_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonces: bytes
    proof: bytes
    def __init__(self, nonces: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RegisterGraphRequest(_message.Message):
    __slots__ = ("caller", "client", "graph", "timeout")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    client: str
    graph: Graph
    timeout: float
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., client: _Optional[str] = ..., graph: _Optional[_Union[Graph, _Mapping]] = ..., timeout: _Optional[float] = ...) -> None: ...

class RegisterGraphReply(_message.Message):
    __slots__ = ("handle", "parts", "failure")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    handle: str
    parts: _containers.RepeatedCompositeFieldContainer[PartOf]
    failure: Description
    def __init__(self, handle: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[PartOf, _Mapping]]] = ..., failure: _Optional[_Union[Description, _Mapping]] = ...) -> None: ...

class PartOf(_message.Message):
    __slots__ = ("task", "address", "feeds", "fetches", "missing")
    TASK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FEEDS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    task: str
    address: str
    feeds: _containers.RepeatedScalarFieldContainer[int]
    fetches: _containers.RepeatedScalarFieldContainer[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, task: _Optional[str] = ..., address: _Optional[str] = ..., feeds: _Optional[_Iterable[int]] = ..., fetches: _Optional[_Iterable[int]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterPartRequest(_message.Message):
    __slots__ = ("caller", "handle", "part", "generations")
    class GenerationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CALLER_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    caller: Caller
    handle: str
    part: Graph
    generations: _containers.ScalarMap[str, int]
    def __init__(self, caller: _Optional[_Union[Caller, _Mapping]] = ..., handle: _Optional[str] = ..., part: _Optional[_Union[Graph, _Mapping]] = ..., generations: _Optional[_Mapping[str, int]] = ...) -> None: ...

class RegisterPartReply(_message.Message):
    __slots__ = ("missing", "failure")
    MISSING_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    missing: _containers.RepeatedScalarFieldContainer[str]
    failure: Description
    def __init__(self, missing: _Optional[_Iterable[str]] = ..., failure: _Optional[_Union[Description, _Mapping]] = ...) -> None: ...

class Graph(_message.Message):
    __slots__ = ("nodes", "inputs", "outputs", "effects", "variables", "rules")
    NODES_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    inputs: _containers.RepeatedScalarFieldContainer[int]
    outputs: _containers.RepeatedScalarFieldContainer[int]
    effects: _containers.RepeatedScalarFieldContainer[int]
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    rules: _containers.RepeatedCompositeFieldContainer[Rule]
    def __init__(self, nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., inputs: _Optional[_Iterable[int]] = ..., outputs: _Optional[_Iterable[int]] = ..., effects: _Optional[_Iterable[int]] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., rules: _Optional[_Iterable[_Union[Rule, _Mapping]]] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("op", "inputs", "control", "attrs", "shape", "dtype", "device", "source", "part", "beside")
    class AttrsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    OP_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    ATTRS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    op: str
    inputs: _containers.RepeatedScalarFieldContainer[int]
    control: _containers.RepeatedScalarFieldContainer[int]
    attrs: _containers.MessageMap[str, Value]
    shape: _containers.RepeatedCompositeFieldContainer[Size]
    dtype: str
    device: str
    source: str
    part: str
    beside: int
    def __init__(self, op: _Optional[str] = ..., inputs: _Optional[_Iterable[int]] = ..., control: _Optional[_Iterable[int]] = ..., attrs: _Optional[_Mapping[str, Value]] = ..., shape: _Optional[_Iterable[_Union[Size, _Mapping]]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., source: _Optional[str] = ..., part: _Optional[str] = ..., beside: _Optional[int] = ...) -> None: ...

class Size(_message.Message):
    __slots__ = ("size", "name")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    size: int
    name: str
    def __init__(self, size: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("name", "shape", "dtype", "device", "trainable")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    device: str
    trainable: bool
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., trainable: bool = ...) -> None: ...

class Rule(_message.Message):
    __slots__ = ("config",)
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    config: str
    def __init__(self, config: _Optional[str] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("none", "truth", "integer", "number", "text", "array", "tuple", "list", "dict", "dtype", "size", "spec", "slice", "device", "variable", "rule", "record", "graph", "raw")
    NONE_FIELD_NUMBER: _ClassVar[int]
    TRUTH_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VARIABLE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    none: bool
    truth: bool
    integer: str
    number: float
    text: str
    array: Array
    tuple: Items
    list: Items
    dict: Pairs
    dtype: str
    size: Size
    spec: Spec
    slice: Items
    device: str
    variable: int
    rule: int
    record: Record
    graph: Graph
    raw: bytes
    def __init__(self, none: bool = ..., truth: bool = ..., integer: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., array: _Optional[_Union[Array, _Mapping]] = ..., tuple: _Optional[_Union[Items, _Mapping]] = ..., list: _Optional[_Union[Items, _Mapping]] = ..., dict: _Optional[_Union[Pairs, _Mapping]] = ..., dtype: _Optional[str] = ..., size: _Optional[_Union[Size, _Mapping]] = ..., spec: _Optional[_Union[Spec, _Mapping]] = ..., slice: _Optional[_Union[Items, _Mapping]] = ..., device: _Optional[str] = ..., variable: _Optional[int] = ..., rule: _Optional[int] = ..., record: _Optional[_Union[Record, _Mapping]] = ..., graph: _Optional[_Union[Graph, _Mapping]] = ..., raw: _Optional[bytes] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("keys", "values")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Value]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, keys: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Spec(_message.Message):
    __slots__ = ("shape", "dtype")
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    shape: _containers.RepeatedCompositeFieldContainer[Size]
    dtype: str
    def __init__(self, shape: _Optional[_Iterable[_Union[Size, _Mapping]]] = ..., dtype: _Optional[str] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data", "segment", "is_new", "by_mpi", "mpi_tag")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    BY_MPI_FIELD_NUMBER: _ClassVar[int]
    MPI_TAG_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    segment: int
    is_new: bool
    by_mpi: int
    mpi_tag: int
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., segment: _Optional[int] = ..., is_new: bool = ..., by_mpi: _Optional[int] = ..., mpi_tag: _Optional[int] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("kind", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Value
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    fields: _containers.MessageMap[str, Value]
    def __init__(self, kind: _Optional[str] = ..., fields: _Optional[_Mapping[str, Value]] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("handle", "edge", "source", "destination", "rows", "names", "error", "error_kind", "arrays", "if_missing", "method", "json")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    EDGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ERROR_KIND_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    IF_MISSING_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    handle: str
    edge: int
    source: str
    destination: str
    rows: int
    names: _containers.RepeatedScalarFieldContainer[str]
    error: str
    error_kind: str
    arrays: _containers.RepeatedCompositeFieldContainer[Array]
    if_missing: bool
    method: str
    json: str
    def __init__(self, handle: _Optional[str] = ..., edge: _Optional[int] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., rows: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ..., error: _Optional[str] = ..., error_kind: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[Array, _Mapping]]] = ..., if_missing: bool = ..., method: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...
