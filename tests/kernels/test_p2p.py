"""Sends and recvs of the shared transport with members as threads, under the sanitizers."""

from __future__ import annotations

import pytest

from tests.kernels.test_protocol import SANITIZERS, Builder, build, run

__all__ = ["build"]  # the fixture


@pytest.mark.torture  # compiling it twice takes minutes of the time that CI has
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_p2p(build: Builder, sanitizer: str) -> None:
    assert run([build("p2p_test", sanitizer), "10"], timeout=1200) == "ok\n"
