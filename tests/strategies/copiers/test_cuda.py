"""The CUDA side of the ring: clean refusals without a driver; and with a GPU, the real thing."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import umem
from tests.strategies.copiers.models import make_model
from tests.strategies.loads import MIB, run_plan
from tests.writers import Holder, random_tensor, same_bytes, write_safetensors
from umem.strategies.copiers import cuda, ring
from umem.strategies.copiers.base import RegistrationError

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
FIRST = torch.device("cuda", 0)


@without_gpu
def test_cuda_python_without_a_driver_refuses_and_says_why() -> None:
    with (
        pytest.raises(RegistrationError, match=r"cudaSetDevice refused: \w+"),
        cuda.registered_by_cuda_python(4096, FIRST),
    ):
        pass


def test_a_missing_cuda_python_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(RegistrationError, match="cannot be imported"):
        cuda.registered_by_cuda_python(4096, FIRST)


@without_gpu
def test_torch_without_a_device_cannot_pin() -> None:
    with pytest.raises(RegistrationError, match="torch cannot pin memory"), cuda.pinned_by_torch(4096, FIRST):
        pass


def resident_bytes() -> int:
    fields = Path("/proc/self/smaps_rollup").read_text().split()
    return int(fields[fields.index("Anonymous:") + 1]) * 1024


def test_memory_is_given_back_though_something_holds_it() -> None:
    released: list[int] = []
    gc.collect()
    before = resident_bytes()
    with cuda._registered(32 * MIB, lambda _: None, released.append, "by nobody") as registered:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(registered.memory)), 1, 32 * MIB)
        assert resident_bytes() - before > 30 * MIB
    assert resident_bytes() - before < 4 * MIB
    assert len(released) == 1
    assert registered.memory.nbytes == 32 * MIB


def test_a_failed_body_is_the_error_and_memory_is_released() -> None:
    def refuse(address: int) -> None:
        released.append(address)
        raise RegistrationError("lost")

    released: list[int] = []
    with pytest.raises(KeyError), cuda._registered(4096, lambda _: None, refuse, "by nobody"):
        raise KeyError
    assert len(released) == 1


# --- with a GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_registered_memory_is_pinned_and_can_be_registered_again() -> None:
    accelerator = cuda.CudaAccelerator()
    for _ in range(3):
        with accelerator.registered(5 * MIB + 3, "cuda:0") as registered:
            assert torch.frombuffer(registered.memory, dtype=torch.uint8).is_pinned()
            assert registered.memory.nbytes == 5 * MIB + 3


@pytest.mark.gpu
def test_a_stream_starts_behind_the_caller_and_ends_when_it_is_told_to() -> None:
    accelerator = cuda.CudaAccelerator()
    target = accelerator.staging(64 * MIB, "cuda:0")
    source = torch.arange(64 * MIB, dtype=torch.uint8)
    with accelerator.registered(64 * MIB, "cuda:0") as registered:
        host = torch.frombuffer(registered.memory, dtype=torch.uint8)
        host.copy_(source)
        torch.cuda._sleep(50_000_000)
        target.fill_(7)
        stream = accelerator.stream("cuda:0")
        stream.issue(partial(ring._copy, target, registered.memory))
        fence = stream.fence()
        fence.synchronize()
        host.fill_(9)
        stream.synchronize()
    assert torch.equal(target.cpu(), source)


@pytest.mark.gpu
def test_a_refused_registration_is_not_blamed_on_the_next_kernel() -> None:
    accelerator = cuda.CudaAccelerator()
    with accelerator.registered(MIB, "cuda:0") as registered:
        address = ctypes.addressof(ctypes.c_char.from_buffer(registered.memory))
        for registrar in (cuda.registered_by_cuda_python, cuda.registered_by_torch):
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setattr(ctypes, "addressof", lambda _, address=address: address)
                with pytest.raises(RegistrationError, match="refused"), registrar(MIB, FIRST):
                    pytest.fail("memory was registered twice")
            assert int(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.gpu
def test_a_load_pins_and_keeps_nothing(tmp_path: Path) -> None:
    model = make_model(tmp_path, "cuda:0", "cuda:0")
    pinned: Callable[[], dict[str, int]] = getattr(torch.cuda, "host_memory_stats", dict)
    pinned_before, before = pinned(), torch.cuda.memory_allocated()
    outcome = run_plan(model.plan, window_bytes=16 * MIB, block_bytes=MIB, threads=4)
    assert outcome.copier == "ring"
    assert pinned() == pinned_before
    gc.collect()
    final = sum(-(-tensor.nbytes // 512) * 512 for tensor in outcome.tensors.values() if tensor.is_cuda)
    assert torch.cuda.memory_allocated() - before == final
    assert not model.differing(outcome.tensors)


@pytest.mark.gpu
def test_load_into_a_device_gives_the_bits_and_names_the_copier(tmp_path: Path) -> None:
    tensors = {f"t{i}": random_tensor((1000 + i, 257), torch.bfloat16, i) for i in range(40)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors)
    module = Holder(tensors)
    report = umem.load_into(module, path, device="cuda:0")
    assert report.copier == "ring"
    assert all(same_bytes(value.cpu(), tensors[name]) for name, value in module.state_dict().items())
