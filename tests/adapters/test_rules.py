"""Rules against the same torch code run on the tensors themselves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import umem
from tests.writers import Holder, same_bytes, same_numbers, write_safetensors, write_sharded
from umem import Rule
from umem._types import DType
from umem.errors import KeyMismatchError, SettingsError, UnsupportedError
from umem.planning import Route

EXPERTS, HIDDEN, INNER = 12, 6, 5
LAYER = "model.layers.{i}.mlp.experts"


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def split_experts(layers: int = 2) -> dict[str, torch.Tensor]:
    """One tensor an expert and projection, as most checkpoints store them."""
    tensors = {}
    for layer in range(layers):
        for expert in range(EXPERTS):
            prefix, seed = f"model.layers.{layer}.mlp.experts.{expert}", 100 * layer + expert
            tensors[f"{prefix}.gate_proj.weight"] = normal(INNER, HIDDEN, seed=seed)
            tensors[f"{prefix}.up_proj.weight"] = normal(INNER, HIDDEN, seed=1000 + seed)
            tensors[f"{prefix}.down_proj.weight"] = normal(HIDDEN, INNER, seed=2000 + seed)
    return tensors | {"model.norm.weight": normal(HIDDEN, seed=9)}


def gathered(tensors: Mapping[str, torch.Tensor], layer: int, projection: str) -> torch.Tensor:
    return torch.stack([tensors[f"model.layers.{layer}.mlp.experts.{e}.{projection}.weight"] for e in range(EXPERTS)])


#: The grouped layout of NeMo Automodel: [E, H, 2I] and [E, I, H].
AUTOMODEL = [
    Rule(
        [f"{LAYER}.*.gate_proj.weight", f"{LAYER}.*.up_proj.weight"],
        f"{LAYER}.gate_and_up_projs",
        lambda gate, up: torch.cat([torch.stack(gate), torch.stack(up)], dim=1).transpose(1, 2),
    ),
    Rule(f"{LAYER}.*.down_proj.weight", f"{LAYER}.down_projs", lambda down: torch.stack(down).transpose(1, 2)),
]


def automodel_module(device: str = "meta") -> Holder:
    shapes = {
        f"model.layers.{layer}.mlp.experts.{name}": torch.empty(shape, dtype=torch.bfloat16)
        for layer in range(2)
        for name, shape in (
            ("gate_and_up_projs", (EXPERTS, HIDDEN, 2 * INNER)),
            ("down_projs", (EXPERTS, INNER, HIDDEN)),
        )
    }
    return Holder(shapes | {"model.norm.weight": torch.empty(HIDDEN, dtype=torch.bfloat16)}, device)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_grouped_experts_of_automodel(tmp_path: Path, device: str) -> None:
    tensors = split_experts()
    names = sorted(tensors)
    write_sharded(tmp_path, [{name: tensors[name] for name in half} for half in (names[::2], names[1::2])])
    module = automodel_module(device)
    report = umem.load_into(module, tmp_path, device="cpu", rules=AUTOMODEL)
    loaded = dict(module.named_parameters())
    for layer in range(2):
        gate_up = torch.cat([gathered(tensors, layer, "gate_proj"), gathered(tensors, layer, "up_proj")], dim=1)
        prefix = f"model.layers.{layer}.mlp.experts"
        assert same_bytes(loaded[f"{prefix}.gate_and_up_projs"], gate_up.transpose(1, 2))
        assert same_bytes(loaded[f"{prefix}.down_projs"], gathered(tensors, layer, "down_proj").transpose(1, 2))
    assert same_bytes(loaded["model.norm.weight"], tensors["model.norm.weight"])
    assert {route for route, _ in report.plan.bytes_by_route()} == {Route.DIRECT}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block_bytes", [1 << 16, 1 << 20])
def test_the_absorbed_scale_of_gemma(tmp_path: Path, stored: torch.dtype, block_bytes: int) -> None:
    experts, hidden, inner = 9, 64, 48
    down = normal(experts, hidden, inner, dtype=stored)
    scale = normal(experts, seed=1, dtype=stored)
    write_safetensors(tmp_path / "m.safetensors", {"l.0.experts.down_proj": down, "l.0.router.per_expert_scale": scale})
    rule = Rule(
        ["l.{i}.experts.down_proj", "l.{i}.router.per_expert_scale"],
        "l.{i}.experts.down_projs",
        lambda down, scale: down.transpose(1, 2) * scale[:, None, None],
    )
    module = Holder({"l.0.experts.down_projs": torch.empty(experts, inner, hidden, dtype=torch.bfloat16)})
    settings = umem.LoadSettings(block_bytes=block_bytes)
    report = umem.load_into(module, tmp_path, device="cpu", rules=[rule], settings=settings)
    expected = down.bfloat16().transpose(1, 2) * scale.bfloat16()[:, None, None]
    assert same_numbers(module.get_parameter("l.0.experts.down_projs"), expected)
    ((route, reason),) = report.plan.bytes_by_route()
    label = DType.from_torch(stored).label
    assert (route, reason) == (Route.STREAMING, f"{label} scaled by {label} to BF16")
    as_it_multiplies = 0 if stored == torch.bfloat16 else 2 * experts
    assert report.plan.forecast.scratch_bytes == scale.nbytes + as_it_multiplies
    assert report.plan.forecast.read_bytes == down.nbytes + scale.nbytes


def test_one_stored_tensor_for_several_targets(tmp_path: Path) -> None:
    qkv = normal(12, 4)
    write_safetensors(tmp_path / "m.safetensors", {"h.0.qkv": qkv, "h.1.qkv": qkv + 1})
    rules = [
        Rule("h.{i}.qkv", f"h.{{i}}.{name}", lambda qkv, at=at: torch.chunk(qkv, 3)[at])
        for at, name in enumerate("qkv")
    ]
    module = Holder({f"h.{i}.{name}": torch.empty(4, 4, dtype=torch.bfloat16) for i in range(2) for name in "qkv"})
    umem.load_into(module, tmp_path, device="cpu", rules=rules)
    for at, name in enumerate("qkv"):
        assert same_bytes(module.get_parameter(f"h.1.{name}"), (qkv + 1)[4 * at : 4 * at + 4])


def test_a_rename_alone_and_after_a_key_mapping(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"old.a.w": normal(3), "old.b.w": normal(3, seed=1)})
    module = Holder({"x.a": torch.empty(3, dtype=torch.bfloat16), "x.b": torch.empty(3, dtype=torch.bfloat16)})
    umem.load_into(module, tmp_path, device="cpu", rules=[Rule("new.{n}.w", "x.{n}")], key_mapping={"^old": "new"})
    assert same_bytes(module.get_parameter("x.b"), normal(3, seed=1))


def test_an_expert_that_is_missing(tmp_path: Path) -> None:
    tensors = split_experts()
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    write_safetensors(tmp_path / "m.safetensors", tensors)
    with pytest.raises(KeyMismatchError) as caught:
        umem.load_into(automodel_module(), tmp_path, device="cpu", rules=AUTOMODEL)
    assert [mismatch.target for mismatch in caught.value.mismatched] == ["model.layers.1.mlp.experts.gate_and_up_projs"]


def test_a_source_pattern_without_any_tensor(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in split_experts().items() if "up_proj" not in name}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    with pytest.raises(KeyMismatchError, match=r"nothing for model\.layers\.\{i\}\.mlp\.experts\.\*\.up_proj"):
        umem.load_into(automodel_module(), tmp_path, device="cpu", rules=AUTOMODEL)


def test_what_a_rule_makes_without_a_place_is_unexpected(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a.0": normal(2), "w": normal(3)})
    module = Holder({"w": torch.empty(3, dtype=torch.bfloat16)})
    with pytest.raises(KeyMismatchError) as caught:
        umem.load_into(module, tmp_path, device="cpu", rules=[Rule("a.{i}", "b.{i}")])
    assert caught.value.unexpected == ("a.0",)


@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (Rule("a.{i}", "b.{j}"), SettingsError),
        (Rule("a.*", "b.*"), SettingsError),
        (Rule([], "b"), SettingsError),
        (Rule("{i}.{i}", "b.{i}"), SettingsError),
        (Rule("a.{i}", "b.{i}", lambda _a: torch.zeros(3)), SettingsError),
        (Rule("a.{i}", "b.{i}", lambda a: a + 1), UnsupportedError),
        (Rule("a.{i}", "b.{i}", lambda a: (a * a).flip(0)), UnsupportedError),
        (Rule("a.{i}", "b.{i}", lambda a: a.repeat(2)), UnsupportedError),
        (Rule("a.{i}", "b.{i}", lambda a: a.reshape(7)), KeyMismatchError),
        (Rule("a.{i}", "b.{i}", lambda a: a[:2]), KeyMismatchError),
    ],
)
def test_rules_that_make_no_sense(tmp_path: Path, rule: Rule, error: type[Exception]) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a.0": normal(3)})
    module = Holder({"b.0": torch.empty(3, dtype=torch.bfloat16)})
    with pytest.raises(error):
        umem.load_into(module, tmp_path, device="cpu", rules=[rule])
    assert module.get_parameter("b.0").is_meta
