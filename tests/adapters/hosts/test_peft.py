"""`umem.load_adapter` against peft's own loading and merging: the same modules and numbers, by another road."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

peft = pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

import umem  # noqa: E402
from tests.adapters.hosts.models import FAMILIES  # noqa: E402
from tests.writers import same_bytes  # noqa: E402
from umem import LoadSettings  # noqa: E402
from umem.errors import (  # noqa: E402
    CheckpointFormatError,
    CheckpointNotFoundError,
    InsufficientMemoryError,
    KeyMismatchError,
    ReadError,
    UnsupportedError,
)
from umem.planning import Route  # noqa: E402

# What peft and transformers warn of, each other's and their users' settings, is not under test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Net(torch.nn.Module):
    """One layer of each kind; no two sizes are equal."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(37, 16)
        self.a = torch.nn.Linear(16, 40)
        self.b = torch.nn.Linear(40, 18, bias=False)
        self.c1 = torch.nn.Conv1d(3, 6, 3)
        self.c2 = torch.nn.Conv2d(3, 8, 3)
        self.pointwise = torch.nn.Conv2d(8, 5, 1)
        self.c3 = torch.nn.Conv3d(2, 4, (1, 2, 3))
        self.norm = torch.nn.BatchNorm1d(18)
        self.head = torch.nn.Linear(18, 11)
        self.turned = transformers.pytorch_utils.Conv1D(22, 11)
        self.to(dtype)


def family(name: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    kind, settings = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**settings))
    return model.to(dtype).eval()  # type: ignore[no-any-return]


def saved(base: torch.nn.Module, config: Any, directory: Path, **options: Any) -> Path:
    """An adapter for `base` with random numbers in all that it trains."""
    model = get_peft_model(copy.deepcopy(base), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.requires_grad or "running" in name:
                shift = 1.0 if "magnitude" in name or "running" in name else 0.0
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3 + shift)
    model.save_pretrained(directory, **options)
    return directory


def changed_weights(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not same_bytes(tensor, before[name])}


def assert_same_loaded(base: torch.nn.Module, path: Path, **options: Any) -> Any:
    theirs = PeftModel.from_pretrained(copy.deepcopy(base), path, **options)
    ours, report = umem.load_adapter(copy.deepcopy(base), path, return_report=True, **options)
    assert type(ours) is type(theirs)
    left, right = ours.state_dict(), theirs.state_dict()
    assert list(left) == list(right)
    assert [name for name in left if not same_bytes(left[name], right[name])] == []
    flags = [[(n, p.requires_grad, type(p)) for n, p in model.named_parameters()] for model in (ours, theirs)]
    assert flags[0] == flags[1]
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    assert [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()]
    return report


def assert_same_merged(base: torch.nn.Module, path: Path, *, eps: float = 0.0, **options: Any) -> Any:
    """`eps`: how far apart, in units of the dtype's eps times the largest element; 0 means bit for bit."""
    theirs = PeftModel.from_pretrained(
        copy.deepcopy(base), path, autocast_adapter_dtype=options.get("autocast_adapter_dtype", True)
    ).merge_and_unload()
    ours = copy.deepcopy(base)
    modules, parameters = list(ours.modules()), list(ours.parameters())
    flags = [parameter.requires_grad for parameter in parameters]
    result, report = umem.load_adapter(ours, path, merge=True, return_report=True, **options)
    assert result is ours
    assert all(left is right for left, right in zip(ours.modules(), modules, strict=True))
    assert all(left is right for left, right in zip(ours.parameters(), parameters, strict=True))
    assert [parameter.requires_grad for parameter in parameters] == flags
    assert not hasattr(ours, "peft_config")
    left, right = ours.state_dict(), theirs.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        if eps and tensor.is_floating_point():
            bound = eps * torch.finfo(tensor.dtype).eps * float(right[name].abs().max())
            assert float((tensor.double() - right[name].double()).abs().max()) <= bound, name
        else:
            assert same_bytes(tensor, right[name]), name
    assert changed_weights(ours, base.state_dict())
    return report


CONFIGS: dict[str, Callable[[], Any]] = {
    "patterns": lambda: LoraConfig(
        target_modules=["a", "b"], r=4, lora_alpha=7, rank_pattern={"b": 6}, alpha_pattern={"b": 3}, use_rslora=True
    ),
    "embedding": lambda: LoraConfig(target_modules=["embed", "a"]),
    "convolutions": lambda: LoraConfig(target_modules=["c1", "c2", "pointwise", "c3"], r=4),
    "conv1d": lambda: LoraConfig(target_modules=["turned"], fan_in_fan_out=True),
    "dora": lambda: LoraConfig(target_modules=["a", "b", "embed", "c1", "c2", "pointwise", "c3"], r=4, use_dora=True),
    "dora conv1d": lambda: LoraConfig(target_modules=["turned"], fan_in_fan_out=True, use_dora=True),
    "modules to save": lambda: LoraConfig(target_modules=["a"], modules_to_save=["head", "norm"]),
    "bias of targets": lambda: LoraConfig(target_modules=["a", "b"], bias="lora_only"),
    "every bias": lambda: LoraConfig(target_modules=["a"], bias="all"),
    "lora bias": lambda: LoraConfig(target_modules=["a", "c1"], lora_bias=True),
    "tokens": lambda: LoraConfig(target_modules=["a"], trainable_token_indices={"embed": [1, 5, 30]}),
    "parameter": lambda: LoraConfig(target_modules=["a"], target_parameters=["b.weight"]),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_same_as_peft(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    base = Net(dtype)
    saved(base, CONFIGS[kind](), tmp_path)
    assert_same_loaded(base, tmp_path)
    # peft multiplies a convolution's factors by a convolution, which some processors sum in another order.
    convolves = kind in ("convolutions", "dora", "lora bias")
    assert_same_merged(base, tmp_path, eps=(16 if dtype is torch.float32 else 1) if convolves else 0)


@pytest.mark.parametrize("autocast", [True, False])
def test_sixteen_bit_adapters_in_torch_files(tmp_path: Path, autocast: bool) -> None:
    base = Net(torch.bfloat16)
    saved(base, LoraConfig(target_modules=["a", "embed"]), tmp_path, safe_serialization=False)
    weights = torch.load(tmp_path / "adapter_model.bin")
    torch.save({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "adapter_model.bin")
    assert_same_loaded(base, tmp_path, autocast_adapter_dtype=autocast)
    assert_same_merged(base, tmp_path, autocast_adapter_dtype=autocast)


def test_adapters_for_training_under_a_name(tmp_path: Path) -> None:
    base = Net(torch.bfloat16)
    saved(base, LoraConfig(target_modules=["a", "embed"], modules_to_save=["head"]), tmp_path)
    assert_same_loaded(base, tmp_path, is_trainable=True, adapter_name="other")


@pytest.mark.parametrize(
    "config",
    [
        lambda: LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"),
        lambda: LoraConfig(target_modules=["embed_tokens", "lm_head"], task_type="CAUSAL_LM"),
        lambda: LoraConfig(target_modules="all-linear", trainable_token_indices=[1, 4], task_type="CAUSAL_LM"),
    ],
    ids=["all linear", "embeddings", "tokens"],
)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_language_models(tmp_path: Path, name: str, config: Callable[[], Any]) -> None:
    base = family(name)
    saved(base, config(), tmp_path)
    assert_same_loaded(base, tmp_path)
    assert_same_merged(base, tmp_path)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_adapters_of_grouped_experts(tmp_path: Path, name: str) -> None:
    base = family(name)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=experts, r=3, task_type="CAUSAL_LM")
    saved(base, config, tmp_path)
    assert_same_loaded(base, tmp_path)
    assert_same_merged(base, tmp_path)


def per_expert(directory: Path, *, experts: int, rank: int = 3) -> None:
    """An adapter for mixtral as it was saved while each expert was a module."""
    generator = torch.Generator().manual_seed(3)
    names = {"w1": (32, 48), "w2": (48, 32), "w3": (32, 48)}
    tensors = {}
    for layer in range(2):
        prefix = f"base_model.model.model.layers.{layer}"
        sizes = {f"block_sparse_moe.experts.{e}.{name}": size for e in range(experts) for name, size in names.items()}
        for path, (wide, tall) in {**sizes, "self_attn.q_proj": (32, 32)}.items():
            tensors[f"{prefix}.{path}.lora_A.weight"] = torch.randn(rank, wide, generator=generator)
            tensors[f"{prefix}.{path}.lora_B.weight"] = torch.randn(tall, rank, generator=generator)
    save_file(tensors, directory / "adapter_model.safetensors")
    declared = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 6}
    write_config(directory, {**declared, "target_modules": ["q_proj", *names]})


def write_config(directory: Path, declared: Mapping[str, Any]) -> None:
    (directory / "adapter_config.json").write_text(json.dumps(declared))


@pytest.mark.parametrize("window_mib", [16, 64])
def test_per_expert_adapters_are_converted_by_peft(tmp_path: Path, window_mib: int) -> None:
    base = family("mixtral")
    per_expert(tmp_path, experts=4)
    report = assert_same_loaded(base, tmp_path)
    routes = {route: count for (route, _), count in report.plan.bytes_by_route().items()}
    assert 0 < routes[Route.MATERIALIZED] < report.plan.forecast.read_bytes / 2
    settings = LoadSettings(window_bytes=window_mib << 20)
    assert_same_merged(base, tmp_path, settings=settings)
    umem.load_adapter(base, tmp_path, settings=settings)


@pytest.mark.parametrize(
    "config",
    [
        lambda: peft.IA3Config(target_modules=["a", "b"], feedforward_modules=["b"]),
        lambda: peft.LoHaConfig(target_modules=["a"]),
        lambda: peft.LoKrConfig(target_modules=["a"]),
        lambda: peft.OFTConfig(target_modules=["a"], oft_block_size=4),
        lambda: peft.HRAConfig(target_modules=["a"]),
        lambda: peft.LNTuningConfig(target_modules=["norm"]),
        lambda: peft.TrainableTokensConfig(target_modules=["embed"], token_indices=[1, 2]),
    ],
    ids=["ia3", "loha", "lokr", "oft", "hra", "ln", "tokens"],
)
def test_other_kinds_of_adapters(tmp_path: Path, config: Callable[[], Any]) -> None:
    base = Net(torch.bfloat16)
    saved(base, config(), tmp_path)
    assert_same_loaded(base, tmp_path)


def test_attention_with_weights_of_its_own_is_loaded_but_not_merged(tmp_path: Path) -> None:
    base = torch.nn.Sequential(torch.nn.MultiheadAttention(16, 4), torch.nn.Linear(16, 4))
    saved(base, LoraConfig(target_modules=["0"]), tmp_path)
    assert_same_loaded(base, tmp_path)
    before, modules = copy.deepcopy(base.state_dict()), list(base.modules())
    with pytest.raises(UnsupportedError, match="MultiheadAttention"):
        umem.load_adapter(base, tmp_path, merge=True)
    assert not changed_weights(base, before)
    assert all(left is right for left, right in zip(base.modules(), modules, strict=True))


# --- memory ----------------------------------------------------------------------------------------------------------


class LargestStorage(TorchDispatchMode):
    """Remembers the largest storage that an operation made."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self.known:
                    self.nbytes = max(self.nbytes, storage.nbytes())
        return result


@pytest.mark.parametrize("dora", [False, True])
def test_a_merge_makes_no_tensor_of_a_weights_size(tmp_path: Path, dora: bool) -> None:
    base = torch.nn.Sequential(torch.nn.Linear(2048, 3000), torch.nn.Linear(3000, 4001, bias=False))
    saved(base, LoraConfig(target_modules=["0"], modules_to_save=["1"], r=4, use_dora=dora), tmp_path)
    with LargestStorage(list(base.parameters())) as largest:
        _, report = umem.load_adapter(base, tmp_path, merge=True, return_report=True)
    assert 0 < largest.nbytes <= 4 << 20  # a quarter of the largest tile; the weights are 23 and 46 MiB
    assert report.window_peak_bytes <= report.plan.forecast.window_bytes
    assert report.plan.forecast.allocated_bytes == report.plan.forecast.scratch_bytes == 0


def test_weights_of_many_tiles(tmp_path: Path) -> None:
    base = torch.nn.ModuleDict({"up": torch.nn.Linear(1500, 3001), "embed": torch.nn.Embedding(5003, 700)})
    for name, dora in (("plain", False), ("dora", True)):
        path = saved(base, LoraConfig(target_modules=["up", "embed"], r=16, use_dora=dora), tmp_path / name)
        assert_same_merged(base, path, eps=16)
        assert_same_merged(copy.deepcopy(base).bfloat16(), path, eps=1)


# --- refusals and failures -------------------------------------------------------------------------------------------


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")


def declare(directory: Path, **changes: Any) -> None:
    declared = json.loads((directory / "adapter_config.json").read_text())
    write_config(directory, {**declared, **changes})


A, B = "base_model.model.a.lora_A.weight", "base_model.model.a.lora_B.weight"

FAULTS: dict[str, tuple[type[Exception], str, Callable[[Path], object]]] = {
    "missing factor": (KeyMismatchError, "a.lora_B.default.weight", lambda d: rewrite(d, lambda t: t.__delitem__(B))),
    "missing module": (
        KeyMismatchError,
        "head.modules_to_save.default.bias",
        lambda d: rewrite(d, lambda t: t.__delitem__("base_model.model.head.bias")),
    ),
    "unexpected": (KeyMismatchError, "unexpected", lambda d: rewrite(d, lambda t: t.update(extra=torch.zeros(2)))),
    "wrong shape": (
        KeyMismatchError,
        "another shape",
        lambda d: rewrite(d, lambda t: t.update({A: torch.ones(8, 17)})),
    ),
    "another rank": (KeyMismatchError, "another shape", lambda d: declare(d, r=5)),
    "wrong dtype": (
        KeyMismatchError,
        "dtype",
        lambda d: rewrite(d, lambda t: t.update({A: torch.ones(8, 16, dtype=torch.int32)})),
    ),
    "no config": (CheckpointNotFoundError, "adapter_config.json", lambda d: (d / "adapter_config.json").unlink()),
    "no weights": (CheckpointNotFoundError, "adapter_model", lambda d: (d / "adapter_model.safetensors").unlink()),
    "broken config": (CheckpointFormatError, "config", lambda d: (d / "adapter_config.json").write_text("{")),
    "no kind": (CheckpointFormatError, "peft_type", lambda d: write_config(d, {"r": 3})),
    "unknown kind": (UnsupportedError, "TELEPATHY", lambda d: declare(d, peft_type="TELEPATHY")),
    "prompts": (
        UnsupportedError,
        "prompts",
        lambda d: write_config(d, {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}),
    ),
    "shared tensors": (UnsupportedError, "share", lambda d: write_config(d, {"peft_type": "VERA"})),
    "pissa": (UnsupportedError, "pissa", lambda d: declare(d, init_lora_weights="pissa")),
    "no such module": (UnsupportedError, "set this adapter up", lambda d: declare(d, target_modules=["nowhere"])),
}


@pytest.mark.parametrize("merge", [False, True], ids=["load", "merge"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found_before_anything_changes(tmp_path: Path, fault: str, merge: bool) -> None:
    base = Net()
    base.a.bias.requires_grad_(False)
    saved(base, LoraConfig(target_modules=["a", "b"], modules_to_save=["head"]), tmp_path)
    error, message, spoil = FAULTS[fault]
    spoil(tmp_path)
    before, attributes = copy.deepcopy(base.state_dict()), {id(m): set(vars(m)) for m in base.modules()}
    modules, flags = list(base.modules()), [p.requires_grad for p in base.parameters()]
    with pytest.raises(error, match=message):
        umem.load_adapter(base, tmp_path, merge=merge)
    assert not changed_weights(base, before)
    assert all(left is right for left, right in zip(base.modules(), modules, strict=True))
    assert [p.requires_grad for p in base.parameters()] == flags
    assert {id(m): set(vars(m)) for m in base.modules()} == attributes


def test_adapters_that_are_nowhere() -> None:
    for place in ("nobody/nothing", "./nothing"):
        with pytest.raises(CheckpointNotFoundError):
            umem.load_adapter(Net(), place)


def test_what_may_be_unexpected(tmp_path: Path) -> None:
    base = Net()
    saved(base, LoraConfig(target_modules=["a"]), tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update(extra=torch.zeros(2)))
    umem.load_adapter(base, tmp_path, merge=True, allow_unexpected=["extra"])


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        (lambda: peft.IA3Config(target_modules=["a"], feedforward_modules=[]), Net, "merges LoRA, not IA3"),
        (
            lambda: LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"),
            lambda: family("llama-tied"),
            "tied to",
        ),
    ],
    ids=["another kind", "tied whole module"],
)
def test_merges_that_are_refused(
    tmp_path: Path, config: Callable[[], Any], model: Callable[[], torch.nn.Module], message: str
) -> None:
    base = model()
    saved(base, config(), tmp_path)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(UnsupportedError, match=message):
        umem.load_adapter(base, tmp_path, merge=True)
    assert not changed_weights(base, before)


@pytest.mark.parametrize("merge", [False, True], ids=["load", "merge"])
def test_too_little_memory(tmp_path: Path, merge: bool) -> None:
    base = Net()
    saved(base, LoraConfig(target_modules=["a"]), tmp_path)
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(InsufficientMemoryError):
        umem.load_adapter(base, tmp_path, merge=merge, settings=LoadSettings(memory_budget_bytes=1000))
    assert not changed_weights(base, before)


def test_models_that_take_no_adapter(tmp_path: Path) -> None:
    base = Net()
    saved(base, LoraConfig(target_modules=["a"]), tmp_path)
    with pytest.raises(UnsupportedError, match="adapter already"):
        umem.load_adapter(umem.load_adapter(Net(), tmp_path), tmp_path)
    with torch.device("meta"), pytest.raises(UnsupportedError, match="meta device"):
        umem.load_adapter(Net(), tmp_path)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()], ids=["drive", "Ctrl-C"])
def test_an_interrupted_merge_names_the_spoiled_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    base = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(8)))
    saved(base, LoraConfig(target_modules=[str(i) for i in range(8)]), tmp_path)
    before, modules, calls = copy.deepcopy(base.state_dict()), list(base.modules()), []
    real = os.preadv

    def fails_late(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        calls.append(offset)
        if len(calls) > 4:
            raise error
        return real(descriptor, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", fails_late)
    with pytest.raises((ReadError, KeyboardInterrupt)) as caught:
        umem.load_adapter(base, tmp_path, merge=True, settings=LoadSettings(reader="buffered"))
    monkeypatch.setattr(os, "preadv", real)
    changed = changed_weights(base, before)
    assert 0 < len(changed) < 8
    assert any("no longer hold" in note and all(name in note for name in changed) for note in caught.value.__notes__)
    if isinstance(caught.value, ReadError):
        assert changed <= set(caught.value.spoiled)
        assert len(caught.value.spoiled) < 8
    assert all(left is right for left, right in zip(base.modules(), modules, strict=True))


def test_an_adapter_that_brings_base_weights_says_which_ones_it_spoiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Net()
    saved(base, LoraConfig(target_modules=["a"], bias="all"), tmp_path)

    def fails(*_arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ReadError) as caught:
        umem.load_adapter(base, tmp_path, settings=LoadSettings(reader="buffered"))
    assert "a.bias" in caught.value.spoiled
    assert set(caught.value.spoiled) <= set(base.state_dict())
    assert [type(module) for module in base.modules()] == [type(module) for module in Net().modules()]
