"""Where the state of sequences lies: KV pages per page group, and one fixed record of recurrent state.

A page holds 64 positions of every cache of its group. Caches with the same sliding window form a group (0: all
positions are kept; pages behind a window are given back). Inside a page, cache by cache: K then V, each
[kv_heads, 64, head_dim] of the KV type. A record holds the conv states, then the delta states, float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkd.graph.program import Program

PAGE = 64


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Caches (indices into `Program.caches`) that share pages; `window` 0: pages live as long as the sequence."""

    window: int
    caches: tuple[int, ...]
    page_bytes: int

    def pages_for(self, positions: int, chunk: int) -> int:
        """The most pages one sequence of `positions` holds at once when steps carry at most `chunk` rows of it."""
        pages = -(-positions // PAGE)
        if self.window:
            pages = min(pages, -(-(self.window + chunk - 1) // PAGE) + 1)
        return pages

    def first_page(self, position: int) -> int:
        """The first logical page that a query at `position` or later can still see."""
        return max(0, position - self.window + 1) // PAGE if self.window else 0


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Group of a cache and the byte offsets of its K and V inside a page."""

    group: int
    k_offset: int
    v_offset: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of all per-sequence state of a program for one KV element size."""

    kv_bytes: int
    groups: tuple[PageGroup, ...]
    caches: tuple[CachePlace, ...]
    #: Byte offset of each conv and delta state inside a record.
    conv_offsets: tuple[int, ...]
    delta_offsets: tuple[int, ...]
    record_bytes: int

    @staticmethod
    def of(program: Program, kv_bytes: int) -> StateLayout:
        """Lay out the state of `program`; `kv_bytes` is 2 (f16) or 4 (f32)."""
        windows = sorted({c.window for c in program.caches})
        groups: list[PageGroup] = []
        places: dict[int, CachePlace] = {}
        for number, window in enumerate(windows):
            members = tuple(i for i, c in enumerate(program.caches) if c.window == window)
            offset = 0
            for i in members:
                size = program.caches[i].kv_heads * PAGE * program.caches[i].head_dim * kv_bytes
                places[i] = CachePlace(number, offset, offset + size)
                offset += 2 * size
            groups.append(PageGroup(window, members, offset))
        offset = 0
        conv, delta = [], []
        for c in program.conv_states:
            conv.append(offset)
            offset += c.rows * c.channels * 4
        for d in program.delta_states:
            offset = -(-offset // 64) * 64
            delta.append(offset)
            offset += d.heads * d.head_dim * d.head_dim * 4
        return StateLayout(
            kv_bytes,
            tuple(groups),
            tuple(places[i] for i in range(len(program.caches))),
            tuple(conv),
            tuple(delta),
            -(-offset // 64) * 64,
        )
