from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromMember(_message.Message):
    __slots__ = ("request", "timeout", "hello", "proof", "assemble", "set", "get", "beat", "leave", "forget")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    ASSEMBLE_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    GET_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    request: int
    timeout: float
    hello: Hello
    proof: Proof
    assemble: Assemble
    set: Set
    get: Get
    beat: Beat
    leave: Leave
    forget: Forget
    def __init__(self, request: _Optional[int] = ..., timeout: _Optional[float] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., proof: _Optional[_Union[Proof, _Mapping]] = ..., assemble: _Optional[_Union[Assemble, _Mapping]] = ..., set: _Optional[_Union[Set, _Mapping]] = ..., get: _Optional[_Union[Get, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., forget: _Optional[_Union[Forget, _Mapping]] = ...) -> None: ...

class ToMember(_message.Message):
    __slots__ = ("request", "challenge", "refusal", "welcome", "members", "value", "done", "missing", "lost", "beat")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    request: int
    challenge: Challenge
    refusal: Refusal
    welcome: Welcome
    members: Members
    value: Value
    done: Done
    missing: Missing
    lost: Lost
    beat: Beat
    def __init__(self, request: _Optional[int] = ..., challenge: _Optional[_Union[Challenge, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., members: _Optional[_Union[Members, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., missing: _Optional[_Union[Missing, _Mapping]] = ..., lost: _Optional[_Union[Lost, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("rank", "host", "pid", "machine")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    host: str
    pid: int
    machine: str
    def __init__(self, rank: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., machine: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "size", "generation", "identity", "nonce")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    size: int
    generation: int
    identity: Identity
    nonce: bytes
    def __init__(self, protocol: _Optional[int] = ..., size: _Optional[int] = ..., generation: _Optional[int] = ..., identity: _Optional[_Union[Identity, _Mapping]] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class Challenge(_message.Message):
    __slots__ = ("nonce", "proof")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    nonce: bytes
    proof: bytes
    def __init__(self, nonce: _Optional[bytes] = ..., proof: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("proof",)
    PROOF_FIELD_NUMBER: _ClassVar[int]
    proof: bytes
    def __init__(self, proof: _Optional[bytes] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("why", "again")
    WHY_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    why: str
    again: bool
    def __init__(self, why: _Optional[str] = ..., again: bool = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class Assemble(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Members(_message.Message):
    __slots__ = ("members",)
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    members: _containers.RepeatedCompositeFieldContainer[Identity]
    def __init__(self, members: _Optional[_Iterable[_Union[Identity, _Mapping]]] = ...) -> None: ...

class Set(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Get(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: bytes
    def __init__(self, value: _Optional[bytes] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Missing(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class Lost(_message.Message):
    __slots__ = ("identity", "reason")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    identity: Identity
    reason: str
    def __init__(self, identity: _Optional[_Union[Identity, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Leave(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Forget(_message.Message):
    __slots__ = ("prefix", "ranks")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prefix: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...
