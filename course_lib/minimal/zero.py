"""ZeRO-1, ZeRO-2 and ZeRO-3 without options: one flat parameter per unit, one shard of it per rank.

A trainer has `backward(micro_batches)`, which leaves gradients, `update()`, which makes the step, and
`full_parameters()`. The engine in parallel/zero.py adds buckets, overlap, prefetch, ties and loading.

Source   Rajbhandari et al. 2020 (arXiv:1910.02054), section 5
"""

from torch import nn

from course_lib import comm
from course_lib.minimal.data import DataParallel, when_all_arrived
from course_lib.parallel.shards import flatten_and_pad, my_shard, views_into


def units_of(model):
    """Return the parts of a Llama in the order in which they run."""
    return [model.embed, *model.blocks, model.norm, model.head]


class FlatParameter:
    """The parameters of one unit in one buffer, of which this rank owns one shard."""

    def __init__(self, params, group):
        self.params, self.group = list(params), group
        tensors = [param.detach() for param in self.params]
        self.flat_P = flatten_and_pad(tensors, group.size())
        views = views_into(self.flat_P, tensors)
        for param, view in zip(self.params, views, strict=True):
            param.data = view  # the model now reads its weights from flat_P
        self.shard_p = nn.Parameter(my_shard(self.flat_P, group))

    def reduce_scatter(self):
        """Give each rank its shard of the mean gradient, and free the full gradient."""
        grads = [param.grad for param in self.params]
        grad_P = flatten_and_pad(grads, self.group.size())
        grad_p = comm.reduce_scatter(grad_P, self.group, op="mean")
        before_p = self.shard_p.grad
        self.shard_p.grad = grad_p if before_p is None else before_p + grad_p
        for param in self.params:
            param.grad = None

    def all_gather(self):
        """Fill flat_P with the shards of all ranks; my shard may lie inside it."""
        comm.all_gather_into(self.flat_P, self.shard_p.detach(), self.group)


class Zero1(DataParallel):
    """Stage 1: optimizer states are sharded."""

    def __init__(self, model, make_optimizer, group):
        self.model = model
        units = units_of(model)
        self.flats = [FlatParameter(unit.parameters(), group) for unit in units]
        self.optimizer = make_optimizer([flat.shard_p for flat in self.flats])

    def update(self):
        """Reduce-scatter the gradients, update one shard, all-gather the parameters."""
        for flat in self.flats:
            flat.reduce_scatter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


class Zero2(Zero1):
    """Stage 2: gradients are sharded too, while backward still runs."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for flat in self.flats:
            when_all_arrived(flat.params, flat.reduce_scatter)

    def update(self):
        """Update one shard, all-gather the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            flat.all_gather()


def free(flat):
    """Give the memory of the full parameters back; their tensors stay."""
    flat.flat_P.untyped_storage().resize_(0)


def gather(flat):
    """Take the memory again and fill it with the shards of all ranks."""
    flat.flat_P.untyped_storage().resize_(flat.flat_P.nbytes)
    flat.all_gather()


def gather_use_free(unit, flat):
    """Keep the parameters of a unit full only while the unit computes."""

    def after_forward(module, inputs, output):
        free(flat)
        output.register_hook(lambda grad: gather(flat))  # when backward comes here

    unit.register_forward_pre_hook(lambda module, inputs: gather(flat))
    unit.register_forward_hook(after_forward)
    when_all_arrived(flat.params, lambda: free(flat))


class Zero3(Zero2):
    """Stage 3: parameters are sharded too; a unit is full only while it computes."""

    def __init__(self, model, make_optimizer, group):
        super().__init__(model, make_optimizer, group)
        for unit, flat in zip(units_of(model), self.flats, strict=True):
            flat.shard_p.data = flat.shard_p.detach().clone()  # flat_P will be freed
            free(flat)
            gather_use_free(unit, flat)

    def update(self):
        """Update one shard; the next forward gathers what it needs."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameters(self):
        """Gather every unit and return every parameter by its name."""
        for flat in self.flats:
            gather(flat)
        return super().full_parameters()  # from the model, as DataParallel does
