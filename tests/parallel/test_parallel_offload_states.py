"""Optimizer states on the host and on disk: MasterAdamW's numbers to the bit, and every byte that crosses a link."""

import pytest
import torch
from torch import nn

from course_lib.memory.states import StateBytes, offload_link_bytes
from course_lib.parallel.offload_states import OffloadedAdamW
from course_lib.run import Offload
from course_lib.training import MasterAdamW
from course_lib.training.precision import accumulate_in_fp32

BF16 = torch.bfloat16


def some_parameters(dtype, sizes=((37, 53), (4097,), (1,))):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def give_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def numel_of(parameters):
    return sum(parameter.numel() for parameter in parameters)


def run_steps(parameters, optimizer, seeds):
    for seed in seeds:
        give_gradients(parameters, seed)
        optimizer.step()


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_parameters_and_states_are_those_of_master_adamw_to_the_bit(place, dtype):
    kwargs = {"lr": 0.01, "weight_decay": 0.1}
    expected, offloaded = some_parameters(dtype), some_parameters(dtype)
    reference = MasterAdamW(expected, **kwargs)
    with OffloadedAdamW(offloaded, place, piece_numel=1000, **kwargs) as optimizer:
        run_steps(expected, reference, range(3))
        run_steps(offloaded, optimizer, range(3))
        for a, b in zip(expected, offloaded, strict=True):
            assert torch.equal(a, b)
            assert all(torch.equal(value, optimizer.state[b][key]) for key, value in reference.state[a].items())


@pytest.mark.parametrize("place", ["host", "disk"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("fp32_gradients", [False, True])
def test_each_link_carries_the_formula_s_bytes_in_every_step(place, dtype, fp32_gradients):
    parameters = some_parameters(dtype)
    P, itemsize = numel_of(parameters), dtype.itemsize
    with OffloadedAdamW(parameters, place, piece_numel=1000) as optimizer:
        assert not any(optimizer.link_bytes.values())
        for _ in range(2):
            if fp32_gradients:
                accumulate_in_fp32(parameters)
            else:
                give_gradients(parameters, 1)
            optimizer.step()
            gradient_bytes, on_disk = 4 if fp32_gradients else itemsize, 12 if place == "disk" else 0
            assert optimizer.link_bytes == {
                "device to host": gradient_bytes * P,
                "host to device": itemsize * P,
                "disk to host": on_disk * P,
                "host to disk": on_disk * P,
            }
            states = StateBytes(itemsize * P, gradient_bytes * P, 12 * P)
            assert optimizer.link_bytes == offload_link_bytes(states, Offload(optimizer=place))


def test_a_parameter_without_gradient_stays_and_crosses_no_link():
    parameters = some_parameters(BF16)
    before = parameters[1].detach().clone()
    optimizer = OffloadedAdamW(parameters)
    give_gradients(parameters, 0)
    parameters[1].grad = None
    optimizer.step()
    assert torch.equal(parameters[1], before)
    assert optimizer.link_bytes["device to host"] == 2 * (numel_of(parameters) - parameters[1].numel())


@pytest.mark.parametrize("places", [("host", "disk"), ("disk", "host"), ("disk", None), (None, "disk")])
def test_a_run_goes_on_from_a_state_dict_whatever_the_place(places):
    def make(place, parameters):
        return MasterAdamW(parameters) if place is None else OffloadedAdamW(parameters, place, piece_numel=999)

    whole, interrupted = some_parameters(BF16), some_parameters(BF16)
    run_steps(whole, MasterAdamW(whole), range(4))
    first = make(places[0], interrupted)
    run_steps(interrupted, first, range(2))
    saved = first.state_dict()
    second = make(places[1], interrupted)
    second.load_state_dict(saved)
    run_steps(interrupted, second, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(whole, interrupted, strict=True))
    for optimizer in (first, second):
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()


def test_the_file_has_no_name_and_its_space_is_given_back(tmp_path):
    optimizer = OffloadedAdamW(some_parameters(BF16), "disk", tmp_path)
    assert list(tmp_path.iterdir()) == []  # so nothing is left behind, however the process ends
    file = optimizer._file
    optimizer.close()
    assert file.closed
    with pytest.raises(ValueError, match="was closed, and its states with it"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([nn.Parameter(torch.zeros(3))], "nvme"), "place is 'nvme'; choose host, or disk"),
        (([nn.Parameter(torch.zeros(3))], "disk", "/no/such/folder"), "there is no folder '/no/such/folder'"),
        (([nn.Parameter(torch.zeros(3, dtype=torch.float64))],), "dtype torch.float64; required.*Convert"),
        (([nn.Parameter(torch.zeros(3, device="meta"))],), "no values yet.*load them"),
        (([nn.Parameter(torch.zeros(3, 2).t())],), "strided; required: contiguous"),
        (([nn.Parameter(torch.zeros(3))], "host", None, 1e-3, (0.9, 0.999), 1e-8, 0.0, 0), "piece_numel is 0"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(arguments, message):
    with pytest.raises(ValueError, match=message):
        OffloadedAdamW(*arguments)


def test_a_drive_that_is_too_small_is_named_before_anything_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(ValueError, match="need 1,200 bytes.*has 1,000 free"):
        OffloadedAdamW(some_parameters(BF16, sizes=[(100,)]), "disk", tmp_path)
