"""`umem.load` against `from_pretrained`: the same model, bit for bit, by another road."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, modeling_utils  # noqa: E402

import umem  # noqa: E402
from tests.adapters.hosts.models import FAMILIES, assert_same_model, logits, save_family  # noqa: E402
from tests.writers import same_bytes  # noqa: E402
from umem.errors import CheckpointNotFoundError, KeyMismatchError, UnsupportedError  # noqa: E402
from umem.planning import Route  # noqa: E402


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model(tmp_path: Path, family: str, dtype: Any) -> None:
    save_family(tmp_path, family)
    ours, report = umem.load(tmp_path, device="cpu", dtype=dtype, return_report=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert_same_model(ours, theirs)
    if dtype is not torch.float16:
        assert torch.equal(logits(ours), logits(theirs))
    routes = {route for route, _ in report.plan.bytes_by_route()}
    assert routes <= {Route.DIRECT, Route.STREAMING}
    assert report.plan.forecast.final_bytes == sum(
        tensor.numel() * tensor.element_size()
        for tensor in {id(t): t for t in ours.state_dict(keep_vars=True).values()}.values()
    )


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "llama-tied"])
def test_saving_writes_the_published_layout_back(tmp_path: Path, family: str) -> None:
    save_family(tmp_path / "first", family)
    umem.load(tmp_path / "first", device="cpu").save_pretrained(tmp_path / "second")  # type: ignore[operator]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(same_bytes(first[name], second[name]) for name in first)


def rewrite(directory: Path, **changes: torch.Tensor | None) -> None:
    """Change the stored tensors: None takes one away."""
    tensors = load_file(directory / "model.safetensors") | changes
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def test_ties_hold_whichever_name_is_stored(tmp_path: Path) -> None:
    save_family(tmp_path, "llama-tied")
    stored = load_file(tmp_path / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    assert "lm_head.weight" not in stored
    rewrite(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": embedding})
    ours, theirs = umem.load(tmp_path, device="cpu"), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_model(ours, theirs)
    assert ours.lm_head.weight is ours.model.embed_tokens.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("equal", [True, False])
def test_both_tied_names_stored(tmp_path: Path, equal: bool) -> None:
    save_family(tmp_path, "llama-tied")
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, **{"lm_head.weight": embedding.clone() if equal else embedding + 1})
    ours, theirs = umem.load(tmp_path, device="cpu"), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_model(ours, theirs)
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is equal  # type: ignore[union-attr]


def test_torch_files_with_tied_names_read_the_tensor_once(tmp_path: Path) -> None:
    save_family(tmp_path, "llama-tied")
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    ours, report = umem.load(tmp_path, device="cpu", return_report=True)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path))
    assert report.plan.forecast.read_bytes == sum(parameter.nbytes for parameter in ours.parameters())
    assert report.plan.ignored == ("lm_head.weight",)


def test_missing_and_unexpected_keys_are_errors_unless_allowed(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    rewrite(tmp_path, **{"lm_head.weight": None, "extra.weight": torch.ones(2)})
    with pytest.raises(KeyMismatchError) as caught:
        umem.load(tmp_path, device="cpu")
    assert caught.value.missing == ("lm_head.weight",)
    assert caught.value.unexpected == ("extra.weight",)
    torch.manual_seed(5)
    ours = umem.load(tmp_path, device="cpu", allow_missing=["lm_head.*"], allow_unexpected=["extra.*"])
    torch.manual_seed(5)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    rewrite(tmp_path, **{"model.layers.1.mlp.experts.3.up_proj.weight": None})
    with pytest.raises(KeyMismatchError) as caught:
        umem.load(tmp_path, device="cpu")
    assert [mismatch.target for mismatch in caught.value.mismatched] == ["model.layers.1.mlp.experts.gate_up_proj"]


def test_a_base_model_from_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    ours = umem.load(tmp_path, device="cpu", model_class=AutoModel, allow_unexpected=["lm_head.*"])
    assert_same_model(ours, AutoModel.from_pretrained(tmp_path))


def test_shards_without_an_index_and_a_single_file(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:7]}, tmp_path / "part-a.safetensors")
    save_file({name: tensors[name] for name in names[7:]}, tmp_path / "part-b.safetensors")
    assert_same_model(umem.load(tmp_path, device="cpu"), theirs)
    (tmp_path / "part-a.safetensors").unlink()
    save_file(tensors, tmp_path / "part-b.safetensors")
    assert_same_model(umem.load(tmp_path / "part-b.safetensors", device="cpu"), theirs)


def test_settings_of_the_library_pass_through(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    settings: dict[str, Any] = {"attn_implementation": "eager", "key_mapping": {r"^model\.": "model."}}
    ours = umem.load(tmp_path, device="cpu", **settings)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path, **settings))
    assert ours.config._attn_implementation == "eager"


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointNotFoundError, match="load_into"):
        umem.load(tmp_path, device="cpu")


def test_a_plan_reads_and_allocates_nothing(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    plan = umem.plan(tmp_path, device="cpu")
    model, report = umem.load(tmp_path, device="cpu", return_report=True)
    assert plan.to_json() == report.plan.to_json()
    assert plan.bytes_by_route()[Route.DIRECT, "stored bytes fill a view"] == sum(
        parameter.nbytes for name, parameter in model.named_parameters() if ".experts." in name
    )


def test_other_threads_keep_the_librarys_own_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, "llama")
    original = modeling_utils.PreTrainedModel._load_pretrained_model
    used, entered, done = [], threading.Event(), threading.Event()
    real = modeling_utils.convert_and_load_state_dict_in_model  # type: ignore[attr-defined]

    def watched(*args: Any, **kwargs: Any) -> Any:
        used.append(threading.current_thread().name)
        return real(*args, **kwargs)

    monkeypatch.setattr(modeling_utils, "convert_and_load_state_dict_in_model", watched)

    def theirs() -> None:
        entered.wait(10)
        AutoModelForCausalLM.from_pretrained(tmp_path)
        done.set()

    def hold(_progress: object) -> None:
        entered.set()
        assert done.wait(20)

    other = threading.Thread(target=theirs, name="theirs")
    other.start()
    umem.load(tmp_path, device="cpu", progress=hold)
    other.join()
    assert used == ["theirs"]
    assert modeling_utils.PreTrainedModel._load_pretrained_model is original


def test_the_library_is_put_back_after_a_failure(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    before = (modeling_utils._get_resolved_checkpoint_files, modeling_utils.PreTrainedModel._load_pretrained_model)
    rewrite(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(KeyMismatchError):
        umem.load(tmp_path, device="cpu")
    assert (
        modeling_utils._get_resolved_checkpoint_files,
        modeling_utils.PreTrainedModel._load_pretrained_model,
    ) == before


def scaled_experts() -> list[Any]:
    """A conversion that is no layout: it multiplies."""
    from transformers.core_model_loading import ConversionOps, WeightConverter

    class Double(ConversionOps):
        def convert(
            self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **_: Any
        ) -> Any:
            (tensors,) = input_dict.values()
            return {target_patterns[0]: tensors[0] * 2}

    return [WeightConverter("mlp.down_proj.weight", "mlp.down_proj.weight", operations=[Double()])]


def test_what_is_no_layout_is_run_by_the_library_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, "llama")
    monkeypatch.setattr(modeling_utils, "get_model_conversion_mapping", lambda *_args, **_kwargs: scaled_experts())
    ours, report = umem.load(tmp_path, device="cpu", return_report=True)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path))
    materialized = [group for group in report.plan.groups if group.route is Route.MATERIALIZED]
    assert [group.name for group in materialized] == [f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)]
    assert all(group.reason.startswith("Double: ") for group in materialized)
    assert report.plan.forecast.scratch_bytes > 0


def rename_fields(directory: Path, architecture: str | None, **names: str) -> None:
    """Change the architecture in a config, and names of its fields."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["architectures"] = [architecture] if architecture else None
    path.write_text(json.dumps({names.get(name, name): value for name, value in config.items()}))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "ExaoneForCausalLM", None])
def test_a_type_that_borrows_anothers_class_keeps_its_own_config(tmp_path: Path, architecture: str | None) -> None:
    config = transformers.ExaoneConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=96
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    rename_fields(tmp_path, architecture, num_hidden_layers="num_layers")
    ours, theirs = umem.load(tmp_path, device="cpu"), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_model(ours, theirs)
    assert type(ours.config) is transformers.ExaoneConfig


def test_a_base_architecture_is_loaded_as_such(tmp_path: Path) -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48)
    transformers.BertModel(config).save_pretrained(tmp_path)
    assert type(umem.load(tmp_path, device="cpu")) is transformers.BertModel


def test_the_librarys_loading_info(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    rewrite(tmp_path, **{"lm_head.weight": None, "extra.weight": torch.ones(2)})
    settings: dict[str, Any] = {"output_loading_info": True}
    ours = umem.load(tmp_path, device="cpu", allow_missing=["lm_head.*"], allow_unexpected=["extra.*"], **settings)
    assert ours[1] == AutoModelForCausalLM.from_pretrained(tmp_path, **settings)[1]  # type: ignore[index]


def test_concrete_and_auto_classes(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3")
    for model_class in (transformers.Qwen3ForCausalLM, AutoModelForCausalLM):
        ours = umem.load(tmp_path, device="cpu", model_class=model_class)
        assert_same_model(ours, model_class.from_pretrained(tmp_path))


REMOTE_MODEL = """
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class TinyConfig(PretrainedConfig):
    model_type = "tiny-remote"
    size = 6


class TinyModel(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.size, config.size)
        self.post_init()

    def forward(self, x):
        return self.layer(x)
"""


def test_remote_code_runs_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    directory = tmp_path / "remote"
    directory.mkdir()
    (directory / "modeling_tiny.py").write_text(REMOTE_MODEL + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n")
    auto_map = {"AutoConfig": "modeling_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    config = {"model_type": "tiny-remote", "architectures": ["TinyModel"], "auto_map": auto_map, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"layer.weight": torch.randn(6, 6), "layer.bias": torch.randn(6)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="trust_remote_code"):
        umem.load(directory, device="cpu")
    assert not (tmp_path / "ran").exists()
    model = umem.load(directory, device="cpu", trust_remote_code=True)
    assert type(model).__name__ == "TinyModel"
    assert same_bytes(model.layer.weight, tensors["layer.weight"])  # type: ignore[arg-type, union-attr]


def test_layers_of_a_predictor_that_the_model_does_not_have(tmp_path: Path) -> None:
    save_family(tmp_path, "deepseek_v3")
    rewrite(tmp_path, **{"model.layers.61.eh_proj.weight": torch.ones(4, 4)})
    ours, report = umem.load(tmp_path, device="cpu", return_report=True)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path))
    assert report.plan.ignored == ("model.layers.61.eh_proj.weight",)


@pytest.mark.parametrize("seed", range(3))
def test_plans_of_large_models_follow_one_layer(tmp_path: Path, seed: int) -> None:
    """What is compiled once for a kind of layer serves the others: the dense first layer and the rest differ."""
    save_family(tmp_path, "deepseek_v3", seed=seed)
    ours, report = umem.load(tmp_path, device="cpu", return_report=True)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path))
    names = {target for group in report.plan.groups for target in group.targets}
    assert names == {name for name in ours.state_dict() if name not in report.plan.left_to_owner}


def test_an_orientation_that_only_shapes_could_tell_is_remarked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.core_model_loading import Transpose, WeightConverter

    def by_shape(*_args: Any, **_kwargs: Any) -> list[Any]:
        names = [f"self_attn.{name}_proj.weight" for name in "qk"]
        return [WeightConverter(name, name, operations=[Transpose(0, 1, check_dims=True)]) for name in names]

    save_family(tmp_path, "llama")
    monkeypatch.setattr(modeling_utils, "get_model_conversion_mapping", by_shape)
    plan = umem.plan(tmp_path, device="cpu")
    assert [target for target, _ in plan.remarks] == [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    assert plan.to_json()["remarks"][0]["remark"].startswith("square")
    assert_same_model(umem.load(tmp_path, device="cpu"), AutoModelForCausalLM.from_pretrained(tmp_path))


def in_fp8(directory: Path) -> None:
    """Store every linear weight of the layers as FP8 with a scale for each block of 128 x 128."""
    changes: dict[str, torch.Tensor | None] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if "proj" in name:
            blocks = weight.float().unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = blocks.abs().amax((1, 3)) / 448
            coded = blocks / scale[:, None, :, None]
            changes[name] = coded.reshape(weight.shape).to(torch.float8_e4m3fn)
            changes[f"{name}_scale_inv"] = scale
    rewrite(directory, **changes)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))


def small_fp8_model(directory: Path, **changes: int) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**{**sizes, "vocab_size": 64, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


def test_fp8_is_dequantized_on_the_way(tmp_path: Path) -> None:
    small_fp8_model(tmp_path)
    in_fp8(tmp_path)
    ours, report = umem.load(tmp_path, device="cpu", return_report=True)
    assert_same_model(ours, AutoModelForCausalLM.from_pretrained(tmp_path))
    reasons = {reason for route, reason in report.plan.bytes_by_route() if route is Route.STREAMING}
    assert reasons == {"F8_E4M3 scaled by F32 to BF16"}
    assert not [group for group in report.plan.groups if group.route is Route.MATERIALIZED]
    assert report.plan.forecast.scratch_bytes == sum(
        entry.nbytes for name, entry in report.plan.checkpoint.entries.items() if name.endswith("_scale_inv")
    )


def in_declared_blocks(directory: Path) -> dict[str, torch.Tensor]:
    """Store the linear weights as FP8 with one scale for each block of 128 x 128, the last ones cut short."""
    changes: dict[str, torch.Tensor | None] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if "proj" not in name:
            continue
        rows, columns = (torch.arange(size) // 128 for size in weight.shape)
        scale = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) + 0.5
        coded = (weight.float() / scale[rows][:, columns]).to(torch.float8_e4m3fn)
        changes |= {name: coded, f"{name}_scale_inv": scale}
        meant[name] = (coded.float() * scale[rows][:, columns]).bfloat16()
    rewrite(directory, **changes)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize(("hidden", "inner"), [(128, 200), (192, 256), (200, 72)])
def test_blocks_are_as_large_as_the_config_declares(tmp_path: Path, hidden: int, inner: int) -> None:
    """The library takes 192 rows with 2 scales for blocks of 96, and refuses 200 rows with 2 scales at all."""
    small_fp8_model(tmp_path, hidden_size=hidden, intermediate_size=inner)
    meant = in_declared_blocks(tmp_path)
    state = umem.load(tmp_path, device="cpu").state_dict()
    assert all(torch.equal(state[name], value) for name, value in meant.items())


def test_scales_that_are_no_grid_of_the_declared_blocks(tmp_path: Path) -> None:
    small_fp8_model(tmp_path)
    in_fp8(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, **{f"{name}_scale_inv": torch.ones(4, 2)})
    with pytest.raises(KeyMismatchError, match=r"has scales of \[2, 1\], not \[4, 2\]") as caught:
        umem.load(tmp_path, device="cpu")
    assert [mismatch.target for mismatch in caught.value.mismatched] == [name]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's use of the library
def test_an_adapter_in_place_of_a_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    save_family(tmp_path / "base", "llama")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(r=2))
    adapted.save_pretrained(str(tmp_path / "adapter"))
    with pytest.raises(UnsupportedError, match="load_adapter"):
        umem.load(tmp_path / "adapter", device="cpu")
