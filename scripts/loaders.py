"""The loaders that are compared: umem and its peers, each used as its documentation advises for the fastest road.

A loader ends in one of two states. `tensors`: every stored tensor, as it is stored, in memory that the process owns.
`model`: a transformers model with all weights in memory that the process owns, conversions done (merged experts).
What a peer leaves in mapped files is copied, in its time: else the bytes would be read later, by whoever uses them.

Peers with a file format of their own read a file that was converted from the checkpoint beforehand. All load to the
processor's memory; imports are no part of a load.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from end_state import own_all

from umem.measurement.baselines import import_model_code, load_by_accelerate
from umem.measurement.page_cache import cached_fraction, prepare_cache, shards_of

if TYPE_CHECKING:
    import torch

Load = Callable[[], Any]
EndState = Literal["tensors", "model"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """One loader.

    Attributes
    ----------
    name
        How it is called here; what stands before the first `-` chooses all of that kind.
    package, module
        The distribution that it comes from, and what is imported.
    end_state
        `tensors` or `model`.
    how
        What is called.
    prepare
        Given the checkpoint's directory and the files to read, imports what is needed and returns the load, which gives
        a module or a mapping of tensors, or a pair of one and umem's report.
    environment
        Variables of its process.
    converted_name
        The name of the file in its own format, where it has one.
    merges_experts
        Whether it can load a model whose experts are stored one by one.
    """

    name: str
    package: str
    module: str
    end_state: EndState
    how: str
    prepare: Callable[[Path, list[Path]], Load]
    environment: Mapping[str, str] = field(default_factory=dict)
    converted_name: str | None = None
    merges_experts: bool = True

    @property
    def is_installed(self) -> bool:
        """Whether its module can be found; it may still fail to import."""
        return importlib.util.find_spec(self.module) is not None


# --- umem ------------------------------------------------------------------------------------------------------------


def prepared_umem(checkpoint: Path, _files: list[Path]) -> Load:
    """`umem.load`, with its report."""
    import_model_code(checkpoint)
    import umem
    import umem.adapters.hosts.transformers
    import umem.strategies

    return lambda: umem.load(checkpoint, device="cpu", return_report=True)


def prepared_umem_into(checkpoint: Path, files: list[Path]) -> Load:
    """`umem.load_into` a module that has the stored tensors under their names, with its report."""
    is_cold = cached_fraction(files) == 0
    import torch

    import umem
    import umem.adapters.families
    import umem.adapters.install
    import umem.strategies
    from umem.checkpoint import open_checkpoint
    from umem.strategies.storage import torch_dtype

    module = torch.nn.Module()
    for entry in open_checkpoint(checkpoint).entries.values():
        holder = module
        *path, leaf = entry.name.split(".")
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, torch.nn.Module())
            holder = holder.get_submodule(part)
        empty = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta")
        holder.register_parameter(leaf, torch.nn.Parameter(empty, requires_grad=False))
    if is_cold:
        prepare_cache(files, "cold")  # the headers were read
    return lambda: (module, umem.load_into(module, checkpoint, device="cpu"))


# --- transformers and accelerate -------------------------------------------------------------------------------------


def prepared_transformers(checkpoint: Path, files: list[Path]) -> Load:
    """`from_pretrained`; what it leaves in mapped files is copied."""
    import transformers

    import_model_code(checkpoint)
    return lambda: own_all(transformers.AutoModelForCausalLM.from_pretrained(checkpoint), files)


def prepared_accelerate(checkpoint: Path, files: list[Path]) -> Load:
    """An empty model, then `load_checkpoint_and_dispatch`; what it leaves in mapped files is copied."""
    import accelerate

    del accelerate
    import_model_code(checkpoint)
    return lambda: own_all(load_by_accelerate(checkpoint), files)


# --- readers of safetensors files ------------------------------------------------------------------------------------


def prepared_safetensors_mmap(_checkpoint: Path, files: list[Path]) -> Load:
    """`load_file`, file by file, and a clone of each tensor."""
    from safetensors.torch import load_file

    def load() -> dict[str, torch.Tensor]:
        tensors = {}
        for path in files:
            tensors.update({name: tensor.clone() for name, tensor in load_file(path).items()})
        return tensors

    return load


def prepared_safetensors_pread(_checkpoint: Path, files: list[Path]) -> Load:
    """`load_file(backend="pread")`, file by file."""
    from safetensors.torch import load_file

    def load() -> dict[str, torch.Tensor]:
        tensors = {}
        for path in files:
            tensors.update(load_file(path, backend="pread"))
        return tensors

    return load


def prepared_fastsafetensors(_checkpoint: Path, files: list[Path]) -> Load:
    """All files by one `SafeTensorsFileLoader`; its tensors own their memory."""
    from fastsafetensors import SafeTensorsFileLoader

    def load() -> dict[str, torch.Tensor]:
        loader = SafeTensorsFileLoader(None, device="cpu", nogds=True)
        loader.add_filenames({0: [str(path) for path in files]})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        buffers.close()
        loader.close()
        return tensors

    return load


def prepared_runai(_checkpoint: Path, files: list[Path]) -> Load:
    """All files by one `SafetensorsStreamer`, whose tensors are the caller's to keep (`owned`, its default)."""
    from runai_model_streamer import SafetensorsStreamer

    def load() -> dict[str, torch.Tensor]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in files])
            return dict(streamer.get_tensors())

    return load


def prepared_torch_dcp(checkpoint: Path, _files: list[Path]) -> Load:
    """`torch.distributed.checkpoint.load` into empty tensors, a thread for each processor core."""
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

    def load() -> dict[str, torch.Tensor]:
        reader = HuggingFaceStorageReader(str(checkpoint), thread_count=os.cpu_count() or 1)
        tensors = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in reader.read_metadata().state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        load_distributed(tensors, storage_reader=reader, no_dist=True)
        return tensors

    return load


# --- formats of their own --------------------------------------------------------------------------------------------


def prepared_tensorizer(_checkpoint: Path, files: list[Path]) -> Load:
    """An eager `TensorDeserializer`, which chooses its number of threads."""
    from tensorizer import TensorDeserializer

    def load() -> dict[str, torch.Tensor]:
        with TensorDeserializer(str(files[0]), device="cpu") as deserializer:
            return {name: parameter.data for name, parameter in deserializer.items()}

    return load


def prepared_flashpack(_checkpoint: Path, files: list[Path]) -> Load:
    """`read_flashpack_file` with its parallel reader, and the views of what it read."""
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

    return lambda: dict(iterate_from_flash_tensor(*read_flashpack_file(str(files[0]), device="cpu")))


def convert(checkpoint: Path, destination: Path) -> None:
    """Write the checkpoint's tensors to `destination`, in the format that its name says, by that format's owner."""
    from safetensors.torch import load_file

    tensors = {name: tensor for path in shards_of(checkpoint) for name, tensor in load_file(path).items()}
    partial = destination.with_suffix(".partial")
    if destination.suffix == ".flashpack":
        from flashpack import pack_to_file

        pack_to_file(tensors, str(partial), None)
    else:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(partial))
        serializer.write_state_dict(tensors)
        serializer.close()
    os.replace(partial, destination)


def files_of(loader: Loader, checkpoint: Path, converted: Path) -> list[Path]:
    """The files that a loader reads; `converted` is where those in formats of their own lie."""
    return shards_of(checkpoint) if loader.converted_name is None else [converted / loader.converted_name]


LOADERS = (
    Loader(
        name="umem-load", package="umem", module="umem", end_state="model",
        how="`umem.load(path)`", prepare=prepared_umem,
    ),
    Loader(
        name="transformers", package="transformers", module="transformers", end_state="model",
        how="`from_pretrained(path)`, and a clone of what is left in mapped files", prepare=prepared_transformers,
    ),
    Loader(
        name="accelerate", package="accelerate", module="accelerate", end_state="model",
        how="`init_empty_weights`, `load_checkpoint_and_dispatch`, and a clone of what is left in mapped files",
        prepare=prepared_accelerate, merges_experts=False,
    ),
    Loader(
        name="umem-load-into", package="umem", module="umem", end_state="tensors",
        how="`umem.load_into` a module of empty parameters, which is there before",
        prepare=prepared_umem_into,
    ),
    Loader(
        name="safetensors-mmap", package="safetensors", module="safetensors", end_state="tensors",
        how="`load_file(path)` and a clone of each tensor", prepare=prepared_safetensors_mmap,
    ),
    Loader(
        name="safetensors-pread", package="safetensors", module="safetensors", end_state="tensors",
        how='`load_file(path, backend="pread")`', prepare=prepared_safetensors_pread,
    ),
    Loader(
        name="fastsafetensors", package="fastsafetensors", module="fastsafetensors", end_state="tensors",
        how='`SafeTensorsFileLoader(None, device="cpu", nogds=True)`', prepare=prepared_fastsafetensors,
    ),
    Loader(
        name="runai", package="runai-model-streamer", module="runai_model_streamer", end_state="tensors",
        how="`SafetensorsStreamer().stream_files(paths)`", prepare=prepared_runai,
    ),
    Loader(
        name="runai-small-pages", package="runai-model-streamer", module="runai_model_streamer", end_state="tensors",
        how="the same with `NUMPY_MADVISE_HUGEPAGE=0`", prepare=prepared_runai,
        environment={"NUMPY_MADVISE_HUGEPAGE": "0"},
    ),
    Loader(
        name="torch-dcp", package="torch", module="torch", end_state="tensors",
        how="`dcp.load` with `HuggingFaceStorageReader`, a thread a core", prepare=prepared_torch_dcp,
    ),
    Loader(
        name="tensorizer", package="tensorizer", module="tensorizer", end_state="tensors",
        how='`TensorDeserializer(path, device="cpu")`, a file of its own format', prepare=prepared_tensorizer,
        converted_name="model.tensors",
    ),
    Loader(
        name="flashpack", package="flashpack", module="flashpack", end_state="tensors",
        how="`read_flashpack_file` with `FLASHPACK_CPU_PARALLEL_READ=1`, a file of its own format",
        prepare=prepared_flashpack, environment={"FLASHPACK_CPU_PARALLEL_READ": "1"},
        converted_name="model.flashpack",
    ),
)  # fmt: skip
