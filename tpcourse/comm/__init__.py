"""What ranks say to each other: groups, and collectives that autograd can run backward."""

from tpcourse.comm.functions import (CONJUGATES, all_gather, all_reduce, all_to_all, broadcast,
                                     copy_to_region, gather_from_region, recv, reduce, reduce_from_region,
                                     reduce_scatter, ring_shift, scatter_to_region, send)
from tpcourse.comm.groups import (Group, describe, even_sizes, group_of, group_rank, group_size, my_slice,
                                  split_sizes)
from tpcourse.comm.placement import Placement
from tpcourse.comm.random import JointStates, RandomStates
from tpcourse.comm.redistribute import redistribute

__all__ = [
    "CONJUGATES", "Group", "JointStates", "Placement", "RandomStates", "all_gather", "all_reduce",
    "all_to_all", "broadcast", "copy_to_region", "describe", "even_sizes", "gather_from_region", "group_of",
    "group_rank", "group_size", "my_slice", "recv", "redistribute", "reduce", "reduce_from_region",
    "reduce_scatter", "ring_shift", "scatter_to_region", "send", "split_sizes",
]
