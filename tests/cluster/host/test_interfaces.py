"""How hosts choose the addresses by which they reach each other."""

from __future__ import annotations

import pytest

from allreduce.cluster.host import interfaces
from allreduce.cluster.host.interfaces import Interface, leaders_address, reachable
from allreduce.errors import UsageError

DOCKER = Interface("docker0", "172.17.0.1", "255.255.0.0")  # every host has it


def on(*addresses: str) -> list[Interface]:
    return [Interface(f"eth{i}", one, "255.255.255.0") for i, one in enumerate(addresses)]


def nowhere(host: str) -> str | None:
    return None


def test_a_network_that_all_hosts_are_on_is_chosen() -> None:
    mine = [DOCKER, *on("192.168.7.1", "10.0.0.1")]
    others = [[DOCKER, *on("192.168.7.2", "10.0.0.2")], [DOCKER, *on("10.0.0.3")]]
    assert reachable(mine, others, nowhere) == "10.0.0.1"


def test_a_bridge_that_every_host_has_is_no_way() -> None:
    assert reachable([DOCKER], [[DOCKER]], nowhere) is None


def test_a_route_will_do_where_no_network_is_common() -> None:
    def route(host: str) -> str | None:
        return {"10.2.0.1": "10.1.0.1"}.get(host)

    assert reachable(on("10.1.0.1"), [on("10.2.0.1")], route) == "10.1.0.1"


def test_a_leader_for_one_host_stays_on_it() -> None:
    assert leaders_address(["a", "a"], [on("10.0.0.1"), on("10.0.0.1")]) == "127.0.0.1"


def test_hosts_that_nothing_connects_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "source_address", nowhere)
    with pytest.raises(UsageError, match=r"set ALLREDUCE_TCP_INTERFACE .* there are lo"):
        leaders_address(["a", "b"], [on("10.1.0.1"), on("10.2.0.1")])


def test_an_interface_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLREDUCE_TCP_INTERFACE", "gone0")
    with pytest.raises(UsageError, match="ALLREDUCE_TCP_INTERFACE='gone0' is no interface"):
        leaders_address(["a", "b"], [on("10.0.0.1"), on("10.0.0.2")])
