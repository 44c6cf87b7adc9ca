"""Plans of the shared transport: the native plan (kernels/shm/plan.cpp), in words."""

from __future__ import annotations

from allreduce import _native
from allreduce.comm.calls.call import PATHS, Call, native_words
from allreduce.comm.calls.plan import Placed, Plan, Topology
from allreduce.comm.selection.choosing import Choices
from allreduce.events import counted

# The native names of steps. `chunks` and `size` count the call's chunks and members; `past` says
# whether a step bypasses the caches when storing.
_STEPS = {
    "copy_input": "copy the input to the output",
    "post": "post the call, and wait until all have posted the same",
    "add_to_post": "the own input travels with the post",
    "reduce_posts": "reduce the data of all {size} posts",
    "copy_posts": "copy out the data of the posts",
    "reduce_slices": "reduce the own slice from all {size} inputs straight into all outputs",
    "reduce_share_in_place": "reduce the own share from all {size} inputs",
    "copy_in_place": "copy this rank's parts from the inputs{past}",
    "wait_for_all": "wait until all have done their part",
    "pull": "copy this rank's parts out of the others' arrays",
    "wait_for_readers": "wait until the others have copied theirs",
    "copy_own": "copy the own part to the output{past}",
    "exchange": "copy the other rank's part into places that it has filled, in {chunks}",
    "reduce_exchanged": "reduce its part with the own input",
    "copy_exchanged": "copy its part out{past}",
    "stage": "copy the others' parts into the own ring, in {chunks}",
    "reduce_staged": "reduce the own share of each chunk from all {size} rings",
    "copy_staged": "copy this rank's parts from the rings, in {chunks}{past}",
    "stage_others": "copy the others' slices of {chunks} into the own ring",
    "reduce_in_rings": "reduce the own slice of each chunk from all {size} rings, into all of them",
    "copy_reduced": "copy the others' results out of the own ring",
    "write_letter": "write it into the receiver's box",
    "read_letter": "copy it out of the own box",
    "offer_in_place": "offer it, and wait until its receiver has copied it",
    "offer": "offer it, and wait until a recv accepts it",
    "accept": "accept the offer",
    "fill_windows": "copy it into windows, by chunks",
    "empty_windows": "copy the message out of windows, or of symmetric memory",
}


def plan_shared(call: Call, topology: Topology, choices: Choices, placed: Placed) -> Plan:
    """Plan a call between threads and processes of one host."""
    where = (topology.rank, topology.size, placed.symmetric, placed.in_place)
    path, chunk, streams, number, staging, steps = _native.shared_plan(
        native_words(call), choices.native, *where
    )
    chunks = counted(number, "chunk")
    told = [
        _STEPS[name].format(
            size=topology.size, chunks=chunks, past=", past the caches" if past else ""
        )
        for name, past in steps
    ]
    return Plan(
        *(str(call), "shared", PATHS[path], tuple(told)),
        chunk=chunk,
        stores="streaming" if streams else "ordinary",
        sent=0,
        staging=staging,
    )
