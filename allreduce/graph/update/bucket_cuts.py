"""Cut a new arena into buckets by size or by variable names, equally on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from allreduce import events
from allreduce.comm import world
from allreduce.devices import options
from allreduce.errors import did_you_mean
from allreduce.graph.consistency.rank_check import Fact, compare, mismatch
from allreduce.graph.core import pass_switches
from allreduce.graph.core.naming import own_part
from allreduce.graph.update.host import Host
from allreduce.graph.update.update import UpdateRule
from allreduce.reduction import BUCKET_BYTES, Bucket, Layout, cut_buckets, plan_buckets


def choose_buckets(host: Host, rule: UpdateRule, layout: Layout) -> tuple[Bucket, ...]:
    """Cut a new arena into buckets.

    Args:
        host: The replicas of this process.
        rule: The optimizer.
        layout: The arena's layout.
    """
    if not pass_switches.is_on("bucket"):
        return plan_buckets(layout, 0)
    chosen = options.current().buckets
    if not isinstance(chosen, tuple):
        return plan_buckets(layout, BUCKET_BYTES if chosen is None else chosen)
    named = [i for i, span in enumerate(layout.spans) if _is_named(span.name, chosen)]
    if named or not chosen:
        return cut_buckets(layout, [i for i in named if i])
    if host.replicas[0].id == 0 and len(layout.spans) > 1:
        _warn_of_unknown(rule, layout, chosen)
    return plan_buckets(layout, BUCKET_BYTES)


def _is_named(name: str, chosen: Sequence[str]) -> bool:
    return name in chosen or own_part(name) in chosen


def _warn_of_unknown(rule: UpdateRule, layout: Layout, chosen: Sequence[str]) -> None:
    """Warn if no variable has a chosen name, unless names of another optimizer's are meant."""
    shown = ", ".join(map(repr, chosen[:3])) + (", ..." if len(chosen) > 3 else "")
    near = did_you_mean(chosen[0], [span.name for span in layout.spans])
    events.logger.warning(
        "%s: no bucket begins with %s, as it updates no variable of such a name: buckets are cut "
        "by size%s",
        *(type(rule).__name__, shown, near),
    )


def agree_on_cuts(host: Host, buckets: Sequence[Bucket]) -> None:
    """Check that all ranks cut a new arena equally.

    Args:
        host: The replicas of this process.
        buckets: The arena's buckets.

    Raises:
        MismatchError: `ar.config.set_buckets` is not the same on all ranks; on all of them.
    """
    if len(host.devices) == host.num_replicas_in_sync:
        return
    chosen, here = options.current().buckets, world().rank
    how = f"ar.config.set_buckets({list(chosen) if isinstance(chosen, tuple) else chosen!r})"
    if not pass_switches.is_on("bucket"):
        how = 'ar.config.passes["bucket"] = False'
    cuts = str([each.first for each in buckets])
    facts = {"the choice of buckets": Fact(how, "choose alike on every rank", cuts)}

    def one(index: int) -> None:
        communicator = host.replicas[index].communicator
        assert communicator is not None, "one of several"
        facts_by_rank = compare(communicator, here, "where buckets are cut", facts)
        if len({fact.shown for each in facts_by_rank.values() for fact in each.values()}) > 1:
            raise mismatch(
                f"rank {here}", facts_by_rank
            )  # otherwise variables differ, which the step checksum reports

    host.on_replicas(one)
