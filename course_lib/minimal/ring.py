"""All-reduce in two forms, without options: through rank 0, and around a ring of ranks.

The course's own collectives are in comm/; PyTorch's all-reduce is `torch.distributed.all_reduce`.

Source   Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
"""

import torch
import torch.distributed as dist


def all_reduce_through_rank_0(x_P, group):
    """Return the sum over the group: rank 0 receives, adds, and sends the result."""
    total_P = x_P.clone()
    if group.rank() == 0:
        arrived_P = torch.empty_like(x_P)
        for other in range(1, group.size()):
            dist.recv(arrived_P, group_src=other, group=group)
            total_P += arrived_P
        for other in range(1, group.size()):
            dist.send(total_P, group_dst=other, group=group)
    else:
        dist.send(x_P, group_dst=0, group=group)
        dist.recv(total_P, group_src=0, group=group)
    return total_P


def send_and_receive(outgoing, dst, incoming, src, group):
    """Send to one rank and receive from another, both at the same time."""
    messages = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=dst),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=src),
    ]
    for work in dist.batch_isend_irecv(messages):
        work.wait()


def reduce_scatter_step(pieces, step, group):
    """Send a partial sum to the right; add what comes from the left to mine."""
    rank, size = group.rank(), group.size()
    outgoing, mine = pieces[(rank - 1 - step) % size], pieces[(rank - 2 - step) % size]
    arrived = torch.empty_like(mine)
    send_and_receive(outgoing, (rank + 1) % size, arrived, (rank - 1) % size, group)
    mine += arrived


def all_gather_step(pieces, step, group):
    """Send a finished piece to the right; store what comes from the left."""
    rank, size = group.rank(), group.size()
    outgoing, mine = pieces[(rank - step) % size], pieces[(rank - 1 - step) % size]
    send_and_receive(outgoing, (rank + 1) % size, mine, (rank - 1) % size, group)


def ring_all_reduce(x_P, group):
    """Return the sum over the group on every rank, in 2 (G - 1) steps."""
    total_P = x_P.clone()
    pieces = total_P.tensor_split(group.size())  # views: they share memory with total_P
    for step in range(group.size() - 1):
        reduce_scatter_step(pieces, step, group)
    for step in range(group.size() - 1):
        all_gather_step(pieces, step, group)
    return total_P
