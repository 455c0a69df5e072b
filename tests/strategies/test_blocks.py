"""The schedule: file order, long reads, every byte once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from umem._types import DType
from umem.checkpoint import Entry
from umem.planning.views import View
from umem.planning.writes import Group, Route, Write
from umem.strategies.blocks import GAP_BYTES, blocks_of


def group(name: str, shard: int, start: int, count: int, dtype: DType = DType.U8) -> Group:
    entry = Entry(name, shard, start, count * dtype.itemsize, dtype, (count,))
    view = View.whole((count,))
    return Group(name, Route.DIRECT, "", (entry,), (name,), (Write(entry, view, name, view),))


def test_neighbours_are_read_together() -> None:
    (block,) = blocks_of([group("b", 0, 100, 50), group("a", 0, 0, 100)], 1000)
    assert (block.start, block.end) == (0, 150)
    assert [part.writes[0].target for part in block.parts] == ["a", "b"]


def test_large_tensors_are_cut_and_small_ones_fill_the_rest() -> None:
    blocks = blocks_of([group("a", 0, 8, 250), group("b", 0, 258, 10)], 100)
    assert [(block.start, block.end) for block in blocks] == [(8, 108), (108, 208), (208, 268)]


def test_small_gaps_are_read_over_and_large_ones_are_not() -> None:
    near, far = 10 + GAP_BYTES, 10 + GAP_BYTES + 10 + GAP_BYTES + 1
    blocks = blocks_of([group("a", 0, 0, 10), group("b", 0, near, 10), group("c", 0, far, 10)], 1 << 30)
    assert [len(block.parts) for block in blocks] == [2, 1]


def test_shards_are_numbered_each_by_itself() -> None:
    blocks = blocks_of([group("a", 0, 0, 10), group("b", 1, 0, 25), group("c", 0, 10, 10)], 10)
    assert [(block.shard, block.number) for block in blocks] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 300), st.sampled_from([DType.U8, DType.F64]))
    ),
    st.integers(8, 500),
)
def test_every_byte_of_every_tensor_once(tensors: list[tuple[int, int, int, DType]], block_bytes: int) -> None:
    groups = [group(f"t{i}", shard, start, count, dtype) for i, (shard, start, count, dtype) in enumerate(tensors)]
    read: dict[str, list[int]] = {}
    for block in blocks_of(groups, block_bytes):
        assert block.end - block.start <= block_bytes
        ends = [part.end for part in block.parts]
        assert all(start >= end for start, end in zip([p.start for p in block.parts[1:]], ends, strict=False))
        for part in block.parts:
            entry = part.writes[0].entry
            assert entry.shard == block.shard
            assert (part.start - entry.start) % entry.dtype.itemsize == 0
            read.setdefault(entry.name, []).extend(range(part.start, part.end))
    for item in groups:
        entry = item.entries[0]
        assert sorted(read.get(entry.name, [])) == list(range(entry.start, entry.start + entry.nbytes))
