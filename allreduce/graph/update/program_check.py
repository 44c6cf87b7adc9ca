"""Check that all ranks have the same step and variables before they exchange values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allreduce.comm import Communicator, adopt, world
from allreduce.devices import read, write
from allreduce.errors import UsageError, everywhere
from allreduce.graph.consistency.rank_check import Fact, Facts, check, hash_of
from allreduce.graph.core.naming import own_part
from allreduce.graph.core.spec import show
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.host import Host

_REMEDY = "make the same model, and use the same variables, on every rank"
_KNOWN_ROWS = "make the batches with strategy.distribute_dataset"


class Agreement:
    """The digest of a step that ranks compare in every run.

    Args:
        program: The facts of the step's program.
        joins_rows: Whether the step needs the number of rows of all replicas.
    """

    def __init__(self, program: Facts, joins_rows: bool) -> None:
        self.program = program
        self.joins_rows = joins_rows
        self.hash = hash_of(program)


def check_same(communicator: Communicator, rank: int, variables: Sequence[Variable]) -> None:
    """Compare the names, shapes and dtypes of variables in one collective.

    Args:
        communicator: The replicas' communicator; all members call this.
        rank: This process's rank, for messages.
        variables: The variables that the members are about to share, in order.

    Raises:
        MismatchError: They differ; the message names the first difference. On all members.
    """
    facts: dict[str, Fact] = {}
    for place, variable in enumerate(variables):
        kind = f"{variable.dtype.name} {show(variable.shape)}"
        compared = f"{own_part(variable.name)} {kind}"
        fact = Fact(f"{variable.name!r}, {kind},", _REMEDY, compared)
        facts[f"variable {place} of the step"] = fact
    check(communicator, rank, "the step's variables", facts)


def compare(host: Host, step: Agreement, knows_rows: bool) -> None:
    """Check that all ranks run the same program, in each run of a step without an optimizer.

    With an optimizer, `StepChecksum` does so. Without this check, exchanged values could be mixed
    up silently, and assigned variables could drift apart. The check is made in every run: a rank
    that has traced the step before may meet one that traces it now, for another shape.

    Args:
        host: This process's replicas.
        step: The step that they are about to run.
        knows_rows: Whether the number of rows of all replicas is known.

    Raises:
        MismatchError: Ranks have traced different programs, or only some know the number of rows.
        UsageError: No rank knows the number of rows, and the step needs it.
    """
    lacks, here = step.joins_rows and not knows_rows, world().rank

    def one(index: int) -> None:
        replica = host.replicas[index]
        assert replica.communicator is not None
        brought, digest = replica.rank_digest, step.hash.copy()
        digest.update(b"%d %d" % (brought.digest, lacks))

        def facts() -> Facts:
            rows = Fact("not known" if lacks else "known", _KNOWN_ROWS)
            joined = {"the number of rows of all replicas, which the step gathers,": rows}
            return {**step.program, **joined, **brought.facts()}

        check(replica.communicator, here, "the step", facts, digest.digest())

    host.on_replicas(one)
    if lacks:
        raise everywhere(
            UsageError(
                f"rank {here}: the step gathers the rows of all replicas, and how many there are "
                f"is not known on any rank; {_KNOWN_ROWS}"
            )
        )


def synchronize(host: Host, variables: Sequence[Variable]) -> None:
    """Give every replica the values that replica 0 has, once per variable.

    Raises:
        MismatchError: Ranks have different variables.
    """
    fresh = [variable for variable in variables if variable not in host.shared]
    if host.num_replicas_in_sync > 1 and fresh:
        several_ranks = len(host.devices) < host.num_replicas_in_sync

        def receive(index: int) -> None:
            communicator = host.replicas[index].communicator
            assert communicator is not None
            if several_ranks:  # replicas of one process have the same variables
                check_same(communicator, world().rank, fresh)
            for variable in fresh:
                place = variable.storage[index]
                value = place if type(place) is np.ndarray else read(place)
                adopt(communicator, f"the first value of {own_part(variable.name)}", value)
                if value is not place:
                    write(place, value)

        host.on_replicas(receive)
    host.shared.update(fresh)
