"""The evidence and README's figures: sample checkpoints, cases, pages, and that README says what is recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import evidence
import readme_figures
from sample_checkpoint import KINDS, QUANTIZATION, layers_of_size, values_of, write_sample

import umem
from umem._types import DType
from umem.checkpoint import open_checkpoint

SMALL: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_models_that_load(kind: str, tmp_path: Path) -> None:
    write_sample(tmp_path / kind, kind, **SMALL)
    model, report = umem.load(tmp_path / kind, device="cpu", return_report=True)
    assert report.plan.left_to_owner == ()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    if kind == "fp8":
        entry = open_checkpoint(tmp_path / kind).entries["model.layers.1.mlp.down_proj.weight"]
        assert (entry.dtype, entry.shape) == (DType.F8_E4M3, (256, 384))
        assert model.get_parameter("model.layers.1.mlp.down_proj.weight").dtype is torch.bfloat16
        assert 0.01 < model.get_parameter("model.layers.1.mlp.down_proj.weight").std() < 0.04


@pytest.mark.parametrize(("kind", "shards"), [("moe", 3), ("dense", 1), ("fp8", 1)])
def test_a_shard_holds_as_many_layers_as_in_the_releases(kind: str, shards: int, tmp_path: Path) -> None:
    write_sample(tmp_path, kind, **SMALL | {"num_hidden_layers": 9, "vocab_size": 8})
    assert len(open_checkpoint(tmp_path).shards) == shards


def test_a_changed_sample_changes_no_other(tmp_path: Path) -> None:
    layers = layers_of_size("moe", 4 << 30)
    write_sample(tmp_path, "moe", **SMALL)
    assert layers_of_size("moe", 4 << 30) == layers


def test_numbers_depend_on_names_alone() -> None:
    config, tensors, _ = KINDS["fp8"]
    of_one = {tensor.name: tensor for tensor in tensors(config | SMALL | {"num_hidden_layers": 1})}
    of_two = {tensor.name: tensor for tensor in tensors(config | SMALL)}
    for name, tensor in of_one.items():
        left, right = values_of(tensor), values_of(of_two[name])
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))
        assert left.nbytes == tensor.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_are_met_to_a_layer(kind: str) -> None:
    config, tensors, _ = KINDS[kind]

    def size(layers: int) -> int:
        return sum(tensor.nbytes for tensor in tensors(config | {"num_hidden_layers": layers}))

    wanted = 4 << 30
    layers = layers_of_size(kind, wanted)
    assert abs(size(layers) - wanted) <= size(2) - size(1)
    assert layers_of_size(kind, 1) == 1


def test_another_quantization_shares_the_files(tmp_path: Path) -> None:
    write_sample(tmp_path / "a", "fp8", **SMALL)
    for _ in range(2):
        other = evidence.with_quantization(tmp_path / "a", tmp_path / "b", QUANTIZATION | {"dequantize": True})
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {path.name for path in other.iterdir()} == names
    assert not (other / "config.json").is_symlink()
    assert json.loads((other / "config.json").read_text())["quantization_config"]["dequantize"]
    assert (other / "model-00001-of-00001.safetensors").is_symlink()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The FP8 cases of a small checkpoint."""
    directory = tmp_path_factory.mktemp("evidence")
    write_sample(directory / "fp8", "fp8", **SMALL)
    quantization = evidence.CASES["precision"].quantization
    assert quantization is not None
    checkpoints = {
        "precision": evidence.with_quantization(directory / "fp8", directory / "dequantized", quantization),
        "kept": directory / "fp8",
    }
    found: dict[str, Any] = json.loads(json.dumps(evidence.gather(checkpoints, 1, ["warm"])))
    return found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU keeps FP8, so there is another comparison")
def test_fp8_is_compared_as_bf16_and_as_it_is_stored(gathered: dict[str, Any]) -> None:
    assert evidence.is_equal(gathered)
    rows = {(row["case"], row["loader"]): row for row in evidence.rows(gathered)}
    assert rows["precision", "transformers"]["first_forward_s"] > 0
    assert rows["kept", "umem-load-into"]["first_forward_s"] is None
    assert {"safetensors-mmap", "safetensors-pread"} <= {loader for case, loader in rows if case == "kept"}
    page = evidence.markdown(gathered)
    assert "| precision | warm | umem |" in page
    assert evidence.WHY_STORED in page
    assert "NOT" not in page
    assert evidence.WHY_STORED in evidence.html(gathered)


@pytest.mark.slow
def test_figures_of_readme_come_from_what_is_recorded(gathered: dict[str, Any], tmp_path: Path) -> None:
    name = evidence.file_name(gathered, "My Machine")
    assert name.startswith("evidence_my_machine_20")
    evidence.save(gathered, tmp_path / name)
    older = tmp_path / "evidence_my_machine_199901.json"
    older.write_text("{}")
    assert readme_figures.recorded(tmp_path) == [tmp_path / f"{name}.json"]
    text = readme_figures.figures([tmp_path / f"{name}.json"])
    assert f"scripts/results/{name}.md" in text
    (row,) = (row for row in evidence.rows(gathered) if (row["case"], row["loader"]) == ("precision", "umem"))
    assert f"| FP8 blocks to bf16 | warm | {row['first_forward_s']:.2f} s, load {row['load_s']:.2f} s |" in text


def test_readme_says_what_is_recorded() -> None:
    text = readme_figures.README.read_text()
    wanted = readme_figures.figures(readme_figures.recorded(evidence.RESULTS))
    assert text == readme_figures.with_figures(text, wanted), "run scripts/readme_figures.py"


def test_markers_are_needed_once_and_in_order() -> None:
    begin, end = readme_figures.BEGIN, readme_figures.END
    assert readme_figures.with_figures(f"a\n{begin}\nold\n{end}\nb", "new") == f"a\n{begin}\nnew\n{end}\nb"
    for text in ("nothing", f"{end}\n{begin}", f"{begin}{begin}{end}"):
        with pytest.raises(ValueError, match="needs one line"):
            readme_figures.with_figures(text, "new")
