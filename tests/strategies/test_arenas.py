"""Arenas: small tensors side by side, aligned, and each as independent as one that was allocated by itself."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import umem
from tests.writers import Holder, random_tensor, same_bytes, write_safetensors
from umem import LoadSettings
from umem._types import DType
from umem.planning import Target
from umem.strategies.arenas import ARENA_BYTES, Tenant, arenas_of
from umem.strategies.storage import allocate_arena

_DTYPES = (DType.U8, DType.BF16, DType.F32, DType.F64)


def tenants_of(cases: list[tuple[DType, int, int, bool]]) -> list[Tenant]:
    """(dtype, items, bytes of gap before it, whether it is stored as it is used) -> tenants of one shard, in order."""
    tenants, position = [], 0
    for number, (dtype, items, gap, plain) in enumerate(cases):
        target = Target(f"t{number}", dtype, (items,))
        position += gap
        start = position if plain and position % dtype.itemsize == 0 else None
        tenants.append(Tenant(target, target.nbytes, 0, start))
        position += target.nbytes
    return tenants


cases = st.lists(
    st.tuples(st.sampled_from(_DTYPES), st.integers(1, 120_000), st.sampled_from((0, 0, 0, 1, 8, 5000)), st.booleans()),
    min_size=1,
    max_size=40,
)


@given(cases, st.sampled_from((1, 512, 4096)))
def test_every_tenant_has_an_aligned_place_of_its_own(
    drawn: list[tuple[DType, int, int, bool]], alignment: int
) -> None:
    tenants = tenants_of(drawn)
    arenas = list(arenas_of(tenants, [alignment]))
    assert [target for arena in arenas for target, _, _ in arena.places] == [tenant.target for tenant in tenants]
    for arena in arenas:
        reached = 0
        for target, start, end in arena.places:
            assert start >= reached
            assert start % target.dtype.itemsize == 0
            assert end == start + target.nbytes
            reached = end
        assert reached == arena.nbytes <= ARENA_BYTES + alignment
        gaps = arena.nbytes - sum(target.nbytes for target, _, _ in arena.places)
        assert gaps <= 64 * len(arena.places) + arena.nbytes // 16 + alignment


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_neighbours_in_the_file_are_neighbours_congruent_to_it(alignment: int) -> None:
    """Also from an arena to the next, so that a direct reader copies nothing but the ends."""
    tenants = tenants_of([(DType.BF16, 20_001, 0, True)] * 500)
    tenants = [tenant._replace(start=(tenant.start or 0) + 10_002) for tenant in tenants]
    arenas = list(arenas_of(tenants, [alignment]))
    assert len(arenas) == -(-500 * 40_002 // (ARENA_BYTES // 40_002 * 40_002))
    starts = {tenant.target.name: tenant.start or 0 for tenant in tenants}
    for arena in arenas:
        shifts = {start - starts[target.name] for target, start, _ in arena.places}
        assert len(shifts) == 1
        assert shifts.pop() % alignment == 0


def test_a_tensor_of_an_arena_is_saved_and_freed_alone() -> None:
    targets = [Target("a", DType.F32, (3, 5)), Target("b", DType.BF16, (7,))]
    (arena,) = arenas_of([Tenant(target, target.nbytes, 0, None) for target in targets], [1])
    a, b = (destination.tensor for destination in allocate_arena(arena, huge_pages=None))
    a.fill_(1)
    b.fill_(2)
    assert a.untyped_storage().nbytes() == 60
    buffer = io.BytesIO()
    torch.save(a, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), torch.ones(3, 5))
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    del a
    assert b.tolist() == [2.0] * 7


@pytest.mark.parametrize("reader", ["buffered", "odirect", "mapped", "auto"])
def test_small_tensors_of_all_kinds_load_bit_for_bit(tmp_path: Path, reader: str) -> None:
    """Neighbours, odd sizes that misalign what follows, casts, empty ones, and large ones between."""
    tensors: dict[str, torch.Tensor] = {}
    for number in range(400):
        tensors[f"even{number:03}"] = random_tensor((64, 33 + number % 7), torch.bfloat16, number)
        tensors[f"odd{number:03}"] = random_tensor((1 + number % 3,), torch.int8, number)
        tensors[f"wide{number:03}"] = random_tensor((130,), torch.float32, number).nan_to_num()
    tensors["empty"] = torch.empty(0, 3)
    tensors |= {f"large{number}": random_tensor((700_001,), torch.float32, number) for number in range(3)}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    wanted = {name: tensor.to(torch.float64) if name.startswith("wide") else tensor for name, tensor in tensors.items()}
    module = Holder({name: torch.empty_like(tensor, device="meta") for name, tensor in wanted.items()}, "meta")
    settings = LoadSettings(reader=reader, block_bytes=1 << 20)
    umem.load_into(module, tmp_path, device="cpu", settings=settings)
    loaded = module.state_dict()
    for name, tensor in wanted.items():
        assert same_bytes(loaded[name], tensor), name
