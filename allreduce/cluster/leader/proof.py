"""The handshake's proofs: both sides show that they know the job's secret without sending it.

Challenge and response with HMAC-SHA256 (RFC 2104) over both sides' nonces and all that the member
claims, with the prover's role in front so that neither proof can be played back as the other. Each
part is preceded by its length, so that no two different inputs make one message.
"""

from __future__ import annotations

import hmac
import secrets
import struct

NONCE_BYTES = PROOF_BYTES = 32


def nonce() -> bytes:
    """Draw a number that no other handshake has."""
    return secrets.token_bytes(NONCE_BYTES)


def prove(
    secret: bytes, role: str, nonces: tuple[bytes, bytes], claim: tuple[int, int, int, int]
) -> bytes:
    """Compute one side's proof.

    Args:
        secret: The job's secret; empty if a loopback job has none.
        role: The prover: "leader" or "member".
        nonces: The member's, then the leader's.
        claim: Rank, size, generation and process id, as the member's hello has them.
    """
    return digest(secret, role.encode(), *nonces, struct.pack("!4Q", *claim))


def digest(secret: bytes, *parts: bytes) -> bytes:
    """Compute HMAC-SHA256 over the parts, in `PROOF_BYTES` bytes."""
    message = b"".join(struct.pack("!Q", len(part)) + part for part in parts)
    return hmac.digest(secret, message, "sha256")


def proves(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, expected)
