"""Logical positions and physical slots of the stateful runner."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.runners.stateful import SlotMap

RESERVED = 20


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 6), st.booleans()), max_size=60))
def test_every_position_keeps_its_token(steps: list[tuple[float, int, bool]]) -> None:
    """A model of the physical cache is written and moved as the runner would; the live slots always spell the logical text."""
    slots = SlotMap(num_reserved=RESERVED)
    text: list[int] = []  # logical
    cache: list[int] = []  # physical
    for number, (where, count, fails) in enumerate(steps):
        start = int(where * len(text))
        count = min(count, RESERVED - start)
        if count == 0:
            continue
        slots.rewind(start)
        del text[start:]
        if slots.needs_compaction(count):
            cache = [cache[slot] for slot in slots.compact()]
            assert len(cache) == start
        num_before = slots.num_slots
        mask = slots.append(count)
        assert len(mask) == slots.num_slots <= slots.limit
        if fails:
            slots.take_back(start, num_before)
        else:
            cache += [number] * count
            text += [number] * count
        live = [cache[slot] for slot in range(slots.num_slots) if slots.mask[slot]]
        assert live == text == [cache[slot] for slot in slots.slots]
        assert len(cache) == slots.num_slots
        assert slots.mask[slots.num_slots :].sum() == 0
        assert slots.slots == sorted(set(slots.slots))
        assert slots.length == len(text)
