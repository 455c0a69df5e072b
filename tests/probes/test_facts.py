"""Asking the sources: what each answers, and what is recorded when it is absent, fails or refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from umem.probes import DeviceMemory, PlatformClass, PlatformFacts, classify, gather_facts, read_device_memory
from umem.probes.facts import read_driver, read_kernel, read_nvml, read_torch

GIB = 1 << 30


def giving(module: Any) -> Callable[[str], Any]:
    return lambda _name: module


def absent(name: str) -> Any:
    raise ImportError(f"/home/alice/lib/{name}.so is not there")


def driver() -> Any:
    """The driver API of a device: every call gives a status and a result. One attribute fails, some are not known."""
    attributes = {
        "CU_DEVICE_ATTRIBUTE_INTEGRATED": (0, 1),
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS": (1, 0),
        "CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES": (0, 0),
    }
    return SimpleNamespace(
        CUdevice_attribute=SimpleNamespace(**{name: name for name in attributes}),
        cuInit=lambda _flags: (0,),
        cuDeviceGet=lambda index: (0, index),
        cuDeviceGetName=lambda _length, device: (0, f"device {device}".encode() + bytes(20)),
        cuDeviceGetPCIBusId=lambda _length, _device: (999, b""),
        cuDeviceGetUuid=lambda _device: (0, SimpleNamespace(bytes=b"\x01\xff")),
        cuDeviceTotalMem=lambda _device: (0, 120 * GIB),
        cuDeviceGetAttribute=lambda attribute, _device: attributes[attribute],
    )


def test_the_driver() -> None:
    facts = read_driver(2, giving(driver()))
    assert (facts.name, facts.total_bytes, facts.integrated, facts.host_page_tables) == ("device 2", 120 * GIB, 1, 0)
    assert (facts.pageable_access, facts.numa_config, facts.bus_id) == (None, None, None)
    assert facts.uuid == "01ff"
    assert "999" in facts.failures["bus_id"]
    assert "AttributeError" in facts.failures["numa_config"]
    assert "gave 1" in facts.failures["pageable_access"]


def test_a_driver_that_is_not_there_is_a_failure_of_the_source_and_names_nobody() -> None:
    facts = read_driver(0, absent)
    assert facts.integrated is None
    assert facts.failures == {"source": "ImportError: cuda.bindings.driver.so is not there"}


def torch_with(backend: str, hip: str | None = None, **properties: object) -> Any:
    device = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 1,
        get_device_properties=lambda _device: SimpleNamespace(**properties),
    )
    nothing = SimpleNamespace(is_available=lambda: False)
    parts = {name: device if name == backend else nothing for name in ("cuda", "xpu", "mps")}
    return SimpleNamespace(
        cuda=parts["cuda"],
        xpu=parts["xpu"],
        backends=SimpleNamespace(mps=parts["mps"]),
        version=SimpleNamespace(hip=hip),
        device=str,
    )


def test_torch() -> None:
    facts = read_torch("auto", giving(torch_with("cuda", name="x", total_memory=7, is_integrated=1)))
    assert (facts.backend, facts.device, facts.name, facts.total_bytes, facts.integrated) == (
        "cuda",
        "cuda:0",
        "x",
        7,
        1,
    )
    assert read_torch("cuda", giving(torch_with("cuda", name="x", total_memory=7))).device == "cuda:1"


def test_an_old_torch_does_not_know_whether_a_device_is_integrated() -> None:
    facts = read_torch("cuda:3", giving(torch_with("cuda", hip="6.4", name="x", total_memory=7)))
    assert (facts.backend, facts.device, facts.integrated) == ("hip", "cuda:3", None)
    assert "integrated" in facts.failures


@pytest.mark.parametrize("backend", ["xpu", "mps"])
def test_other_backends(backend: str) -> None:
    facts = read_torch("auto", giving(torch_with(backend, name="x", total_memory=7, is_integrated_gpu=True)))
    assert facts.backend == backend
    assert facts.device.startswith(backend)


def test_torch_sees_nothing() -> None:
    facts = read_torch("auto", giving(torch_with("")))
    assert (facts.backend, facts.device) == (None, "cpu")
    assert classify(PlatformFacts(torch=facts)).kind is PlatformClass.CPU


def refuse(_handle: str) -> Any:
    raise OSError("Not Supported")


def nvml(memory: Callable[[str], Any], closed: list[bool]) -> Any:
    """NVML of a device that has a name and an addressing mode."""
    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetHandleByPciBusId=lambda bus_id: bus_id,
        nvmlDeviceGetName=lambda _handle: "NVIDIA GB10",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetAddressingMode=lambda _handle: SimpleNamespace(value=2),
    )


def test_nvml() -> None:
    closed: list[bool] = []
    facts = read_nvml("0000:01:00.0", giving(nvml(refuse, closed)))
    assert (facts.name, facts.total_bytes, facts.addressing_mode) == ("NVIDIA GB10", None, "ats")
    assert facts.failures == {"total_bytes": "OSError: Not Supported"}
    assert closed == [True]
    assert "driver" in read_nvml(None, absent).failures["source"]
    assert "ImportError" in read_nvml("x", absent).failures["source"]


def test_a_total_of_zero_is_no_size() -> None:
    def zero(_handle: str) -> Any:
        return SimpleNamespace(total=0, free=0, used=0)

    assert read_nvml("x", giving(nvml(zero, []))).total_bytes is None


def system_tree(root: Path) -> tuple[Path, Path]:
    proc, sys = root / "proc", root / "sys"
    (proc / "device-tree").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\n")
    (proc / "device-tree/model").write_bytes(b"NVIDIA Jetson\0")
    for number, processors, free in ((0, "0-71\n", 5), (1, "\n", 7)):
        node = sys / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(processors)
        names = {"MemTotal": 500, "MemFree": free, "Active(file)": 20, "Inactive(file)": 30}
        (node / "meminfo").write_text("".join(f"Node {number} {name}: {kib} kB\n" for name, kib in names.items()))
    card = sys / "class/drm/card1/device"
    card.mkdir(parents=True)
    (card / "mem_info_gtt_total").write_text("9000\n")
    (card / "mem_info_gtt_used").write_text("400\n")
    return proc, sys


def test_the_kernel(tmp_path: Path) -> None:
    facts = read_kernel(*system_tree(tmp_path))
    assert (facts.total_bytes, facts.device_tree, facts.graphics_pool_bytes) == (1000 * 1024, "NVIDIA Jetson", 9000)
    assert [(node.number, node.has_processors, node.total_bytes) for node in facts.nodes] == [
        (0, True, 500 * 1024),
        (1, False, 500 * 1024),
    ]
    assert facts.failures == {}


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    facts = read_kernel(tmp_path, tmp_path)
    assert (facts.total_bytes, facts.nodes, facts.graphics_pool_bytes) == (None, (), None)
    assert "total_bytes" in facts.failures


def test_memory_of_a_device_that_is_a_node(tmp_path: Path) -> None:
    proc, sys = system_tree(tmp_path)
    facts = PlatformFacts.from_json(
        {
            "driver": {"integrated": 0, "numa_config": 1, "numa_id": 1},
            "torch": {"backend": "cuda", "device": "cuda:0", "total_bytes": 500 * 1024},
        }
    )
    facts = PlatformFacts(driver=facts.driver, torch=facts.torch, kernel=read_kernel(proc, sys))
    torch = SimpleNamespace(cuda=SimpleNamespace(mem_get_info=lambda _device: (3, 9)))
    memory = read_device_memory(classify(facts), facts, sys=sys, load=giving(torch))
    assert memory == DeviceMemory(
        free_bytes=3,
        total_bytes=9,
        node_free_bytes=7 * 1024,
        node_inactive_cache_bytes=30 * 1024,
        node_active_cache_bytes=20 * 1024,
        foreign_available_bytes=37 * 1024,
    )


def test_the_pools_of_shared_memory(tmp_path: Path) -> None:
    proc, sys = system_tree(tmp_path)
    hip = {"torch": {"backend": "hip", "device": "cuda:0", "integrated": 1, "total_bytes": 9000}}
    facts = PlatformFacts(torch=PlatformFacts.from_json(hip).torch, kernel=read_kernel(proc, sys))
    memory = read_device_memory(classify(facts), facts, sys=sys, load=absent)
    assert memory == DeviceMemory(pool_bytes=9000, pool_used_bytes=400)
    metal = SimpleNamespace(mps=SimpleNamespace(recommended_max_memory=lambda: 75, driver_allocated_memory=lambda: 5))
    apple = PlatformFacts.from_json({"torch": {"backend": "mps", "device": "mps"}, "kernel": {"machine": "arm64"}})
    assert read_device_memory(classify(apple), apple, load=giving(metal)) == DeviceMemory(
        pool_bytes=75, pool_used_bytes=5
    )


def test_a_device_that_does_not_tell(tmp_path: Path) -> None:
    facts = PlatformFacts.from_json({"torch": {"backend": "xpu", "device": "xpu:0", "integrated": 0}})

    def fail(_device: str) -> Any:
        raise RuntimeError("not on this device")

    torch = SimpleNamespace(xpu=SimpleNamespace(mem_get_info=fail))
    memory = read_device_memory(classify(facts), facts, load=giving(torch))
    assert memory.free_bytes is None
    assert "not on this device" in memory.remarks[0]


def test_this_machine() -> None:
    facts = gather_facts("cpu")
    assert facts.kernel.total_bytes
    assert facts.torch.backend is None
