"""What a ring needs of CUDA and ROCm devices: torch's streams and events, and anonymous memory that is registered.

Memory is registered through cuda-python; through the runtime that torch has brought along on ROCm, and where
cuda-python is newer than the driver. torch's own pinned memory is the last resort, on ROCm: it is rounded up to a power
of two and kept after the load. Final storage and staging come from torch's caching allocator on the caller's stream: a
ring's stream starts behind that, and has run dry before either is let go, so the allocator need not be told of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator

import torch

from umem.strategies.copiers.base import Registered, RegistrationError

__all__ = ["CudaAccelerator"]

#: For all contexts, so that one ring serves several devices. CUDA and HIP give it the same number.
_PORTABLE = 1

_Registrar = Callable[[int, torch.device], contextlib.AbstractContextManager[Registered]]


class CudaAccelerator:
    """CUDA devices, and ROCm devices, which torch calls by the same name."""

    def __init__(self) -> None:
        on_rocm = torch.version.hip is not None
        self._registrars: tuple[_Registrar, ...] = (
            (registered_by_torch, pinned_by_torch) if on_rocm else (registered_by_cuda_python, registered_by_torch)
        )

    @contextlib.contextmanager
    def registered(self, count: int, device: str) -> Iterator[Registered]:
        """Memory by the first registrar that the device accepts."""
        refusals: list[str] = []
        with contextlib.ExitStack() as stack:
            for registrar in self._registrars:
                try:
                    with torch.cuda.device(device):
                        memory = stack.enter_context(registrar(count, torch.device(device)))
                except RegistrationError as error:
                    refusals.append(str(error))
                else:
                    break
            else:
                raise RegistrationError("; ".join(refusals))
            yield memory

    def staging(self, count: int, device: str) -> torch.Tensor:
        """Memory of torch's allocator, which aligns to 512 bytes."""
        return torch.empty(count, dtype=torch.uint8, device=device)

    def stream(self, device: str) -> CudaStream:
        """A stream from torch's pool, behind the current one."""
        return CudaStream(device)


class CudaStream:
    """A stream of torch's."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def issue(self, work: Callable[[], None]) -> None:
        """Run `work` with this stream as the current one."""
        with torch.cuda.stream(self._stream):
            work()

    def fence(self) -> torch.cuda.Event:
        """An event; who waits for it sleeps."""
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def synchronize(self) -> None:
        """Wait for the stream; errors of its work are raised here."""
        self._stream.synchronize()


def registered_by_cuda_python(count: int, device: torch.device) -> contextlib.AbstractContextManager[Registered]:
    """Anonymous memory, registered through cuda-python."""
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise RegistrationError(f"cuda-python cannot be imported ({error})") from None

    def checked(call: str, result: tuple[int]) -> None:
        if result[0] != runtime.cudaError_t.cudaSuccess:
            said = runtime.cudaGetErrorString(result[0])[1].decode()
            runtime.cudaGetLastError()
            raise RegistrationError(f"{call} refused: {said}")

    def register(address: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        checked("cudaSetDevice", runtime.cudaSetDevice(index))
        checked("cudaHostRegister", runtime.cudaHostRegister(address, count, _PORTABLE))

    def unregister(address: int) -> None:
        checked("cudaHostUnregister", runtime.cudaHostUnregister(address))

    return _registered(count, register, unregister, "registered by cuda-python")


def registered_by_torch(count: int, device: torch.device) -> contextlib.AbstractContextManager[Registered]:
    """Anonymous memory, registered through the runtime that torch is built with."""
    runtime = torch.cuda.cudart()
    if not hasattr(runtime, "cudaHostRegister"):
        raise RegistrationError("torch's runtime has no cudaHostRegister")

    def checked(call: str, result: int) -> None:
        if int(result):
            # The runtime keeps a refusal as its last error, which the next kernel would be blamed for.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=device)
            raise RegistrationError(f"{call} of torch's runtime refused: {runtime.cudaGetErrorString(result)}")

    def register(address: int) -> None:
        checked("cudaHostRegister", runtime.cudaHostRegister(address, count, _PORTABLE))

    def unregister(address: int) -> None:
        checked("cudaHostUnregister", runtime.cudaHostUnregister(address))

    return _registered(count, register, unregister, "registered by torch's runtime")


@contextlib.contextmanager
def pinned_by_torch(count: int, device: torch.device) -> Iterator[Registered]:  # noqa: ARG001 - pinned for all
    """Memory of torch's pinned allocator."""
    try:
        tensor = torch.empty(count, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise RegistrationError(f"torch cannot pin memory ({error})") from None
    memory = memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")
    yield Registered(memory, "pinned by torch")
    del tensor


@contextlib.contextmanager
def _registered(
    count: int, register: Callable[[int], None], unregister: Callable[[int], None], how: str
) -> Iterator[Registered]:
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    register(address)
    try:
        yield Registered(memoryview(pages), how)
    except BaseException:
        with contextlib.suppress(RegistrationError):  # the first error wins
            unregister(address)
        raise
    else:
        unregister(address)
    finally:
        pages.madvise(mmap.MADV_DONTNEED)  # a kept traceback may hold the mapping, but not its memory
