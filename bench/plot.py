"""Small line charts as SVG, one panel a kind of traffic, without a plotting library."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 220, 40, 26
_COLUMNS = 3
_COLOURS = ("#999999", "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#222222")


def lines_svg(points: Sequence[tuple[str, int, Mapping[str, float]]], y: str, x: str) -> str:
    """A chart of (panel, position on the x axis, {line: value from 0 to 100}); `y` and `x` name the axes."""
    panels: dict[str, list[tuple[int, Mapping[str, float]]]] = defaultdict(list)
    for panel, position, values in points:
        panels[panel].append((position, values))
    rows = -(-len(panels) // _COLUMNS)
    size = (_COLUMNS * (_WIDTH + 20) + 20, rows * (_HEIGHT + 30) + 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    names: list[str] = []
    for number, (panel, rows_of) in enumerate(panels.items()):
        names = list(rows_of[0][1])
        left = 20 + number % _COLUMNS * (_WIDTH + 20)
        parts.append(f'<g transform="translate({left},{10 + number // _COLUMNS * (_HEIGHT + 30)})">')
        parts += _panel(panel, sorted(rows_of, key=lambda row: row[0]), y, x)
        parts.append("</g>")
    for number, name in enumerate(names):
        at = 40 + number * 110
        parts.append(f'<path d="M{at} {size[1] - 20} h24" stroke="{_COLOURS[number]}" stroke-width="2"/>')
        parts.append(f'<text x="{at + 30}" y="{size[1] - 16}">{html.escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, rows: Sequence[tuple[int, Mapping[str, float]]], y: str, x: str) -> Iterator[str]:
    wide, high = _WIDTH - _LEFT, _HEIGHT - _TOP - 30

    def place(position: float, value: float) -> str:
        return f"{_LEFT + wide * position / 100:.1f} {_TOP + high * (1 - value / 100):.1f}"

    yield f'<text x="{_LEFT}" y="14" font-weight="bold">{html.escape(title)}</text>'
    for mark in range(0, 101, 25):
        yield f'<path d="M{place(0, mark)} h{wide}" stroke="#dddddd"/>'
        yield f'<text x="{_LEFT - 6}" y="{_TOP + high * (1 - mark / 100) + 4:.1f}" text-anchor="end">{mark}</text>'
        bottom = _TOP + high + 14
        yield f'<text x="{_LEFT + wide * mark / 100:.1f}" y="{bottom}" text-anchor="middle">{mark}</text>'
    yield f'<text x="{_LEFT + wide / 2}" y="{_TOP + high + 28}" text-anchor="middle">{html.escape(x)}</text>'
    yield (
        f'<text x="8" y="{_TOP + high / 2}" text-anchor="middle" '
        f'transform="rotate(-90 8 {_TOP + high / 2})">{html.escape(y)}</text>'
    )
    for number, name in enumerate(rows[0][1]):
        path = " L".join(place(position, values[name]) for position, values in rows)
        yield f'<path d="M{path}" fill="none" stroke="{_COLOURS[number]}" stroke-width="2"/>'
