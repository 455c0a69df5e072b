"""Gives every target its final storage before anything is read: new memory, the caller's tensor, pages of files.

Conversions that their owner runs bring storage of their own. New memory begins where in a page most of what it gets
lies in the file, so that direct reads need no copy; small targets lie side by side as in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from umem.checkpoint.offload import OffloadFile
from umem.planning.plan import LoadPlan
from umem.planning.residency import is_stored_as_used
from umem.planning.targets import DISK, Target
from umem.planning.writes import Route
from umem.strategies.arenas import Tenant, arenas_of
from umem.strategies.mapped import MappedShards
from umem.strategies.registry import is_block_route
from umem.strategies.storage import (
    Destination,
    allocate,
    allocate_arena,
    destination_of,
    discard,
    has_own_pages,
    huge_pages_pay,
    in_file,
    shares_pages,
)

__all__ = ["FinalStorage"]


class FinalStorage:
    """The destinations of a plan's targets, by name.

    Parameters
    ----------
    alignments
        By shard, the congruence of addresses and offsets that spares the reader a copy.
    offload
        The file for targets on disk.
    """

    def __init__(self, plan: LoadPlan, alignments: Sequence[int], offload: OffloadFile | None) -> None:
        self.destinations: dict[str, Destination] = {}
        self.huge_pages: bool | None = None
        self._plan, self._alignments, self._offload = plan, alignments, offload
        self._fresh: set[str] = set()

    def place(self, live: Mapping[str, torch.Tensor], before_each: Callable[[], None]) -> None:
        """Give every target that is live, mapped or filled by blocks its destination.

        Parameters
        ----------
        live
            Target name -> tensor to fill in place.
        before_each
            Called before each allocation; may end the load.
        """
        plan = self._plan
        blocks = (group for group in plan.groups if is_block_route(group.route))
        written = plan.targets.with_names(name for group in blocks for name in group.targets)
        fresh = [target for target in plan.filled if target.name in written and target.name not in live]
        self.huge_pages = huge_pages_pay(sum(target.nbytes for target in fresh if target.device == "cpu"))
        residues = self._residues()
        self._fresh.update(target.name for target in fresh)
        small = {target.name for target in fresh if shares_pages(target)}
        for target in fresh:
            if target.name in small:
                continue
            before_each()
            if target.device == DISK:
                self.destinations[target.name] = self._on_disk(target)
            else:
                tensor = allocate(target, huge_pages=self.huge_pages, residue=residues.get(target.name, 0))
                self.destinations[target.name] = destination_of(target, tensor)
        for arena in arenas_of(self._tenants(small), self._alignments):
            before_each()
            for destination in allocate_arena(arena, huge_pages=self.huge_pages):
                self.destinations[destination.target.name] = destination
        self.destinations.update({destination.target.name: destination for destination in self._mapped()})
        self.destinations.update({name: destination_of(plan.targets[name], tensor) for name, tensor in live.items()})

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The final tensors that are in memory, by target name."""
        in_memory = (name for name in self.destinations if self._plan.targets[name].device != DISK)
        return {name: self.destinations[name].tensor for name in in_memory}

    def discard(self) -> None:
        """Give back what new memory holds now, while others may still refer to it."""
        spans = (self.destinations[name].span for name in self._fresh if name in self.destinations)
        for memory in {id(span.memory): span.memory for span in spans if span is not None}.values():
            discard(memory)

    def let_go(self) -> None:
        """Refer to nothing any more; a kept traceback must not keep the model's memory."""
        self.destinations.clear()

    def _tenants(self, names: Collection[str]) -> Iterator[Tenant]:
        """The targets of these names in the order of the file, by what fills each first."""
        seen: set[str] = set()
        for group in self._plan.groups:
            for name in group.targets:
                target = self._plan.targets[name]
                if target.name in names and target.name not in seen:
                    seen.add(target.name)
                    entry = group.entries[0]
                    start = entry.start if is_stored_as_used(group, target) else None
                    yield Tenant(target, target.nbytes, entry.shard, start)

    def _on_disk(self, target: Target) -> Destination:
        if self._offload is None:
            raise ValueError(f"the plan puts {target.name} on disk, but no file for it was given")
        return in_file(target, self._offload.memory, self._offload.start_of(target.name))

    def _mapped(self) -> Iterator[Destination]:
        """The targets of the mapped route, with their pages of the files."""
        shards = MappedShards()
        for group in self._plan.groups:
            if group.route is Route.MAPPED:
                write = group.writes[0]
                target = self._plan.targets[write.target]
                yield destination_of(
                    target, shards.tensor(self._plan.checkpoint.shards[write.entry.shard], write.entry, target)
                )

    def _residues(self) -> dict[str, int]:
        """By target, where in a page its storage begins so that most of its bytes lie congruent to the file."""
        votes: dict[str, Counter[int]] = {}
        for group in self._plan.groups:
            if group.route is not Route.DIRECT or not group.read_bytes:
                continue
            alignment = self._alignments[group.entries[0].shard]
            if alignment == 1:
                continue
            for write in group.writes:
                target = self._plan.targets[write.target]
                if has_own_pages(target) and write.destination.runs_row_major():
                    itemsize = write.entry.dtype.itemsize
                    start = write.entry.start - write.destination.offset * itemsize
                    if start % itemsize:
                        continue  # such items would lie across the addresses that processors like
                    votes.setdefault(target.name, Counter())[start % alignment] += write.entry.nbytes
        return {name: counts.most_common(1)[0][0] for name, counts in votes.items()}
