"""Every error that umem raises on purpose.

One root, `UmemError`. Each leaf also inherits the builtin that a caller would catch anyway, carries its facts as
attributes, and says in its message what to do next. This module imports nothing of umem, so every part may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "AmbiguousCheckpointError",
    "ChangedFileError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointNotFoundError",
    "CompressedTensorError",
    "CoverageError",
    "DuplicateKeyError",
    "DuplicateTensorError",
    "HeaderSyntaxError",
    "HeaderTooLongError",
    "IncompleteConversionError",
    "IndexFormatError",
    "InsufficientMemoryError",
    "InsufficientSpaceError",
    "KeyMismatchError",
    "LegacyPickleError",
    "LfsPointerError",
    "MemoryOverrunError",
    "MetadataError",
    "MissingDependencyError",
    "MissingShardError",
    "MissingTensorError",
    "PlanError",
    "ProcessMemory",
    "ReadError",
    "Remedy",
    "RemoteReadError",
    "RunFailedError",
    "SettingsError",
    "ShapeMismatch",
    "ShardPathError",
    "SnapshotError",
    "TensorExtentError",
    "TensorHoleError",
    "TensorOverlapError",
    "TensorSizeError",
    "TruncatedFileError",
    "UmemError",
    "UnknownDTypeError",
    "UnsafePickleError",
    "UnsupportedError",
]


class UmemError(Exception):
    """Root of every error that umem raises on purpose.

    Attributes
    ----------
    spoiled
        Live tensors that a load in place had begun to overwrite when it failed.
    """

    spoiled: tuple[str, ...] = ()


class SettingsError(UmemError, ValueError):
    """A setting has no meaning; the message names the setting and what it takes."""


class MissingDependencyError(UmemError, ImportError):
    """An optional package is needed for what was asked."""


class UnsupportedError(UmemError, ValueError):
    """What was asked is well-formed, but umem does not do it."""


# --- checkpoints -----------------------------------------------------------------------------------------------------


class CheckpointError(UmemError):
    """A checkpoint cannot be used.

    Attributes
    ----------
    path
        The file or directory at fault.
    tensor
        The stored tensor at fault, where there is one.
    """

    def __init__(self, message: str, *, path: str, tensor: str | None = None) -> None:
        self.path = path
        self.tensor = tensor
        where = path if tensor is None else f"{path}: tensor {tensor!r}"
        super().__init__(f"{where}: {message}")


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at that path, nor at that hub id."""


class AmbiguousCheckpointError(CheckpointError, ValueError):
    """A directory holds several checkpoints and nothing says which one is meant."""


class CheckpointFormatError(CheckpointError, ValueError):
    """The bytes of a checkpoint break the rules of their format."""


class TruncatedFileError(CheckpointFormatError):
    """A file ends before what it declares."""


class HeaderTooLongError(CheckpointFormatError):
    """A safetensors header declares more bytes than the format allows."""


class HeaderSyntaxError(CheckpointFormatError):
    """A header is not UTF-8, not JSON, or not of the declared form."""


class DuplicateKeyError(HeaderSyntaxError):
    """A JSON object names one key twice, so two readers could see two different checkpoints."""


class MetadataError(HeaderSyntaxError):
    """`__metadata__` is not a map of strings to strings."""


class UnknownDTypeError(CheckpointFormatError):
    """A tensor declares a dtype that the format does not define."""


class TensorExtentError(CheckpointFormatError):
    """A tensor's byte range is not a range inside its file."""


class TensorSizeError(CheckpointFormatError):
    """A tensor's byte range does not hold shape x dtype."""


class TensorOverlapError(CheckpointFormatError):
    """Two tensors claim the same bytes of a file."""


class TensorHoleError(CheckpointFormatError):
    """Bytes of a file belong to no tensor."""


class LfsPointerError(CheckpointFormatError):
    """A Git LFS pointer lies where the weights should be."""


class LegacyPickleError(CheckpointFormatError):
    """A torch file of the format before zip archives; it cannot be mapped."""


class UnsafePickleError(CheckpointFormatError):
    """A torch file asks for code that a checkpoint does not need."""


class CompressedTensorError(CheckpointFormatError):
    """A tensor is stored compressed or in foreign byte order, so it has no byte range to read."""


class IndexFormatError(CheckpointFormatError):
    """An index file is not of the form that the hub libraries write."""


class ShardPathError(CheckpointFormatError):
    """An index names a shard outside the directory of the checkpoint."""


class MissingShardError(CheckpointFormatError, FileNotFoundError):
    """An index names a shard that is not there."""


class MissingTensorError(CheckpointFormatError):
    """An index places a tensor in a shard that lacks it."""


class DuplicateTensorError(CheckpointFormatError):
    """Two shards hold a tensor of one name."""


class ChangedFileError(CheckpointError, OSError):
    """A file changed or shrank after it was opened."""


class ReadError(CheckpointError, OSError):
    """The system failed to read bytes that a file has."""


class RemoteReadError(ReadError):
    """A store or server did not give the bytes of a file, after all attempts.

    Attributes
    ----------
    start, end
        The byte range that was asked for; None where the file itself was asked after.
    attempts
        How often in a row it was asked in vain.
    """

    def __init__(
        self, message: str, *, path: str, attempts: int, start: int | None = None, end: int | None = None
    ) -> None:
        self.start = start
        self.end = end
        self.attempts = attempts
        super().__init__(message, path=path)


# --- plans -----------------------------------------------------------------------------------------------------------


class PlanError(UmemError):
    """Checkpoint and model do not make a plan."""


class ShapeMismatch(NamedTuple):
    """One target whose stored form does not fit: shapes in elements, dtypes by safetensors name."""

    target: str
    stored: str
    expected: str

    def __str__(self) -> str:
        return f"{self.target}: stored {self.stored}, model has {self.expected}"


class KeyMismatchError(PlanError, ValueError):
    """Names, shapes or dtypes of checkpoint and model differ; all differences are in one error.

    Attributes
    ----------
    missing
        Targets that the checkpoint does not fill.
    unexpected
        Stored tensors that the model has no place for.
    mismatched
        Targets whose stored form has another shape or an incompatible dtype.
    near
        For a missing or unexpected name, names of the other side that look like it.
    """

    def __init__(
        self,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[ShapeMismatch] = (),
        near: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)
        self.near = near or {}
        super().__init__(self._message())

    def _message(self, shown: int = 10) -> str:
        lines = ["checkpoint and model do not match"]
        parts: tuple[tuple[str, Sequence[object]], ...] = (
            ("missing from the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("of another shape or dtype", self.mismatched),
        )
        for title, items in parts:
            if not items:
                continue
            lines.append(f"  {len(items)} {title}:")
            for item in items[:shown]:
                near = self.near.get(str(item), ())
                hint = f"   (near: {', '.join(near)})" if near else ""
                lines.append(f"    {item}{hint}")
            if len(items) > shown:
                lines.append(f"    ... and {len(items) - shown} more")
        lines.append(
            "  Is this the checkpoint of this model? Name what may differ with allow_missing=[...] and"
            " allow_unexpected=[...] (patterns such as 'score.*'), or rename with key_mapping={regex: replacement}."
        )
        return "\n".join(lines)


class CoverageError(PlanError, ValueError):
    """The writes to a target do not cover each of its elements exactly once.

    Attributes
    ----------
    target
        The target's name.
    """

    def __init__(self, message: str, *, target: str) -> None:
        self.target = target
        super().__init__(f"{target}: {message}; nothing was read. This is a fault of the adapter that made the plan.")


class IncompleteConversionError(PlanError, RuntimeError):
    """A conversion that its owner ran did not give what the plan promised.

    Attributes
    ----------
    conversion
        What was run.
    targets
        The targets that it left out or gave in another form.
    """

    def __init__(self, message: str, *, conversion: str, targets: Sequence[str]) -> None:
        self.conversion = conversion
        self.targets = tuple(targets)
        super().__init__(f"{conversion}: {message}: {', '.join(self.targets[:8])}")


class ProcessMemory(NamedTuple):
    """Another process: its number, its name, and the bytes that would be free without it."""

    pid: int
    name: str
    nbytes: int


class Remedy(NamedTuple):
    """Something that would make a load fit.

    Attributes
    ----------
    action
        `raise_budget`, `dtype`, `keep_quantized`, `offload`, `stop_process`, `free_huge_pages`, `drop_caches` or
        `reboot`.
    text
        What to do, for people.
    nbytes
        What the load would need then, or what it would free; None where that is no number.
    """

    action: str
    text: str
    nbytes: int | None = None


class InsufficientMemoryError(UmemError, MemoryError):
    """The plan needs more memory than there is; said before a tensor byte is read.

    Attributes
    ----------
    needed_bytes, available_bytes
        What the load needs where it does not fit, and what may be taken there, in bytes.
    source
        Where `available_bytes` comes from.
    largest
        The largest parts of the plan: (name, bytes), largest first.
    processes
        The other processes that hold most of that memory, largest first.
    remedies
        What would make the load fit; each of them would be enough.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int,
        available_bytes: int,
        source: str,
        largest: Sequence[tuple[str, int]] = (),
        processes: Sequence[ProcessMemory] = (),
        remedies: Sequence[Remedy] = (),
    ) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.source = source
        self.largest = tuple(largest)
        self.processes = tuple(processes)
        self.remedies = tuple(remedies)
        super().__init__(message)


class MemoryOverrunError(UmemError, MemoryError):
    """Memory ran short while a load was under way, and the load stopped and gave back what it had taken.

    Attributes
    ----------
    cause
        `own`, `other_process`, `swap`, `thrash`, `fragmentation` or `pressure`.
    rule, value, threshold
        The rule that stopped it, what it saw, and its bound.
    process
        The process that grew most meanwhile, with the bytes by which it grew; None where none did that can be told.
    series, verdicts
        Memory over time and the changes of level, as in a load report's JSON.
    """

    def __init__(
        self,
        message: str,
        *,
        cause: str,
        rule: str,
        value: float,
        threshold: float,
        process: ProcessMemory | None,
        series: Sequence[Mapping[str, Any]],
        verdicts: Sequence[Mapping[str, Any]],
    ) -> None:
        self.cause = cause
        self.rule = rule
        self.value = value
        self.threshold = threshold
        self.process = process
        self.series = tuple(series)
        self.verdicts = tuple(verdicts)
        super().__init__(message)


class InsufficientSpaceError(UmemError, OSError):
    """What is to be written needs more space than the drive has; said before a tensor byte is read.

    Attributes
    ----------
    path
        The folder or file to write.
    needed_bytes, available_bytes
        What it needs and what is free, in bytes.
    """

    def __init__(self, message: str, *, path: str, needed_bytes: int, available_bytes: int) -> None:
        self.path = path
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        super().__init__(message)


# --- machines --------------------------------------------------------------------------------------------------------


class SnapshotError(UmemError, ValueError):
    """A saved snapshot of a machine cannot be read.

    Attributes
    ----------
    path
        The file.
    """

    def __init__(self, message: str, *, path: str) -> None:
        self.path = path
        super().__init__(f"{path}: {message}; save one with: umem probe --save FILE")


# --- measurement -----------------------------------------------------------------------------------------------------


class RunFailedError(UmemError, RuntimeError):
    """A process that was to be measured did not give its figures; the message says why."""
