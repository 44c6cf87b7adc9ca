"""gRPC as this package uses it: quiet, without proxies, with a size cap. Imports gRPC."""

from __future__ import annotations

from allreduce.importing import variables

# gRPC reads it once for the whole process. With its fork support and an open connection a fork may
# never return (gRPC 1.85). A program that has imported gRPC before has its own choice.
# Its own log would tell of every connection that ends, and repeat what our errors say.
with variables({"GRPC_ENABLE_FORK_SUPPORT": "0", "GRPC_VERBOSITY": "NONE"}):
    import grpc
    import grpc.aio

    from allreduce.cluster.leader import leader_pb2_grpc

PROTOCOL = 5
LEFT = "left"  # in a call's trailing metadata: the leader's host has left in good order
BEAT_SECONDS = 1.0  # a member that was silent for so long sends a heartbeat
_SILENCE_SECONDS = 10.0  # a short timeout must not turn a pause between two heartbeats into a death

# The store is for addresses, identities and agreements; arrays go through collectives.
MAX_VALUE_BYTES = 16 * 2**20
_MAX_MESSAGE_BYTES = MAX_VALUE_BYTES + 2**16  # the value, its key and the framing

_COMMON = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS = [
    *_COMMON,
    ("grpc.so_reuseport", 0),  # else two leaders could share one port
    ("grpc.max_concurrent_streams", 1),  # of one connection; a member has one call
    # Heartbeats find a lost member. gRPC's own keepalive would end the connection of one that is
    # stopped while it is sent something: by TCP_USER_TIMEOUT after 20 s, or a ping after 60.
    ("grpc.keepalive_time_ms", 2**31 - 1),  # never
    # Connections of strangers end: gRPC's own limits are 120 s and none. A member that finds no
    # place because of them tries again for longer (meeting.PATIENCE), also than the second of these
    # after a call of a stranger that says nothing (session.HANDSHAKE_SECONDS).
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 2_000),  # without a call, which a member always has
]
CHANNEL_OPTIONS = [
    *_COMMON,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),  # a new join never inherits an old join's backoff
]

__all__ = [
    "BEAT_SECONDS",
    "CHANNEL_OPTIONS",
    "LEFT",
    "MAX_VALUE_BYTES",
    "PROTOCOL",
    "grpc",
    "leader_pb2_grpc",
    "longest_silence",
    "server_options",
]


def server_options(connections: int) -> list[tuple[str, int]]:
    """Return the options of a server that accepts so many connections at the same time."""
    return [*_SERVER_OPTIONS, ("grpc.max_allowed_incoming_connections", connections)]


def longest_silence(timeout: float) -> float:
    """Return the longest silence that members and leader allow each other, in seconds."""
    return max(timeout, _SILENCE_SECONDS)
