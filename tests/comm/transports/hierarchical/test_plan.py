"""Plans of two levels, carried out by one thread for all members, on arrays of a few elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from allreduce.comm.calls.call import Call
from allreduce.comm.transports.hierarchical import steps as hierarchical_steps
from allreduce.comm.transports.hierarchical.chains import make_chains
from allreduce.comm.transports.hierarchical.layout import Layout
from allreduce.comm.transports.hierarchical.steps import Chain, Division, Part, Step

Array = NDArray[Any]
HOSTS = ("aabb", "aab", "aaabb", "abab", "abba", "abbba", "abc", "aaa", "a")


def starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


def carried_out(call: Call, xs: list[Array | None]) -> list[Array | None]:
    """Return each member's result of a collective, from all inputs."""
    size, name, root = len(xs), call.collective, call.root or 0
    brought = [np.empty(0) if x is None else x for x in xs]
    counts = call.counts or (call.count,) * size
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        total = np.sum(brought, axis=0) / (size if call.op == "mean" else 1)
        if name == "reduce_scatter":
            at = starts(counts)
            return [total[at[i] : at[i + 1]] for i in range(size)]
        return [total if name == "all_reduce" or i == root else None for i in range(size)]
    if name == "all_gather":
        return [np.concatenate(brought)] * size
    if name == "scatter":  # of a broadcast, within the root's host
        at = starts(counts)
        return [brought[root][at[i] : at[i + 1]] for i in range(size)]
    if name == "gather":  # of a reduce, within the root's host
        return [np.concatenate(brought) if i == root else None for i in range(size)]
    assert name == "broadcast"
    return [brought[root]] * size


class Member:
    """One member's chains, as far as they have come."""

    def __init__(self, chains: Sequence[Chain], x: Array | None, out: Array | None) -> None:
        self.chains, self.position = list(chains), [0] * len(chains)
        given: dict[str, Array | None] = {"x": x, "out": out}
        self.arrays = [
            given | {name: np.full(count, np.nan) for name, count in chain.memory.items()}
            for chain in chains
        ]

    def part(self, chain: int, part: Part | None) -> Array | None:
        if part is None:
            return None
        array = self.arrays[chain][part.array]
        assert array is not None, part
        found: Array = array[part.start : part.stop]
        assert found.size == part.count, part
        return found

    def go(self) -> None:
        """Take all steps that need no other member."""
        for number, chain in enumerate(self.chains):
            while self.position[number] < len(chain.steps):
                step = chain.steps[self.position[number]]
                if isinstance(step, Step):
                    break
                if isinstance(step, Division):
                    array = self.part(number, step.target)
                    assert array is not None
                    array /= step.by
                else:
                    for source, target in step.pairs:
                        into = self.part(number, target)
                        assert into is not None
                        into[...] = self.part(number, source)
                self.position[number] += 1


def simulate(call: Call, layout: Layout, xs: list[Array | None], outs: list[Array | None]) -> None:
    """Carry a call out; every level takes the steps of its members in their order."""
    members = [Member(make_chains(call, layout, me), xs[me], outs[me]) for me in range(layout.size)]
    queues: dict[tuple[str, tuple[int, ...], int], list[tuple[int, Step]]] = defaultdict(list)
    groups: dict[tuple[str, tuple[int, ...]], None] = {}
    for me, member in enumerate(members):
        host, position = layout.places[me]
        has_lane = position < layout.lanes
        lane = tuple(sorted(one[position] for one in layout.hosts)) if has_lane else ()
        for number, chain in enumerate(member.chains):
            for step in chain.steps:
                if isinstance(step, Step):
                    group = lane if step.level == "across" else layout.hosts[host]
                    groups[step.level, group] = None
                    queues[step.level, group, me].append((number, step))
    left = True
    while left:
        left = False
        for member in members:
            member.go()
        for level, group in groups:
            heads = [queues[level, group, me][:1] for me in group]
            ready = all(
                head
                and members[me].chains[head[0][0]].steps[members[me].position[head[0][0]]]
                is head[0][1]
                for me, head in zip(group, heads, strict=True)
            )
            if ready:
                left = True
                take(group, members, [queues[level, group, me].pop(0) for me in group])
    assert all(m.position == [len(chain.steps) for chain in m.chains] for m in members), "stuck"


def take(group: tuple[int, ...], members: list[Member], steps: list[tuple[int, Step]]) -> None:
    """Carry out one call of one level, after looking that its members make the same."""
    calls = [step.call for _, step in steps]
    first = calls[0]
    exchange = first.collective == "all_to_all"
    for one in calls:
        assert (one.collective, one.op, one.root, one.count) == (
            *(first.collective, first.op, first.root, first.count),
        )
        assert exchange or one.counts == first.counts
    taken = list(zip(group, steps, strict=True))
    xs = [members[me].part(chain, step.source) for me, (chain, step) in taken]
    if exchange:
        results: list[Array | None] = []
        for i, one in enumerate(calls):
            parts = []
            for j, other in enumerate(calls):
                assert other.counts is not None
                assert one.receives is not None
                assert other.counts[i] == one.receives[j]
                x = xs[j]
                assert x is not None
                parts.append(x[starts(other.counts)[i] : starts(other.counts)[i + 1]])
            results.append(np.concatenate(parts))
    else:
        results = carried_out(first, [None if x is None else x.copy() for x in xs])
    for me, (chain, step), result in zip(group, steps, results, strict=True):
        out = members[me].part(chain, step.target)
        if out is not None:
            assert result is not None
            assert out.size == result.size
            out[...] = result
        members[me].position[chain] += 1


def check(call: Call, layout: Layout) -> None:
    """Carry a call out by its plan, and compare with the expected result."""
    size = layout.size
    counts = call.counts or (call.count,) * size
    cuts, joins = call.collective == "reduce_scatter", call.collective == "all_gather"
    xs: list[Array | None] = []
    outs: list[Array | None] = []
    for me in range(size):
        gives = sum(counts) if cuts else counts[me] if joins else call.count
        gets = counts[me] if cuts else sum(counts) if joins else call.count
        is_root = me == call.root
        brings = call.collective != "broadcast" or is_root
        xs.append(np.arange(gives) * 1.0 + 100 * me if brings else None)
        takes = call.collective != "reduce" or is_root
        outs.append(np.full(gets, np.nan) if takes else None)
    expected = carried_out(call, xs)
    given_x = [None if x is None else x.copy() for x in xs]
    simulate(call, layout, xs, outs)
    for me in range(size):
        if outs[me] is not None:
            wanted = expected[me]
            assert wanted is not None
            np.testing.assert_array_equal(outs[me], wanted)
        np.testing.assert_array_equal(xs[me], given_x[me])


def calls(size: int, count: int) -> list[Call]:
    counts = tuple((count * (member + 2)) % 5 for member in range(size))
    found = [Call("all_reduce", op, "float64", count, None, "g") for op in ("sum", "mean")]
    for counted in (None, counts):
        total = count if counted is None else sum(counts)
        found += [
            Call("all_gather", None, "float64", total, None, "g", counted),
            Call("reduce_scatter", "sum", "float64", total, None, "g", counted),
            Call("reduce_scatter", "mean", "float64", total, None, "g", counted),
        ]
    for root in range(size):
        found += [
            Call("reduce", "mean", "float64", count, root, "g"),
            Call("broadcast", None, "float64", count, root, "g"),
        ]
    return found


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("large", [False, True])
def test_plans_do_what_the_call_means(
    monkeypatch: pytest.MonkeyPatch, hosts: str, large: bool
) -> None:
    if large:  # as if each of these few elements were thousands
        monkeypatch.setattr(hierarchical_steps, "CHUNK", 3 * 8)
        monkeypatch.setattr("allreduce.comm.transports.hierarchical.whole.ONE_LANE", 0)
    layout = Layout.of(hosts)
    for count in (0, 1, 7, 16):
        make_chains.cache_clear()
        for call in calls(layout.size, count):
            check(call, layout)
    make_chains.cache_clear()


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=9),
    st.lists(st.integers(0, 6), min_size=9, max_size=9),
)
def test_plans_of_any_layout_and_shares(hosts: list[int], counts: list[int]) -> None:
    layout = Layout.of(hosts)
    shares = tuple(counts[: layout.size])
    for name, op in (("all_gather", None), ("reduce_scatter", "sum")):
        check(Call(name, op, "float64", sum(shares), None, "g", shares), layout)


def test_lanes_are_as_many_as_the_smallest_host_has_members() -> None:
    layout = Layout.of("abbab")
    assert layout.hosts == ((0, 3), (1, 2, 4))
    assert (layout.lanes, layout.lane(0), layout.lane(1)) == (2, (0, 1), (1, 0))
    assert (layout.carried(1, 0), layout.carried(1, 1)) == ((1, 4), (2,))


def test_large_calls_are_cut_and_bounded() -> None:
    layout = Layout.of("aabb")
    chains = make_chains(Call("all_reduce", "sum", "float32", 1 << 22, None, "g"), layout, 0)
    assert len(chains) == (1 << 24) // hierarchical_steps.CHUNK
    memory = [sum(chain.memory.values()) * 4 for chain in chains]
    assert max(memory) <= 3 * hierarchical_steps.CHUNK


def test_16_bit_sums_are_not_rounded_between_the_levels() -> None:
    (chain,) = make_chains(
        Call("all_reduce", "sum", "bfloat16", 5000, None, "g"), Layout.of("aabb"), 0
    )
    between = [step.call.dtype for step in chain.steps if isinstance(step, Step)]
    assert (chain.dtype, set(between)) == ("float32", {"float32"})


@pytest.mark.parametrize("hosts", ["aabb", "aabbcc", "aaaabbbb"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_working_memory_is_what_the_documents_say(hosts: str, dtype: str) -> None:
    layout = Layout.of(hosts)
    n, lanes, count = layout.size, layout.lanes, 48 * 5000
    whole = count * 4  # in float32
    wide = dtype == "float16"
    for member, (host, _) in enumerate(layout.places):
        root = member == 0
        expected = {
            "all_reduce": whole // lanes + wide * 2 * whole,
            "reduce": (1 + (host == 0)) * whole // lanes + wide * (1 + root) * whole,
            "reduce_scatter": whole + whole // lanes + wide * whole // n,
            "broadcast": whole // lanes,
            "all_gather": whole + whole // lanes,
            "gather": 0,
            "scatter": 0,
            "all_to_all": 0,
        }
        for name, nbytes in expected.items():
            op = "sum" if "reduce" in name else None
            share = name not in ("all_reduce", "reduce", "broadcast")
            target = 0 if name in ("reduce", "broadcast", "gather", "scatter") else None
            own = dtype if op else "float32"
            call = Call(name, op, own, count // n if share else count, target, "g")
            (chain,) = make_chains(call, layout, member)
            assert chain.nbytes == nbytes, (name, member)
