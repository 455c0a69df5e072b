"""Rules: how the checkpoint of any module maps to its tensors, in a few lines of names and ordinary torch code.

A rule names stored tensors by patterns and gives torch code that makes the target of them. The code never sees a
number: it runs once on traced tensors (`tracing`), and what it does becomes views of the target. Two worked examples:

Grouped experts as NeMo Automodel keeps them, `[E, H, 2I]` and `[E, I, H]`, from a checkpoint with one tensor an expert
and projection::

    layer = "model.layers.{i}.mlp.experts"
    rules = [
        umem.Rule(
            [f"{layer}.*.gate_proj.weight", f"{layer}.*.up_proj.weight"],
            f"{layer}.gate_and_up_projs",
            lambda gate, up: torch.cat([torch.stack(gate), torch.stack(up)], dim=1).transpose(1, 2),
        ),
        umem.Rule(f"{layer}.*.down_proj.weight", f"{layer}.down_projs", lambda down: torch.stack(down).transpose(1, 2)),
    ]

Gemma 4's per-expert scale, absorbed into the down projection::

    umem.Rule(
        ["layers.{i}.experts.down_proj", "layers.{i}.router.per_expert_scale"],
        "layers.{i}.experts.down_projs",
        lambda down, scale: down.transpose(1, 2) * scale[:, None, None],
    )

The code may move elements in any way (stack, cat, chunk, transpose, reshape, slices), and multiply last by one stored
tensor that broadcasts. What else changes numbers is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from umem._types import DType
from umem.adapters.layout import NotALayoutError, stored
from umem.adapters.tracing import TracedTensor
from umem.checkpoint.entries import Checkpoint, Entry
from umem.errors import SettingsError, UnsupportedError
from umem.planning.targets import Targets
from umem.planning.writes import Adaptation
from umem.strategies.storage import torch_dtype

__all__ = ["Rule", "apply_rules"]

_PLACE = re.compile(r"\{(\w+)\}|\*")


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of target is made.

    Attributes
    ----------
    sources
        Patterns of stored names. `{name}` stands for one part of a dotted name, the same in sources and target. `*`
        stands for one part too, and collects: the code gets a list, ordered by number.
    target
        The pattern of the target's name; it may use the `{name}` of the sources.
    build
        Torch code that makes the target of the sources, one argument a pattern. None: the only source as it is.
    """

    sources: str | Sequence[str]
    target: str
    build: Callable[..., torch.Tensor] | None = None

    @property
    def patterns(self) -> tuple[str, ...]:
        """The source patterns."""
        return (self.sources,) if isinstance(self.sources, str) else tuple(self.sources)


#: Of one target, by source pattern: the entries that were found, or the list of them.
_Found = dict[str, dict[str, Entry]]


def apply_rules(
    rules: Sequence[Rule], checkpoint: Checkpoint, names: Mapping[str, str], targets: Targets, adaptation: Adaptation
) -> set[str]:
    """Add what `rules` make to `adaptation`; gives the stored names that they used.

    Parameters
    ----------
    names
        Stored name -> the name that patterns are held against.

    Raises
    ------
    SettingsError
        A rule makes no sense: its target uses a place that its sources lack, or its code fails.
    UnsupportedError
        A rule's code does more than move elements and multiply last.
    """
    used: set[str] = set()
    for rule in rules:
        if not rule.patterns:
            raise SettingsError(f"rule for {rule.target}: it names no sources")
        for target, found in _matches(rule, checkpoint, names).items():
            used.update(entry.name for entries in found.values() for entry in entries.values())
            if target not in targets:
                adaptation.unexpected.extend(entry.name for entries in found.values() for entry in entries.values())
                continue
            _add(rule, target, found, targets, adaptation)
    return used


def _matches(rule: Rule, checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, _Found]:
    matched: dict[str, _Found] = {}
    for pattern in rule.patterns:
        expression = _compiled(pattern, rule)
        for stored_name, name in names.items():
            match = expression.fullmatch(name)
            if match is not None:
                target = _PLACE.sub(lambda place, match=match: match[place[1]], rule.target)  # type: ignore[misc]
                found = matched.setdefault(target, {})
                found.setdefault(pattern, {})[name] = checkpoint.entries[stored_name]
    return matched


def _compiled(pattern: str, rule: Rule) -> re.Pattern[str]:
    places = [place[1] for place in _PLACE.finditer(rule.target)]
    if None in places or any(f"{{{place}}}" not in pattern for place in places):
        raise SettingsError(f"rule for {rule.target}: each of its places must be a {{name}} of every source, and no *")
    parts, end = [], 0
    for place in _PLACE.finditer(pattern):
        parts += [re.escape(pattern[end : place.start()]), f"(?P<{place[1]}>[^.]+)" if place[1] else "[^.]+"]
        end = place.end()
    try:
        return re.compile("".join([*parts, re.escape(pattern[end:])]))
    except re.error as error:
        raise SettingsError(f"rule for {rule.target}: the pattern {pattern!r} cannot be read: {error}") from None


def _add(rule: Rule, target: str, found: _Found, targets: Targets, adaptation: Adaptation) -> None:
    wanted = str(list(targets[target].shape))
    absent = [pattern for pattern in rule.patterns if pattern not in found]
    if absent:
        adaptation.mismatched.append((target, f"nothing for {', '.join(absent)}", wanted))
        return
    dtype = torch_dtype(targets[target].dtype)
    arguments = [_argument(pattern, found[pattern], dtype) for pattern in rule.patterns]
    try:
        made = rule.build(*arguments) if rule.build is not None else arguments[0]
    except NotALayoutError as error:
        raise UnsupportedError(f"rule for {target}: its code is no move of elements: {error}") from error
    except (ValueError, IndexError, RuntimeError) as error:
        adaptation.mismatched.append((target, f"parts that the rule's code cannot join ({error})", wanted))
        return
    if not isinstance(made, TracedTensor):
        raise SettingsError(f"rule for {target}: its code gave {type(made).__name__}, no tensor of its arguments")
    layout = made.layout_of_elements
    if layout.shape != targets[target].shape:
        adaptation.mismatched.append((target, str(list(layout.shape)), wanted))
        return
    adaptation.writes.extend(layout.writes(target))


def _argument(pattern: str, found: Mapping[str, Entry], dtype: torch.dtype) -> TracedTensor | list[TracedTensor]:
    """What the code gets for a pattern. Floating-point tensors are cast to the target's dtype first."""
    tensors = [TracedTensor(stored(entry), _dtype_of(entry, dtype)) for entry in _in_order(found)]
    return tensors if "*" in pattern else tensors[0]


def _dtype_of(entry: Entry, dtype: torch.dtype) -> torch.dtype:
    return dtype if entry.dtype.kind == DType.from_torch(dtype).kind == "float" else torch_dtype(entry.dtype)


def _in_order(found: Mapping[str, Entry]) -> Iterator[Entry]:
    """Entries by the numbers in their names."""

    def numbers(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    for name in sorted(found, key=numbers):
        yield found[name]
