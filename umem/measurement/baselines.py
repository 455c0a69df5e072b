"""The loaders whose way to the first forward pass is measured: umem, and the roads that people take without it.

umem takes part with a model that has memory of its own and with one that stays mapped. The one place of the package,
besides the hosts, that imports host frameworks. Each road is used as its documentation advises and left as it leaves
the model: what it keeps in mapped files is read by the forward pass, in that time. A road that cannot bring a
checkpoint to its model (one that does not merge experts, say) raises; it is not helped along.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from umem.errors import MissingDependencyError
from umem.settings import Residency

if TYPE_CHECKING:
    import torch

    from umem.report.model import LoadReport

__all__ = [
    "BASELINES",
    "MODEL_LOADERS",
    "LoadRequest",
    "Loaded",
    "ModelLoader",
    "check_installed",
    "import_model_code",
    "load_by_accelerate",
]

#: A phase, and its start and end by `time.monotonic()`.
Span = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """What is to be loaded: a checkpoint's directory, to a device as torch writes it, in a dtype or `auto`.

    `settings` are those fields of umem's settings that are not the default.
    """

    checkpoint: Path
    device: str
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Loaded:
    """A model, the phases that its loader can tell, and umem's report."""

    model: Any
    spans: list[Span]
    report: LoadReport | None = None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as `name`."""
        started_s = time.monotonic()
        yield
        self.spans.append((name, started_s, time.monotonic()))


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """One road to a model.

    Attributes
    ----------
    name
        How it is called.
    packages
        The distributions that it needs besides torch, the one that loads first.
    how
        What is called.
    prepare
        Imports what the load needs.
    load
        Loads.
    """

    name: str
    packages: tuple[str, ...]
    how: str
    prepare: Callable[[LoadRequest], None]
    load: Callable[[LoadRequest], Loaded]


def check_installed(loader: ModelLoader) -> None:
    """Return if the loader's packages are there.

    Raises
    ------
    MissingDependencyError
        One is not.
    """
    for package in loader.packages:
        if importlib.util.find_spec(package) is None:
            extra = "transformers" if package != "peft" else package
            raise MissingDependencyError(
                f"{loader.name} to a first forward pass needs {package}: pip install 'umem[{extra}]'"
            )


def import_model_code(checkpoint: Path) -> None:
    """Import the code of the checkpoint's model class, which the library does when it is first used."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = type(transformers.AutoConfig.from_pretrained(checkpoint))
    importlib.import_module(config.__module__.replace("configuration_", "modeling_"))


def _model_class(config: Any) -> Any:
    """The class that the config names, as umem's host chooses it in the usual case."""
    import transformers

    named = (getattr(config, "architectures", None) or [""])[0]
    return getattr(transformers, named, transformers.AutoModelForCausalLM)


# --- umem ------------------------------------------------------------------------------------------------------------


def _prepare_umem(request: LoadRequest) -> None:
    import_model_code(request.checkpoint)
    for module in ("umem.api", "umem.adapters.hosts.transformers", "umem.strategies"):
        importlib.import_module(module)


def _load_by_umem(request: LoadRequest, **changes: Any) -> Loaded:
    import umem
    from umem.settings import settings_from_environment

    started_s = time.monotonic()
    model, report = umem.load(
        request.checkpoint,
        device=request.device,
        dtype=request.dtype,
        settings=settings_from_environment().with_changes(**{**request.settings, **changes}),
        return_report=True,
    )
    spans: list[Span] = [("probe", started_s, min(start for _, start, _ in report.spans)), *report.spans]
    return Loaded(model, spans, report)


# --- transformers and accelerate -------------------------------------------------------------------------------------


def _prepare_transformers(request: LoadRequest) -> None:
    import_model_code(request.checkpoint)


def _load_by_transformers(request: LoadRequest) -> Loaded:
    import transformers

    config = transformers.AutoConfig.from_pretrained(request.checkpoint)
    device_map = None if request.device == "cpu" else {"": request.device}
    loaded = Loaded(None, [])
    with loaded.phase("load"):
        loaded.model = _model_class(config).from_pretrained(
            request.checkpoint, dtype=request.dtype, device_map=device_map
        )
    return loaded


def _prepare_accelerate(request: LoadRequest) -> None:
    importlib.import_module("accelerate")
    import_model_code(request.checkpoint)


def _empty_model(checkpoint: Path) -> torch.nn.Module:
    """The model on the meta device, its buffers real."""
    import accelerate
    import transformers

    config = transformers.AutoConfig.from_pretrained(checkpoint)
    with accelerate.init_empty_weights():
        model: torch.nn.Module = _model_class(config)._from_config(config)
    return model.eval()


def load_by_accelerate(checkpoint: Path, device: str = "cpu") -> torch.nn.Module:
    """An empty model, then `load_checkpoint_and_dispatch`."""
    import accelerate

    model: torch.nn.Module = accelerate.load_checkpoint_and_dispatch(
        _empty_model(checkpoint), checkpoint, device_map={"": device}, strict=True
    )
    return model


def _load_by_accelerate(request: LoadRequest) -> Loaded:
    _refuse_casts(request)
    loaded = Loaded(None, [])
    with loaded.phase("load"):
        loaded.model = load_by_accelerate(request.checkpoint, request.device)
    return loaded


def _prepare_safetensors(request: LoadRequest) -> None:
    importlib.import_module("safetensors.torch")
    _prepare_accelerate(request)


def _load_by_safetensors(request: LoadRequest) -> Loaded:
    from safetensors.torch import load_file

    _refuse_casts(request)
    loaded = Loaded(None, [])
    with loaded.phase("build"):
        loaded.model = _empty_model(request.checkpoint)
    with loaded.phase("load"):
        state: dict[str, torch.Tensor] = {}
        for path in sorted(request.checkpoint.glob("*.safetensors")):
            state |= load_file(path)
        unexpected = loaded.model.load_state_dict(state, strict=False, assign=True).unexpected_keys
        loaded.model.tie_weights()
        empty = [name for name, tensor in loaded.model.named_parameters() if tensor.is_meta]
        if unexpected or empty:
            names = ", ".join([*unexpected, *empty][:2])
            raise RuntimeError(f"stored and model's tensors have other names, as {names}")
    if request.device != "cpu":
        with loaded.phase("move"):
            loaded.model.to(request.device)
    return loaded


def _refuse_casts(request: LoadRequest) -> None:
    if request.dtype != "auto":
        raise RuntimeError("it loads the stored dtype only")


MODEL_LOADERS = {
    loader.name: loader
    for loader in (
        ModelLoader("umem", ("transformers", "accelerate"), "`umem.load(path)`", _prepare_umem, _load_by_umem),
        ModelLoader(
            "umem-mapped",
            ("transformers", "accelerate"),
            "`umem.load(path, settings=LoadSettings(residency='mapped'))`: the model is the files' own pages",
            _prepare_umem,
            partial(_load_by_umem, residency=Residency.MAPPED),
        ),
        ModelLoader(
            "transformers",
            ("transformers", "accelerate"),
            "`from_pretrained(path)`",
            _prepare_transformers,
            _load_by_transformers,
        ),
        ModelLoader(
            "accelerate",
            ("accelerate", "transformers"),
            "`init_empty_weights`, `load_checkpoint_and_dispatch`",
            _prepare_accelerate,
            _load_by_accelerate,
        ),
        ModelLoader(
            "safetensors",
            ("safetensors", "accelerate", "transformers"),
            "`init_empty_weights`, `load_file` of each shard, `load_state_dict(assign=True)`, `to(device)`",
            _prepare_safetensors,
            _load_by_safetensors,
        ),
    )
}

#: What umem can be held against.
BASELINES = tuple(name for name in MODEL_LOADERS if name != "umem")
