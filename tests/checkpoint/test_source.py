"""Which files make up a checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.writers import random_tensor, write_index, write_safetensors, write_sharded
from umem.checkpoint import open_checkpoint
from umem.errors import AmbiguousCheckpointError, CheckpointNotFoundError, DuplicateTensorError

X, Y, Z = ({name: random_tensor((3, 2), seed=i)} for i, name in enumerate("xyz"))


def names(path: Path | str) -> list[str]:
    return sorted(open_checkpoint(path).entries)


def test_a_file(tmp_path: Path) -> None:
    assert names(write_safetensors(tmp_path / "any.safetensors", X)) == ["x"]


def test_a_directory_with_one_file_of_any_name(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "odd name.safetensors", X)
    (tmp_path / "config.json").write_text("{}")
    assert names(tmp_path) == ["x"]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "embed.safetensors", X)
    write_safetensors(tmp_path / "layer.safetensors", Y)
    assert names(tmp_path) == ["x", "y"]


def test_several_files_without_an_index_that_share_a_tensor(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", X)
    write_safetensors(tmp_path / "consolidated.safetensors", X)
    with pytest.raises(DuplicateTensorError, match="index"):
        open_checkpoint(tmp_path)


def test_files_beside_an_index_are_not_looked_at(tmp_path: Path) -> None:
    write_sharded(tmp_path, [X, Y])
    write_safetensors(tmp_path / "consolidated.safetensors", {**X, **Z})
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    assert names(tmp_path) == ["x", "y"]


def test_shards_are_ordered_by_number(tmp_path: Path) -> None:
    weight_map = {}
    for number in (10, 9, 2):
        write_safetensors(tmp_path / f"part{number}.safetensors", {f"t{number}": random_tensor((2,))})
        weight_map[f"t{number}"] = f"part{number}.safetensors"
    write_index(tmp_path / "model.safetensors.index.json", weight_map)
    shards = [Path(shard.path).name for shard in open_checkpoint(tmp_path).shards]
    assert shards == ["part2.safetensors", "part9.safetensors", "part10.safetensors"]


def test_a_wrong_total_size_is_no_fault(tmp_path: Path) -> None:
    assert names(write_sharded(tmp_path, [X, Y])) == ["x", "y"]


def test_shards_in_a_folder_below(tmp_path: Path) -> None:
    for folder, tensors in (("one", X), ("two", Y)):
        (tmp_path / folder).mkdir()
        write_safetensors(tmp_path / folder / "part.safetensors", tensors)
    write_index(tmp_path / "model.safetensors.index.json", {"x": "one/part.safetensors", "y": "two/part.safetensors"})
    assert names(tmp_path) == ["x", "y"]


def test_an_index_of_another_name(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "diffusion.safetensors", X)
    index = write_index(tmp_path / "diffusion.safetensors.index.json", {"x": "diffusion.safetensors"})
    assert names(tmp_path) == names(index) == ["x"]


def test_safetensors_come_before_torch_files(tmp_path: Path) -> None:
    torch.save(Z, tmp_path / "pytorch_model.bin")
    write_safetensors(tmp_path / "model.safetensors", X)
    assert names(tmp_path) == ["x"]


def test_torch_shards_with_an_index(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "pytorch_model-1.bin")
    torch.save(Y, tmp_path / "pytorch_model-2.bin")
    weight_map = {"x": "pytorch_model-1.bin", "y": "pytorch_model-2.bin"}
    write_index(tmp_path / "pytorch_model.bin.index.json", weight_map)
    torch.save(Z, tmp_path / "training_args.bin")
    assert names(tmp_path) == ["x", "y"]


def test_several_torch_checkpoints(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "a.pt")
    torch.save(Y, tmp_path / "b.pth")
    with pytest.raises(AmbiguousCheckpointError, match=r"a\.pt, b\.pth"):
        open_checkpoint(tmp_path)


def cached_snapshot(hub: Path, identifier: str) -> Path:
    """A snapshot in the layout of the hub's cache."""
    repository = hub / f"models--{identifier.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_hub_id_from_the_cache(hub: Path) -> None:
    write_safetensors(cached_snapshot(hub, "someone/model") / "model.safetensors", X)
    checkpoint = open_checkpoint("someone/model")
    assert list(checkpoint.entries) == ["x"]
    assert checkpoint.identifier == "someone/model"


def test_a_hub_id_that_is_not_in_the_cache(hub: Path) -> None:
    (cached_snapshot(hub, "someone/model") / "config.json").write_text("{}")
    for identifier in ("someone/model", "nobody/nothing"):
        with pytest.raises(CheckpointNotFoundError, match="HF_HUB_OFFLINE"):
            open_checkpoint(identifier)
