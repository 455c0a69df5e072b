"""What kind of machine this is: whether the processor and the accelerator share one memory.

`integrated == 1` is the test for shared memory (NVIDIA, RTX Spark porting guide, "Unified Memory Architecture"); names,
architectures and the driver's memory numbers are not asked. Memory sizes are `memory`'s business.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Platform", "PlatformClass", "probe_platform"]


class PlatformClass(StrEnum):
    """How the accelerator's memory relates to the system's."""

    CPU = "cpu"
    UNIFIED = "unified"
    DISCRETE = "discrete"


@dataclass(frozen=True, slots=True)
class Platform:
    """The class of the machine, the device to load to, and why.

    Attributes
    ----------
    kind
        The class.
    device
        The best device there is, as torch writes it.
    evidence
        What the class was decided by, for people.
    """

    kind: PlatformClass
    device: str
    evidence: str

    def to_json(self) -> dict[str, Any]:
        """The platform as JSON values."""
        return asdict(self)


def probe_platform(device: str = "auto") -> Platform:
    """The class of the machine, seen from `device` (`auto`: the best there is). Imports torch unless it is `cpu`."""
    if device.partition(":")[0] in ("cpu", "meta"):
        return Platform(PlatformClass.CPU, device, "the model goes to the processor's memory")
    import torch

    if device == "auto" and torch.cuda.is_available():
        device = "cuda:0"
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(torch.device(device))
        integrated = getattr(properties, "is_integrated", 0)
        kind = PlatformClass.UNIFIED if integrated else PlatformClass.DISCRETE
        return Platform(kind, device, f"{properties.name}: integrated={int(integrated)}")
    mps = getattr(torch.backends, "mps", None)
    if device.startswith("mps") or (device == "auto" and mps is not None and mps.is_available()):
        return Platform(PlatformClass.UNIFIED, "mps", "Apple silicon shares one memory")
    if device == "auto":
        return Platform(PlatformClass.CPU, "cpu", "torch sees no accelerator")
    return Platform(PlatformClass.DISCRETE, device, f"{device} is taken to have memory of its own")
