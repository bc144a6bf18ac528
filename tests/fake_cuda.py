"""Fake CUDA tensors with numbers: what a program does on a GPU, device by device, on a machine that has none.

    with cuda_rank(0, 4):                # rank 0 of 4, each with a GPU of its own and NCCL; nobody else exists
        torch.zeros(2) + torch.zeros(2, device="cpu")        # raises, as it would there

FakeTensorMode gives each tensor a device and enforces CUDA's rules. Programs branch on numbers, so every storage has a
twin on the CPU: an operator runs on the fake tensors for their devices, and on the twins for the numbers. What other
ranks send is what this one would (course_lib/simulate/fake_world.py).

Autograd asks for a device's streams, which a PyTorch without CUDA lacks. It is therefore told that these tensors are on
an accelerator written in Python; only Python sees "cuda". That accelerator cannot be taken back: use a process for it.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, wraps
from types import SimpleNamespace
from unittest import mock

import accelerate
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode, _pop_mode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from course_lib import checkpoint, model
from course_lib.comm import records
from course_lib.devices import set_rank_device
from course_lib.measure.storages import is_dtensor
from course_lib.native import pipeline as native_pipeline
from course_lib.parallel import expert, five_d, pipeline, tensor, whole
from course_lib.simulate.fake_world import ASK_DEVICE, let_arrive
from course_lib.weights import loading, tensor_files

STAND_IN = "standin"  # the accelerator that autograd believes in
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException)
NO_CUDA = "PyTorch is not linked with support for cuda devices"  # of a decomposition inside the fake mode
DRAWN_IN_PLACE = ("aten::uniform_", "aten::normal_", "aten::random_", "aten::bernoulli_", "aten::exponential_")
UNFILLED = ("aten::empty", "aten::new_empty")  # zeros: what is in them must be no index out of range
ALL_TO_ALL = torch.ops.c10d.alltoall_base_.default
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class WrongDevice(RuntimeError):
    """What CUDA would refuse and fake tensors let pass."""


class WithNumbers(TorchDispatchMode):
    """Runs each operator twice: on fake tensors, which know devices, and on their twins, which have numbers."""

    def __init__(self, fakes: FakeTensorMode):
        super().__init__()
        self.fakes = fakes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ASK_DEVICE and isinstance(args[0], FakeTensor) and args[0].fake_mode is self.fakes:
            device = args[0].fake_device
            return torch.device(STAND_IN, 0) if device.type == "cuda" else device
        if any(is_dtensor(kind) for kind in types):
            return NotImplemented  # it becomes operators on local tensors, which come here again
        kwargs = kwargs or {}
        kwargs.pop("pin_memory", None)
        leaves = list(leaves_of((args, kwargs)))
        if any(x.fake_mode is not self.fakes for x in leaves if isinstance(x, FakeTensor)):
            return func(*args, **kwargs)  # DTensor tries shapes in a mode of its own
        args, kwargs = mapped(seen_from_python, (args, kwargs))
        if all_on_meta(leaves, kwargs.get("device")):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is ALL_TO_ALL and not args[1].numel():
            args = without_rows(*args)
        twin_out = self.run_twins(func, args, kwargs)
        try:
            check_generator(func, kwargs)
            check_index(func, args)
            out = args[0] if func._schema.name in DRAWN_IN_PLACE else func(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NEEDS_NUMBERS) and NO_CUDA not in str(error):
                raise_after_backward(error)
            device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
            with self.fakes:  # DeviceMesh looks at its ranks without it
                out = tree_map(lambda x: fake_like(x, device), twin_out)
        if twin_out is None or func._schema.name.startswith(UNFILLED):
            return out  # nothing to write: where nobody has written, numbers are zeros
        with unset_fake_temporarily():
            for mine, its_twin in zip(tree_leaves(out), tree_leaves(twin_out), strict=True):
                if isinstance(mine, FakeTensor) and isinstance(its_twin, torch.Tensor):
                    mine.constant = None  # torch would compute with it in reality
                    keep_numbers(mine, its_twin)
        return out

    @staticmethod
    def run_twins(func, args: tuple, kwargs: dict):
        """What the operator makes of the numbers; None where it is one that only GPUs have: then they are zeros."""
        with unset_fake_temporarily():
            twin_args, twin_kwargs = mapped(twin, (args, kwargs))
            try:
                twin_out = func(*twin_args, **twin_kwargs)
            except NotImplementedError:
                return None
            except RuntimeError as error:
                return raise_after_backward(error)
            if func._schema.name.startswith(UNFILLED):
                twin_out.zero_()
            if func.namespace == "c10d":
                with suppress(RuntimeError):  # to a neighbour alone: then what would come back is zeros
                    let_arrive(func, twin_args, twin_kwargs)
        return twin_out


def leaves_of(arguments) -> Iterator:
    """An operator's arguments, one by one; with torch's own trees all takes a sixth longer."""
    if isinstance(arguments, dict):
        arguments = arguments.values()
    elif not isinstance(arguments, list | tuple):
        yield arguments
        return
    for one in arguments:
        yield from leaves_of(one)


def mapped(change, arguments):
    """An operator's arguments with each of them changed."""
    if isinstance(arguments, dict):
        return {name: mapped(change, one) for name, one in arguments.items()}
    if isinstance(arguments, list | tuple):
        return (list if isinstance(arguments, list) else tuple)(mapped(change, one) for one in arguments)
    return change(arguments)


def without_rows(output: Tensor, empty: Tensor, group, *sizes_and_options) -> tuple:
    """Of a rank that sends nothing: a fake group fills the output with what is sent, so this one stays zeros."""
    sizes = ([0] * len(of_ranks) for of_ranks in sizes_and_options[:2])
    return empty, empty, group, *sizes, *sizes_and_options[2:]


def all_on_meta(leaves: list, device: torch.device | str | None) -> bool:
    """Modules are made with such tensors, and have no numbers anyway."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if device is None:
        return bool(tensors) and all(not isinstance(x, FakeTensor) and x.is_meta for x in tensors)
    return torch.device(device).type == "meta"


def seen_from_python(leaf):
    """The device that Python sees in place of autograd's; all else as it is."""
    return torch.device("cuda", 0) if isinstance(leaf, torch.device) and leaf.type in (STAND_IN, "cuda") else leaf


def twin(leaf):
    """What stands on the CPU for an argument of an operator."""
    if isinstance(leaf, torch.device):
        return torch.device("cpu") if leaf.type == "cuda" else leaf
    if not isinstance(leaf, FakeTensor):
        return leaf
    size, stride, dtype = leaf.size(), leaf.stride(), leaf.dtype
    if leaf.fake_device.type == "meta":
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")
    numbers = numbers_of(leaf.untyped_storage())
    return torch.empty(0, dtype=dtype, device="cpu").set_(numbers, leaf.storage_offset(), size, stride)


def numbers_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The bytes of a fake storage: zeros where nobody has written."""
    numbers = getattr(storage, "numbers", None)
    if numbers is None:
        numbers = torch.zeros(storage.nbytes(), dtype=torch.uint8, device="cpu").untyped_storage()
        storage.numbers = numbers  # it lives as long as the fake one
    elif numbers.nbytes() < storage.nbytes():  # FSDP frees and refills whole parameters so
        numbers.resize_(storage.nbytes())
    return numbers


def keep_numbers(fake: FakeTensor, its_twin: Tensor) -> None:
    """Write what an operator made into the twin of its output; a view or a changed argument has it already."""
    if fake.fake_device.type != "meta" and not its_twin.is_meta and not hasattr(fake.untyped_storage(), "numbers"):
        twin(fake).copy_(its_twin)


RAISED: list[Exception] = []  # in the backward pass that runs


def raise_after_backward(error: Exception) -> None:
    """In the thread that autograd has for a device an error from Python would end the process."""
    if threading.current_thread() is threading.main_thread():
        raise error
    RAISED.append(error)


def fake_like(leaf, device: torch.device | None):
    """A fake tensor of the shape that the numbers gave."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, Tensor) else leaf


def check_generator(func, kwargs: dict) -> None:
    generator, device = kwargs.get("generator"), kwargs.get("device")
    if generator is not None and device is not None and generator.device.type != torch.device(device).type:
        raise WrongDevice(f"{func}: expected a {device} generator, got one on {generator.device}")


def check_index(func, args: tuple) -> None:
    if func._schema.name not in INDEXED or args[0].device.type != "cpu":
        return
    if any(isinstance(x, Tensor) and x.device.type == "cuda" for x in args[1]):
        raise WrongDevice(f"{func}: a tensor on the CPU cannot be indexed by one on the GPU")


# --- a rank


@contextmanager
def cuda_rank(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is that rank of a world of GPUs with NCCL."""
    become_able()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for owner, name, value in PATCHES:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        fakes = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(WithNumbers(fakes))
        stack.enter_context(LiftFromCpu())
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        stack.callback(torch.set_default_device, None)
        stack.callback(set_rank_device, torch.device("cpu"))
        stack.callback(_pop_mode)
        set_rank_device(torch.device("cuda", 0))
        yield


@cache
def become_able() -> None:
    """Tell PyTorch of the stand-in, once in a process."""
    _setup_privateuseone_for_python_backend(STAND_IN)


def numbers_of_tensor(fake: FakeTensor) -> Tensor:
    """A tensor on the CPU with its numbers, to be used outside."""
    with _disable_current_modes():
        return twin(fake).clone()


def numpy_of(fake: FakeTensor, *, force: bool = False):
    if fake.device.type == "cuda" and not force:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
    with _disable_current_modes():
        return twin(fake).numpy()


def fake_is_cuda(fake: FakeTensor) -> bool:
    return fake.fake_device.type == "cuda"


def swap_tensors(old: FakeTensor, new: FakeTensor) -> None:
    """In place of torch's, which `Module.to` calls, and which refuses tensors that something refers to weakly."""
    old.data = new.data
    old.fake_device = new.fake_device


def all_gather_raw(raw_P: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    return [raw_P] * group.size()


def all_gather_bytes(text: bytes, group: dist.ProcessGroup) -> list[bytes]:
    return [text] * group.size()


def put_together(config, *args, real=whole.put_together) -> dict[str, Tensor]:
    """Whole tensors, on the device where they would be: zeros, since all ranks say that their parts are rank 0's."""
    parts = real(config, *args)
    like = next(iter(parts.values()))
    shapes = {name: param.shape for name, param in model.build(config, device="meta").named_parameters()}
    return {name: parts.get(name, like).new_zeros(shape) for name, shape in shapes.items()}


def new_group(ranks=None, *args, backend=None, make=dist.new_group, **options) -> dist.ProcessGroup:
    return make(ranks, *args, **options)


class NoStream:
    """Of CUDA's streams and events: everything is in order already."""

    def __init__(self, *args, **options):
        pass

    def __getattr__(self, name):
        return lambda *args, **options: self


class HostEvent(NoStream):
    """An event of a GPU that computes at once: the host's moment."""

    def record(self, *args) -> None:
        self.at_s = time.perf_counter()

    def elapsed_time(self, later: "HostEvent") -> float:
        return 1e3 * (later.at_s - self.at_s)


class NotFaked(Exception):
    """What cannot run on fake tensors; the text says why."""


def not_faked(why: str):
    def refuse(*args, **options):
        raise NotFaked(why)

    return refuse


def guarded(register):
    @wraps(register)
    def registered(x: Tensor, hook):
        def call(*args):
            try:
                return None if RAISED else hook(*args)
            except Exception as error:
                raise_after_backward(error)

        return register(x, call)

    return registered


def run_backward(*args, run=torch.autograd.graph._engine_run_backward, **options):
    gradients = run(*args, **options)
    if RAISED:
        first = RAISED[0]
        RAISED.clear()
        raise first
    return gradients


def read_outside(make) -> Tensor:
    """A tensor on the CPU with the numbers of one that is made outside: safetensors fills storages itself."""
    with _disable_current_modes():
        real = make()
    fake = torch.empty(real.shape, dtype=real.dtype, device="cpu")
    with _disable_current_modes():
        twin(fake).copy_(real)
    return fake


def load_file(path, load=safetensors.torch.load_file) -> dict[str, Tensor]:
    with _disable_current_modes():
        state = load(path)
    return {name: read_outside(lambda x=x: x) for name, x in state.items()}


class ReadSlice:
    """A slice of a file of safetensors."""

    def __init__(self, stored):
        self.stored = stored

    def __getattr__(self, name):
        return getattr(self.stored, name)

    def __getitem__(self, ranges) -> Tensor:
        return read_outside(lambda: self.stored[ranges])


@contextmanager
def open_file(path, open_file=tensor_files._open):
    with open_file(path) as handle:
        yield SimpleNamespace(keys=handle.keys, get_slice=lambda name: ReadSlice(handle.get_slice(name)))


def completed(work: dist.Work) -> torch.futures.Future:
    """What arrives has arrived; a fake process group's own future has no value to look at."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result([None])
    return future


def index_of(index):
    """An index of one number is read by C++ from memory, which has nothing there; and a list C++ makes a tensor."""
    if isinstance(index, tuple):
        return tuple(map(index_of, index))
    if isinstance(index, list):
        return torch.tensor(index, dtype=None if index else torch.int64, device="cpu")
    number = isinstance(index, FakeTensor) and index.dim() == 0 and not index.is_floating_point()
    return index.item() if number and index.dtype != torch.bool else index


class LiftFromCpu(TorchFunctionMode):
    """torch.tensor(...), as_tensor too, makes its tensor on the CPU, where there are numbers, and moves it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.tensor, torch.as_tensor):
            torch._C._set_only_lift_cpu_tensors(True)  # torch's own FakeTensorMode forgets it on leaving
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = args[0], index_of(args[1]), *args[2:]
        return func(*args, **(kwargs or {}))


PATCHES = (
    (DistributedDataParallel, "__init__", not_faked("DDP's reducer is written in C++ and reads addresses")),
    (_PipelineStageBase, "__init__", not_faked("PyTorch's pipelines ask their neighbours for shapes")),
    (torch.nn.Module, "compile", not_faked("torch.compile traces with fake tensors of its own")),
    (torch.distributed.checkpoint, "save", not_faked("PyTorch's checkpoints write storages themselves")),
    (checkpoint, "save", not_faked("checkpoints write storages themselves")),
    (checkpoint, "load", not_faked("checkpoints read storages themselves")),
    (accelerate.Accelerator, "__init__", not_faked("Accelerate looks at the machine itself for GPUs")),
    (loading, "load_file", load_file),
    (tensor_files, "_open", open_file),
    (dist.Work, "get_future", completed),
    (Tensor, "register_hook", guarded(Tensor.register_hook)),
    (Tensor, "register_post_accumulate_grad_hook", guarded(Tensor.register_post_accumulate_grad_hook)),
    (torch.autograd, "_engine_run_backward", run_backward),
    (FakeTensorMode, "__deepcopy__", lambda mode, memo: mode),  # a copied tensor is of the same mode
    (FakeTensor, "is_cuda", property(fake_is_cuda)),
    (FakeTensor, "numpy", numpy_of),
    (dist, "get_backend", lambda group=None: "cpu:gloo,cuda:nccl"),
    (dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl"),
    (records, "_all_gather_raw", all_gather_raw),
    (records, "_all_gather_bytes", all_gather_bytes),
    *((engine, "put_together", put_together) for engine in (whole, expert, five_d, pipeline, tensor, native_pipeline)),
    (dist, "new_group", new_group),
    (torch.utils, "swap_tensors", swap_tensors),
    (torch.cuda, "current_device", lambda: 0),
    (torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3"),
    (torch.cuda, "max_memory_allocated", lambda device=None: 0),
    (torch.cuda, "reset_peak_memory_stats", lambda device=None: None),
    (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    (torch.cuda, "set_device", lambda device: None),
    (torch.cuda, "Stream", NoStream),
    (torch.cuda, "Event", HostEvent),
    (torch.cuda, "current_stream", NoStream),
    (torch.cuda, "stream", lambda stream: nullcontext()),
    (torch.cuda, "synchronize", lambda device=None: None),
)
