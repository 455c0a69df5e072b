"""Compares umem with `from_pretrained` on tiny models of every kind that transformers has a conversion mapping for.

Covered: each entry of the library's conversion mapping (model types and classes) and each causal language model
family. A row makes a tiny configuration by rule (`parity_exceptions.py`), fills every parameter and persistent buffer
with seeded random values, writes the checkpoint by `save_pretrained` (which restores the original layout), and loads it
by the library and by umem in one process, with the same dtype. Equal means: names and their order, dtypes, shapes,
strides, ties, every bit of every parameter and buffer (non-persistent ones too), `requires_grad`, training mode, the
configuration, the conversions kept for saving, and the outputs of a forward pass wherever the oracle's model runs.

Not covered: quantized checkpoints, devices other than the CPU, remote code, and layouts that `save_pretrained` does not
write back; how many of the declared converters a row used is in the table. The oracle is what `from_pretrained` gives,
not the model that was saved. Each row runs in a process of its own, with a time limit.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import multiprocessing
import platform
import re
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import parity_exceptions as known
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping, core_model_loading
from transformers.decision.modeling_utils import DecisionMixin
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import umem
import umem.adapters.hosts.transformers

RESULTS = Path(__file__).parent / "results"
TIMEOUT_S = 60.0
LARGEST_BYTES = 24 << 20
#: Half of the rows are written in shards this small, so that what belongs together lies in several files.
SHARD_BYTES = 64 << 10
#: In the order of preference for the class of a model type.
AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForObjectDetection",
    "AutoModelForTextToWaveform",
    "AutoModelForPreTraining",
    "AutoModel",
)
#: The stored dtype and the one asked for: one row in six is float32, one in six is cast on the way.
DTYPES = [(torch.bfloat16, torch.bfloat16)] * 4 + [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A row to run: a model type or class name, and what makes it part of the matrix."""

    name: str
    in_mapping: bool
    has_operations: bool
    is_causal_family: bool


@dataclasses.dataclass(slots=True)
class Row:
    """What came of an entry. `status`: equal, different, umem raised, oracle raised, not instantiated, died."""

    entry: str
    in_mapping: bool
    has_operations: bool
    is_causal_family: bool
    status: str = "died"
    detail: str = ""
    model_class: str = ""
    dtype: str = ""
    files: int = 0
    stored_bytes: int = 0
    route_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    materialized: dict[str, int] = dataclasses.field(default_factory=dict)
    converters_declared: int = 0
    converters_used: int = 0
    renamings_used: int = 0
    missing: int = 0
    unexpected: int = 0
    outputs: str = ""

    @classmethod
    def of(cls, entry: Entry, detail: str = "") -> Row:
        """An empty row."""
        return cls(entry.name, entry.in_mapping, entry.has_operations, entry.is_causal_family, detail=detail)

    @property
    def is_compared(self) -> bool:
        """Whether both loads ended in a model or in an error of umem's."""
        return self.status in {"equal", "different", "umem raised"}


def entries() -> list[Entry]:
    """Every entry of the conversion mapping, then the causal families that it does not name."""
    mapping = conversion_mapping._build_checkpoint_conversion_mapping()
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    operations = {
        name: any(isinstance(step, core_model_loading.WeightConverter) for step in steps)
        for name, steps in mapping.items()
    }
    named = [
        Entry(name, in_mapping=True, has_operations=operations[name], is_causal_family=name in causal)
        for name in mapping
    ]
    return named + [
        Entry(name, in_mapping=False, has_operations=False, is_causal_family=True)
        for name in causal
        if name not in mapping
    ]


# --- the class and its tiny configuration ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """The class to make for an entry, its configuration class, and the class that loads it: itself or an Auto class."""

    model_class: Any
    config_class: Any
    loader: Any


def kind_of(name: str) -> Kind:
    """What to make for an entry: the class itself, or the one with the head that the Auto classes know for its type."""
    chosen = known.CLASSES.get(name, name)
    if "." in chosen:
        package, class_name = chosen.split(".")
        model_class = getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), class_name)
    elif chosen in CONFIG_MAPPING:
        return _kind_of_type(chosen)
    else:
        model_class = getattr(transformers, chosen)
    return Kind(model_class, model_class.config_class, model_class)


def _kind_of_type(model_type: str) -> Kind:
    """The class with a head if there is one. Some types borrow another type's class, which only Auto classes load."""
    config_class = CONFIG_MAPPING[model_type]
    found = [(_class_in(mapping, config_class), loader) for mapping, loader in _auto_classes()]
    offered = [(model_class, loader) for model_class, loader in found if model_class is not None]
    for model_class, _ in offered:
        if issubclass(config_class, model_class.config_class):
            return Kind(model_class, config_class, model_class)
    if offered:
        return Kind(offered[0][0], config_class, offered[0][1])
    model_class = _class_in_module(config_class)
    return Kind(model_class, config_class, model_class)


def _auto_classes() -> Iterator[tuple[Any, Any]]:
    for name in AUTO_CLASSES:
        loader = getattr(transformers, name)
        yield loader._model_mapping, loader


def _class_in(mapping: Any, config_class: Any) -> Any:
    found = mapping.get(config_class, None)
    return found[0] if isinstance(found, tuple) else found


def _class_in_module(config_class: Any) -> Any:
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    candidates = [
        member
        for member in vars(module).values()
        if inspect.isclass(member)
        and issubclass(member, transformers.PreTrainedModel)
        and member.__dict__.get("config_class", getattr(member, "config_class", None)) is config_class
        and not member.__name__.endswith("PreTrainedModel")
    ]
    if not candidates:
        raise ValueError(f"no model class has the configuration {config_class.__name__}")
    return max(candidates, key=lambda member: ("For" in member.__name__, -len(member.__name__)))


def tiny_config(config_class: Any, given: Mapping[str, Any] | None = None) -> Any:
    """A small configuration: fields by rule, then the exceptions of its model type, then `given`."""
    special = known.EXCEPTIONS.get(config_class.model_type, {}) | dict(given or {})
    own = {name: value for name, value in special.items() if "." not in name}
    names = {field.name for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        value = _tiny_value(field.name, _default(field), names)
        if value is not None:
            values[field.name] = value
    for name, spec in config_class.sub_configs_defaults.items():
        if name not in own and _is_known(spec):
            nested = {key.partition(".")[2]: value for key, value in special.items() if key.startswith(f"{name}.")}
            values[name] = _nested_config(spec, nested)
    return config_class(**values | own)


def _nested_config(spec: Any, given: Mapping[str, Any]) -> Any:
    defaults = dict(spec.init_kwargs)
    config_class = spec.config_class
    if not issubclass(config_class, transformers.PreTrainedConfig):
        config_class = CONFIG_MAPPING[defaults.pop("model_type", spec.model_type)]
    return tiny_config(config_class, dict(_shrunk(defaults)) | dict(given))


def _shrunk(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Declared values by rule, those of nested configurations under dotted names."""
    for name, value in values.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield from _shrunk({key: part for key, part in value.items() if key != "model_type"}, f"{prefix}{name}.")
        else:
            tiny = _tiny_value(name, value, set(values))
            yield f"{prefix}{name}", value if tiny is None else tiny


def _is_known(spec: Any) -> bool:
    """Whether the library knows the configuration that it declares as the default of a nested one."""
    return spec.model_type in CONFIG_MAPPING or issubclass(spec.config_class, transformers.PreTrainedConfig)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _tiny_value(name: str, default: Any, names: set[str]) -> Any:
    """The value of a field by rule; None where it keeps its default."""
    if isinstance(default, list | tuple):
        return _tiny_list(name, default)
    if not isinstance(default, int) or isinstance(default, bool) or name in known.KEPT_FIELDS:
        return None
    if re.search(known.ID_FIELD, name):
        return known.TOKENS.get(name, 3 + zlib.crc32(name.encode()) % 60)
    if name == "num_hidden_layers" and names & known.HYBRID_FIELDS:
        return min(default, 4)
    if "qk_rope_head_dim" in names:  # latent attention rotates a slice of each head and has a key for every query
        name = {"head_dim": "qk_rope_head_dim", "num_key_value_heads": "num_attention_heads"}.get(name, name)
    value = next((value for pattern, value in known.RULES if re.fullmatch(pattern, name)), None)
    return None if value is None else min(default, value)


def _tiny_list(name: str, default: Sequence[Any]) -> Any:
    """One block for each stage, and an eighth of its channels."""
    if name in known.ONE_PER_STAGE:
        return type(default)(1 for _ in default)  # type: ignore[call-arg]
    if name in known.SCALED_LISTS:
        return type(default)(value if value < 8 else value // 8 for value in default)  # type: ignore[call-arg]
    return None


# --- the checkpoint --------------------------------------------------------------------------------------------------


def tiny_model(name: str, kind: Kind, dtype: torch.dtype) -> Any:
    """A model of the entry's class, filled with values that differ from tensor to tensor."""
    model_class, config = kind.model_class, tiny_config(kind.config_class)
    with torch.device("meta"):
        size = sum(tensor.nbytes for tensor in model_class._from_config(config, dtype=dtype).state_dict().values())
    if size > LARGEST_BYTES:
        raise ValueError(f"its tiny configuration makes {size / (1 << 20):.0f} MiB")
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            _fill(key, tensor, generator)
    return model


def _fill(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Random numbers; indices are shuffled instead, to stay in range."""
    if tensor.is_floating_point() or tensor.is_complex():
        values = torch.randn(tensor.shape, generator=generator) * 0.05
        values = values.abs() + 0.5 if name.endswith("var") else values + ("norm" in name)
        tensor.copy_(values.to(tensor.dtype))
    elif tensor.dtype is torch.bool:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) < 0.5)
    elif tensor.numel() > 1:
        tensor.copy_(tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view(tensor.shape))
    elif tensor.numel() == 1:
        tensor.fill_(int(torch.randint(1, 100, (), generator=generator)))


def oracle(name: str, model: Any, loader: Any, directory: str, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
    """Write the checkpoint in the original layout and load it by the library.

    The prefixes that only old checkpoints have are written too, wherever the library then finds its way back.
    """
    model._weight_conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=name == "legacy")
    sharded = name not in known.OLD_NAMES and zlib.crc32(name.encode()) % 2
    save = functools.partial(model.save_pretrained, directory, max_shard_size=SHARD_BYTES if sharded else LARGEST_BYTES)
    try:
        save()
        if name in known.OLD_NAMES:
            _rename_stored(Path(directory, "model.safetensors"), *known.OLD_NAMES[name])
        loaded, info = _from_pretrained(loader, directory, dtype)
        if not info["missing_keys"] and not info["unexpected_keys"]:
            return loaded, info
    except Exception:  # noqa: BLE001, S110 - then without them
        pass
    del model._weight_conversions
    for file in Path(directory).iterdir():
        file.unlink()
    save()
    return _from_pretrained(loader, directory, dtype)


def _rename_stored(path: Path, pattern: str, replacement: str) -> None:
    tensors = load_file(path)
    save_file({re.sub(pattern, replacement, key): tensor for key, tensor in tensors.items()}, path, {"format": "pt"})


def _from_pretrained(loader: Any, directory: str, dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
    torch.manual_seed(0)
    if issubclass(loader, DecisionMixin):  # its from_pretrained cannot give the loading information
        return loader.from_pretrained(directory, dtype=dtype), {"missing_keys": (), "unexpected_keys": ()}
    loaded, info = loader.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    return loaded, info


# --- comparing -------------------------------------------------------------------------------------------------------


def differences(expected: Any, found: Any) -> Iterator[str]:
    """What differs between two loaded models, most basic first; nothing where they are equal."""
    yield from _differences_of_names("state_dict", list(expected.state_dict()), list(found.state_dict()))
    parameters = _parameters(expected), _parameters(found)
    buffers = _buffers(expected), _buffers(found)
    yield from _differences_of_names("parameters", list(parameters[0]), list(parameters[1]))
    yield from _differences_of_names("buffers", list(buffers[0]), list(buffers[1]))
    for first, second in (parameters, buffers):
        for name in first.keys() & second.keys():
            yield from _differences_of_tensors(name, first[name], second[name])
    for what, fact in _FACTS.items():
        yield from _differences_of_facts(what, fact(expected), fact(found))


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _buffers(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


def _differences_of_names(what: str, expected: list[str], found: list[str]) -> Iterator[str]:
    if expected == found:
        return
    lacking, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    yield f"{what}: lacks {lacking[:3]}, has {extra[:3]} besides" if lacking or extra else f"{what}: another order"


def _differences_of_tensors(name: str, expected: torch.Tensor, found: torch.Tensor) -> Iterator[str]:
    facts = [(tensor.dtype, tuple(tensor.shape), tensor.device, _strides(tensor)) for tensor in (expected, found)]
    if facts[0] != facts[1]:
        yield f"{name}: {facts[0]} against {facts[1]}"
    elif expected.requires_grad != found.requires_grad:
        yield f"{name}: requires_grad {expected.requires_grad} against {found.requires_grad}"
    elif not same_bits(expected, found):
        yield f"{name}: values differ"


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions longer than one."""
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def same_bits(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bytes, NaNs included."""
    if expected.is_meta or found.is_meta:
        return expected.is_meta and found.is_meta
    first, second = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (expected, found))
    return torch.equal(first, second)


def _ties(model: Any) -> list[tuple[str, ...]]:
    """Names that share memory, in groups."""
    named: dict[int, list[str]] = {}
    for name, tensor in (_parameters(model) | _buffers(model)).items():
        if tensor.numel() and not tensor.is_meta:
            named.setdefault(tensor.data_ptr(), []).append(name)
    return sorted(tuple(names) for names in named.values() if len(names) > 1)


def _conversions(model: Any) -> list[tuple[str, str, str]]:
    """The conversions that the model keeps for saving."""
    return [
        (type(step).__name__, str(step.source_patterns), str(step.target_patterns))
        for step in model._weight_conversions
    ]


_FACTS: dict[str, Callable[[Any], Any]] = {
    "ties": _ties,
    "objects that are one": lambda model: _groups_by(id, _parameters(model)),
    "non-persistent buffers": lambda model: sorted(set(_buffers(model)) - set(model.state_dict())),
    "training mode": lambda model: [name for name, module in model.named_modules() if module.training],
    "classes of parameters": lambda model: {name: type(value).__name__ for name, value in _parameters(model).items()},
    "configuration": lambda model: model.config.to_dict(),
    "conversions for saving": _conversions,
}


def _groups_by(key: Callable[[torch.Tensor], int], tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(key(tensor), []).append(name)
    return sorted(tuple(names) for names in groups.values() if len(names) > 1)


def _differences_of_facts(what: str, expected: Any, found: Any) -> Iterator[str]:
    if expected == found:
        return
    if isinstance(expected, dict):
        changed = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
        yield f"{what}: " + ", ".join(f"{key} {expected.get(key)!r} against {found.get(key)!r}" for key in changed[:3])
    else:
        lacking = [part for part in expected if part not in found]
        extra = [part for part in found if part not in expected]
        yield f"{what}: lacks {lacking[:3]}, has {extra[:3]} besides"


# --- running ---------------------------------------------------------------------------------------------------------


def tiny_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Small inputs by the name of the model's main input."""
    config, dtype = model.config, model.dtype
    names = inspect.signature(model.forward).parameters
    main = "input_ids" if "input_ids" in names else model.main_input_name
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(64, 100, (1, 16), generator=generator)
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 64)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    channels = getattr(vision, "num_channels", 3)
    made = {
        "input_ids": tokens,
        "pixel_values": torch.randn((1, channels, height, width), generator=generator).to(dtype),
        "input_features": torch.randn((1, getattr(config, "num_mel_bins", 16), 128), generator=generator).to(dtype),
        "input_values": torch.randn((1, 1, 1600), generator=generator).to(dtype),
    }
    required = [key for key, parameter in names.items() if parameter.default is parameter.empty and key in made]
    inputs = {key: made[key] for key in (main, *required) if key in made and key in names} or dict(model.dummy_inputs)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = tokens
    return inputs


def compared_outputs(expected: Any, found: Any) -> str:
    """equal, different, or why the oracle's model does not run on tiny inputs."""
    try:
        inputs = tiny_inputs(expected)
        first = _outputs(expected, inputs)
    except Exception as error:  # noqa: BLE001 - whatever a model does not like about made-up inputs
        return f"not run: {_short(error)}"
    try:
        second = _outputs(found, inputs)
    except Exception as error:  # noqa: BLE001 - the oracle's model ran
        return f"different: {_short(error)}"
    same = len(first) == len(second) and all(
        one.shape == other.shape and one.dtype == other.dtype and same_bits(one, other)
        for one, other in zip(first, second, strict=True)
    )
    return "equal" if same else "different"


def _outputs(model: Any, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(_tensors_in(model(**inputs)))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)


def _short(error: BaseException, length: int = 160) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:length]


# --- one row ---------------------------------------------------------------------------------------------------------


def run_entry(entry: Entry) -> Row:
    """Make, save, load twice and compare one entry."""
    row = Row.of(entry)
    if entry.name in known.NO_SUCH_MODEL:
        row.status, row.detail = "not instantiated", known.NO_SUCH_MODEL[entry.name]
        return row
    stored, asked = DTYPES[zlib.crc32(entry.name.encode()) % len(DTYPES)]
    row.dtype = str(asked).removeprefix("torch.") + ("" if stored is asked else " from float32")
    with tempfile.TemporaryDirectory() as directory:
        try:
            kind = kind_of(entry.name)
            model = tiny_model(entry.name, kind, stored)
        except Exception as error:  # noqa: BLE001 - the row says which
            row.status, row.detail = "not instantiated", _short(error)
            return row
        row.model_class = type(model).__name__
        try:
            expected, info = oracle(entry.name, model, kind.loader, directory, asked)
        except Exception as error:  # noqa: BLE001 - the row says which
            row.status, row.detail = "oracle raised", _short(error)
            return row
        _compare(row, kind.loader, directory, asked, expected, info)
    return row


def _compare(row: Row, loader: Any, directory: str, dtype: torch.dtype, expected: Any, info: Mapping[str, Any]) -> None:
    row.missing, row.unexpected = len(info["missing_keys"]), len(info["unexpected_keys"])
    files = list(Path(directory).glob("*.safetensors"))
    row.files, row.stored_bytes = len(files), sum(file.stat().st_size for file in files)
    steps = getattr(expected, "_weight_conversions", None) or []
    row.converters_used = _count_converters(steps)
    row.renamings_used = len(steps) - row.converters_used
    row.converters_declared = _count_converters(conversion_mapping.get_model_conversion_mapping(expected))
    torch.manual_seed(0)
    try:
        found, report = umem.load(
            directory,
            model_class=loader,
            dtype=dtype,
            device="cpu",
            allow_missing=["*"] if row.missing else [],
            allow_unexpected=["*"] if row.unexpected else [],
            return_report=True,
        )
    except Exception as error:  # noqa: BLE001 - the row says which
        row.status, row.detail = "umem raised", _short(error, 600)
        return
    for (route, reason), count in report.plan.bytes_by_route().items():
        row.route_bytes[str(route)] = row.route_bytes.get(str(route), 0) + count
        if str(route) == "materialized":
            row.materialized[reason] = row.materialized.get(reason, 0) + count
    found_differences = list(differences(expected, found))
    row.outputs = compared_outputs(expected, found)
    if row.outputs.startswith("different"):
        found_differences.append(f"outputs {row.outputs}")
    row.status = "different" if found_differences else "equal"
    more = f"; {len(found_differences)} in all" if len(found_differences) > 4 else ""
    row.detail = "; ".join(found_differences[:4]) + more


def _count_converters(steps: Sequence[Any]) -> int:
    return sum(isinstance(step, core_model_loading.WeightConverter) for step in steps)


# --- the matrix ------------------------------------------------------------------------------------------------------


def _worker(entry: Entry, pipe: Connection) -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    pipe.send(run_entry(entry))


def run_matrix(chosen: Sequence[Entry], *, workers: int, timeout_s: float) -> list[Row]:
    """One process for each entry, `workers` at a time; a row for each, whatever becomes of its process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "umem.adapters.hosts.transformers", "transformers.models.auto.modeling_auto"]
    )
    waiting, rows = list(reversed(chosen)), dict[str, Row]()
    running: list[_Running] = []
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(_Running.start(context, waiting.pop()))
        for job in list(running):
            row = job.result(timeout_s)
            if row is not None:
                running.remove(job)
                rows[row.entry] = row
                print(f"[{len(rows)}/{len(chosen)}] {job.seconds:4.1f} s  {_line(row)}", flush=True)
        time.sleep(0.01)
    return [rows[entry.name] for entry in chosen]


@dataclasses.dataclass(slots=True)
class _Running:
    entry: Entry
    process: Any
    pipe: Connection
    started_s: float

    @classmethod
    def start(cls, context: Any, entry: Entry) -> _Running:
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(entry, sending), daemon=True)
        process.start()
        sending.close()
        return cls(entry, process, receiving, time.monotonic())

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def result(self, timeout_s: float) -> Row | None:
        """The row, once there is one; a row that says so where the process died or took too long."""
        row = None
        if self.pipe.poll():
            row = self._received()
        elif self.seconds > timeout_s:
            self.process.kill()
            row = self._row(f"took more than {timeout_s:.0f} s")
        if row is not None:
            self.process.join()
        return row

    def _received(self) -> Row:
        try:
            received: Row = self.pipe.recv()
        except EOFError:
            self.process.join()
            return self._row(f"its process ended with code {self.process.exitcode}")
        return received

    def _row(self, detail: str) -> Row:
        return Row.of(self.entry, detail)


def _line(row: Row) -> str:
    routes = " ".join(f"{route} {count}" for route, count in sorted(row.route_bytes.items()))
    return f"{row.entry} ({row.model_class}, {row.dtype}): {row.status} {row.detail} [{routes}; outputs {row.outputs}]"


# --- the results -----------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Counts for the parts of the matrix."""
    parts = {
        "mapping entries with tensor operations": [row for row in rows if row.has_operations],
        "all mapping entries": [row for row in rows if row.in_mapping],
        "causal families": [row for row in rows if row.is_causal_family],
        "causal families without tensor operations": [
            row for row in rows if row.is_causal_family and not row.has_operations
        ],
        "everything": list(rows),
    }
    return {part: _counts(members) for part, members in parts.items()}


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    return {
        "rows": len(rows),
        "compared": sum(row.is_compared for row in rows),
        "equal": sum(row.status == "equal" for row in rows),
        "different": sum(row.status == "different" for row in rows),
        "umem raised": sum(row.status == "umem raised" for row in rows),
        "not compared": sum(not row.is_compared for row in rows),
        "with a converter used": sum(row.converters_used > 0 for row in rows),
        "with a materialized group": sum("materialized" in row.route_bytes for row in rows),
        "outputs equal": sum(row.outputs == "equal" for row in rows),
    }


def markdown(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    """The summary, what stands out, and the table."""
    counts = summary(rows)
    columns = list(next(iter(counts.values())))
    lines = ["# Parity with from_pretrained", "", ", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    lines += _table(
        ["", *columns],
        [[part, *(str(part_counts[column]) for column in columns)] for part, part_counts in counts.items()],
    )
    reasons = Counter(reason for row in rows for reason in row.materialized)
    if reasons:
        lines += ["", "## Materialized groups, by reason", ""]
        lines += _table(["reason", "rows"], [[reason, str(count)] for reason, count in reasons.most_common()])
    lines += ["", "## Not made, or not equal", ""]
    lines += _table(
        ["entry", "class", "status", "why"],
        [[row.entry, row.model_class, row.status, row.detail] for row in rows if row.status != "equal"],
    )
    lines += ["", "## Rows", ""]
    header = ["entry", "class", "dtype", "files", "direct", "streaming", "materialized"]
    header += ["converters", "missing", "unexpected", "loaded", "outputs"]
    lines += _table(header, [_cells(row) for row in rows])
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    routes = [str(row.route_bytes.get(route, 0)) for route in ("direct", "streaming", "materialized")]
    counts = [f"{row.converters_used} of {row.converters_declared}", str(row.missing), str(row.unexpected)]
    return [row.entry, row.model_class, row.dtype, str(row.files), *routes, *counts, row.status, row.outputs]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for cells in (header, ["---"] * len(header), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def machine_facts() -> dict[str, str]:
    """What the numbers were made with."""
    return {
        "umem": umem.__version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "optional packages": " and ".join(f"{name} {_version(name)}" for name in ("scipy", "timm")),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def as_json(rows: Sequence[Row], machine: Mapping[str, str]) -> str:
    """The rows, compactly: facts that are empty are left out."""
    compact = [{key: value for key, value in dataclasses.asdict(row).items() if value} for row in rows]
    head = f'{{"machine": {json.dumps(machine)},\n"summary": {json.dumps(summary(rows))},\n"rows": [\n'
    return head + ",\n".join(json.dumps(row) for row in compact) + "\n]}\n"


def main() -> int:
    """Run the matrix; the exit code is 0 where every row that could be made is equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these entries only")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--markdown", type=Path, default=None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for each entry")
    options = parser.parse_args()
    chosen = [entry for entry in entries() if not options.only or entry.name in options.only]
    rows = run_matrix(chosen, workers=options.workers, timeout_s=options.timeout)
    for part, counts in summary(rows).items():
        print(f"{part}: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    if not options.only:  # the whole matrix is the recorded result
        RESULTS.mkdir(exist_ok=True)
        options.json = options.json or RESULTS / "parity_cpu_202611.json"
        options.markdown = options.markdown or RESULTS / "parity_cpu_202611.md"
    machine = machine_facts()
    if options.json:
        options.json.write_text(as_json(rows, machine))
    if options.markdown:
        options.markdown.write_text(markdown(rows, machine))
    return int(any(row.status in {"different", "umem raised", "died"} for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
