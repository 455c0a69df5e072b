"""Raw facts of a machine, source by source: what each said, and what failed and why. Nothing is concluded here.

Sources are asked in the order driver (cuda-python), torch, NVML, kernel (/proc and /sys). Each may be absent, fail, or
lie; `platform.classify` judges them. No source is asked for free memory here: `cudaMemGetInfo` itself can fail where
processor and accelerator share one memory, so the class has to be known first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from umem.probes.kernel_files import CounterFile

__all__ = [
    "DriverFacts",
    "KernelFacts",
    "Node",
    "NvmlFacts",
    "PlatformFacts",
    "TorchFacts",
    "gather_facts",
    "read_driver",
    "read_kernel",
    "read_nvml",
    "read_torch",
]

#: Field -> the attribute of cuDeviceGetAttribute, without its prefix.
_DRIVER_ATTRIBUTES = {
    "integrated": "INTEGRATED",
    "pageable_access": "PAGEABLE_MEMORY_ACCESS",
    "host_page_tables": "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
    "concurrent_managed_access": "CONCURRENT_MANAGED_ACCESS",
    "unified_addressing": "UNIFIED_ADDRESSING",
    "numa_config": "NUMA_CONFIG",
    "numa_id": "NUMA_ID",
    "host_numa_id": "HOST_NUMA_ID",
}
#: Folders in messages name users.
_FOLDERS = re.compile(r"/(?:[^\s/'\"]+/)+")

_ADDRESSING_MODES = {0: "none", 1: "hmm", 2: "ats"}

_Facts = TypeVar("_Facts", bound="_Source")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What one source said. None is unknown.

    Attributes
    ----------
    failures
        What was asked in vain -> why. `source`: the source itself is not there.
    """

    failures: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """The record that `dataclasses.asdict` gave; what is missing is unknown."""
        return cls(**{known.name: facts[known.name] for known in fields(cls) if known.name in facts})


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts(_Source):
    """What the CUDA driver says of the device (`cuDeviceGetAttribute`, which needs no context).

    Attributes
    ----------
    name, bus_id, uuid
        The device's name, its place on the PCI bus, and its number; each slice of a divided device has its own.
    total_bytes
        `cuDeviceTotalMem`.
    integrated, pageable_access, host_page_tables, concurrent_managed_access, unified_addressing
        Attributes 18, 88, 100, 89 and 41; 0 or 1.
    numa_config, numa_id, host_numa_id
        Attributes 130 (1: the device's memory is a NUMA node of the system), 131 and 134.
    """

    name: str | None = None
    bus_id: str | None = None
    uuid: str | None = None
    total_bytes: int | None = None
    integrated: int | None = None
    pageable_access: int | None = None
    host_page_tables: int | None = None
    concurrent_managed_access: int | None = None
    unified_addressing: int | None = None
    numa_config: int | None = None
    numa_id: int | None = None
    host_numa_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts(_Source):
    """What torch says of the device.

    Attributes
    ----------
    backend
        `cuda`, `hip`, `xpu`, `mps`; None without an accelerator that torch can use.
    device
        As torch writes it; `cpu` without an accelerator.
    name, total_bytes, integrated
        Of the device's properties; old versions of torch do not know `is_integrated`.
    """

    backend: str | None = None
    device: str = "cpu"
    name: str | None = None
    total_bytes: int | None = None
    integrated: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlFacts(_Source):
    """What NVML says of the device.

    Attributes
    ----------
    name
        The device's name.
    total_bytes
        Of `nvmlDeviceGetMemoryInfo`, which many devices refuse; a zero is no size and is left out.
    addressing_mode
        `none`, `hmm` or `ats`.
    """

    name: str | None = None
    total_bytes: int | None = None
    addressing_mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A NUMA node: its number, its memory, whether it has processors."""

    number: int
    total_bytes: int | None
    has_processors: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts(_Source):
    """What the system says.

    Attributes
    ----------
    system, machine, release
        As `uname` gives them; WSL2 says `microsoft` in its release.
    total_bytes
        MemTotal.
    device_tree
        The board's name on machines that have a device tree.
    nodes
        The NUMA nodes.
    graphics_pool_bytes
        The most system memory that an AMD graphics processor may use (`mem_info_gtt_total`), where there is one.
    """

    system: str | None = None
    machine: str | None = None
    release: str | None = None
    total_bytes: int | None = None
    device_tree: str | None = None
    nodes: tuple[Node, ...] = ()
    graphics_pool_bytes: int | None = None

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """The record that `dataclasses.asdict` gave; what is missing is unknown."""
        nodes = tuple(Node(**node) for node in facts.get("nodes") or ())
        known = {known.name: facts[known.name] for known in fields(cls) if known.name in facts}
        return cls(**known | {"nodes": nodes})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformFacts:
    """All that was said of one device and the machine that it is in."""

    driver: DriverFacts = field(default_factory=DriverFacts)
    torch: TorchFacts = field(default_factory=TorchFacts)
    nvml: NvmlFacts = field(default_factory=NvmlFacts)
    kernel: KernelFacts = field(default_factory=KernelFacts)

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values, without the device's number and place on the bus."""
        facts = asdict(self)
        del facts["driver"]["bus_id"], facts["driver"]["uuid"]
        return facts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """The facts that `to_json` gave; what is missing is unknown."""
        return cls(
            driver=DriverFacts.from_json(facts.get("driver") or {}),
            torch=TorchFacts.from_json(facts.get("torch") or {}),
            nvml=NvmlFacts.from_json(facts.get("nvml") or {}),
            kernel=KernelFacts.from_json(facts.get("kernel") or {}),
        )


def gather_facts(device: str = "auto", *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> PlatformFacts:
    """Ask every source about `device` (`auto`: the best that torch can use). Imports torch unless it is `cpu`."""
    kernel = read_kernel(proc, sys)
    if device.partition(":")[0] in ("cpu", "meta"):
        return PlatformFacts(torch=TorchFacts(device=device), kernel=kernel)
    torch = read_torch(device)
    if torch.backend != "cuda":
        return PlatformFacts(torch=torch, kernel=kernel)
    driver = read_driver(int(torch.device.partition(":")[2] or 0))
    return PlatformFacts(driver=driver, torch=torch, nvml=read_nvml(driver.bus_id), kernel=kernel)


class _Asked:
    """Answers by name, and failures by name."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.failures: dict[str, str] = {}

    def ask(self, name: str, question: Callable[[], Any]) -> Any:
        """The answer, or None after a failure, of whatever kind: these are foreign libraries."""
        try:
            answer = question()
        except Exception as error:  # noqa: BLE001 - each driver has errors of its own, and none may end a load
            self.failures[name] = _FOLDERS.sub("", f"{type(error).__name__}: {error}".partition("\n")[0])
            return None
        if answer is not None:
            self.answers[name] = answer
        return answer

    def record(self, kind: type[_Facts]) -> _Facts:
        """The answers that are facts of `kind`, and the failures."""
        known = {known.name for known in fields(kind)}
        answers = {name: value for name, value in self.answers.items() if name in known}
        return kind(**answers, failures=self.failures)


def read_driver(index: int, load: Callable[[str], Any] = import_module) -> DriverFacts:
    """What the CUDA driver says of device `index`, which is counted as torch counts."""
    asked = _Asked()
    driver = asked.ask("source", lambda: load("cuda.bindings.driver"))

    def call(name: str, *arguments: Any) -> Any:
        status, *results = getattr(driver, name)(*arguments)
        if int(status) != 0:
            raise OSError(f"{name} gave {status}")
        return results[0] if results else True

    if driver is None or not asked.ask("source", lambda: call("cuInit", 0)):
        return asked.record(DriverFacts)
    handle = asked.ask("device", lambda: call("cuDeviceGet", index))
    if handle is None:
        return asked.record(DriverFacts)
    asked.ask("name", lambda: _text(call("cuDeviceGetName", 96, handle)))
    asked.ask("bus_id", lambda: _text(call("cuDeviceGetPCIBusId", 32, handle)))
    asked.ask("uuid", lambda: str(call(_uuid_call(driver), handle).bytes.hex()))
    asked.ask("total_bytes", lambda: int(call("cuDeviceTotalMem", handle)))

    def attribute(name: str) -> int:
        return int(
            call("cuDeviceGetAttribute", getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle)
        )

    for fact, name in _DRIVER_ATTRIBUTES.items():
        asked.ask(fact, partial(attribute, name))
    return asked.record(DriverFacts)


def _uuid_call(driver: Any) -> str:
    """The call that tells slices of one device apart."""
    return "cuDeviceGetUuid_v2" if hasattr(driver, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"


def _text(raw: Any) -> str:
    return raw.split(b"\0")[0].decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)


def read_torch(device: str, load: Callable[[str], Any] = import_module) -> TorchFacts:
    """What torch says of `device`; `auto` is the first of CUDA or ROCm, XPU and Metal that it can use."""
    asked = _Asked()
    torch = asked.ask("source", lambda: load("torch"))
    if torch is None:
        return asked.record(TorchFacts)
    kind = device.partition(":")[0]
    if kind == "auto":
        kind = next((name for name in ("cuda", "xpu", "mps") if asked.ask(name, partial(_usable, torch, name))), "")
        device = {"": "cpu", "mps": "mps"}.get(kind, f"{kind}:0")
        if not kind:
            asked.failures["accelerator"] = "torch sees no accelerator"
    if device in ("cuda", "xpu"):
        index = asked.ask("index", lambda: getattr(torch, kind).current_device())
        device = f"{kind}:{index or 0}"
    asked.answers["device"] = device
    if kind in ("cuda", "xpu"):
        asked.answers["backend"] = "hip" if kind == "cuda" and getattr(torch.version, "hip", None) else kind
        properties = asked.ask("properties", lambda: getattr(torch, kind).get_device_properties(torch.device(device)))
        asked.ask("name", lambda: str(properties.name))
        asked.ask("total_bytes", lambda: int(properties.total_memory))
        attribute = "is_integrated" if kind == "cuda" else "is_integrated_gpu"
        asked.ask("integrated", lambda: int(getattr(properties, attribute)))
    elif kind:
        asked.answers["backend"] = kind
    return asked.record(TorchFacts)


def _usable(torch: Any, kind: str) -> bool:
    part = torch.backends.mps if kind == "mps" else getattr(torch, kind)
    return bool(part.is_available())


def read_nvml(bus_id: str | None, load: Callable[[str], Any] = import_module) -> NvmlFacts:
    """What NVML says of the device at that place; NVML counts devices otherwise than CUDA does."""
    asked = _Asked()
    if bus_id is None:
        return NvmlFacts(failures={"source": "the driver does not say where the device is"})
    nvml = asked.ask("source", lambda: load("pynvml"))
    if nvml is None or asked.ask("source", lambda: nvml.nvmlInit() or True) is None:
        return asked.record(NvmlFacts)
    try:
        handle = asked.ask("device", lambda: nvml.nvmlDeviceGetHandleByPciBusId(bus_id))
        if handle is not None:
            asked.ask("name", lambda: _text(nvml.nvmlDeviceGetName(handle)))
            asked.ask("total_bytes", lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total) or None)
            asked.ask("addressing_mode", lambda: _ADDRESSING_MODES[_addressing_mode(nvml, handle)])
    finally:
        asked.ask("shutdown", nvml.nvmlShutdown)
    return asked.record(NvmlFacts)


def _addressing_mode(nvml: Any, handle: Any) -> int:
    mode = nvml.nvmlDeviceGetAddressingMode(handle)
    return int(getattr(mode, "value", mode))


def read_kernel(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> KernelFacts:
    """What /proc, /sys and `uname` say."""
    asked = _Asked()
    named = os.uname()
    asked.answers.update(system=named.sysname, machine=named.machine, release=named.release)
    meminfo = CounterFile(proc / "meminfo", ("MemTotal",))
    asked.ask("total_bytes", lambda: meminfo.values()["MemTotal"] * 1024)
    meminfo.close()
    model = proc / "device-tree/model"
    if model.exists():
        asked.ask("device_tree", lambda: model.read_text().rstrip("\0"))
    asked.ask("nodes", lambda: _nodes(sys))
    pools = sorted((sys / "class/drm").glob("card*/device/mem_info_gtt_total"))
    if len(pools) == 1:  # with several nothing says which one torch means
        asked.ask("graphics_pool_bytes", lambda: int(pools[0].read_text()))
    return asked.record(KernelFacts)


def _nodes(sys: Path) -> tuple[Node, ...]:
    directories = (sys / "devices/system/node").glob("node[0-9]*")
    found = []
    for directory in sorted(directories, key=lambda path: int(path.name[4:])):
        total = re.search(r"MemTotal:\s+(\d+) kB", (directory / "meminfo").read_text())
        found.append(
            Node(
                number=int(directory.name[4:]),
                total_bytes=int(total[1]) * 1024 if total else None,
                has_processors=bool((directory / "cpulist").read_text().strip()),
            )
        )
    return tuple(found)
