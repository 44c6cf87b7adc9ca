"""A proof is good for its secret, role, nonces and claim only."""

from __future__ import annotations

from allreduce.cluster.leader.proof import nonce, prove, proves

NONCES = (b"a" * 32, b"b" * 32)
CLAIM = (1, 4, 1, 4711)


def test_the_same_inputs_prove() -> None:
    assert proves(prove(b"s", "member", NONCES, CLAIM), prove(b"s", "member", NONCES, CLAIM))


def test_every_input_matters() -> None:
    good = prove(b"s", "member", NONCES, CLAIM)
    others = [
        prove(b"t", "member", NONCES, CLAIM),
        prove(b"s", "leader", NONCES, CLAIM),
        prove(b"s", "member", NONCES[::-1], CLAIM),
        *(
            prove(b"s", "member", NONCES, (*CLAIM[:i], CLAIM[i] + 1, *CLAIM[i + 1 :]))  # type: ignore[arg-type]
            for i in range(4)
        ),
    ]
    assert not any(proves(other, good) for other in others)
    assert len({*others}) == len(others)


def test_nonces_differ() -> None:
    assert nonce() != nonce()


def test_parts_cannot_flow_into_each_other() -> None:
    shifted = (NONCES[0] + NONCES[1][:1], NONCES[1][1:])
    assert prove(b"s", "member", shifted, CLAIM) != prove(b"s", "member", NONCES, CLAIM)
