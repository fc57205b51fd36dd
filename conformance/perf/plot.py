"""A plot of a GPU bench: per op and size, each provider's time as a multiple of the floor (logarithmic)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from typing import Any

COLOURS = ("#0b6e4f", "#c2410c", "#1d4ed8", "#7c3aed", "#525252")
FONT = 'font-family="system-ui, sans-serif"'
LEFT, WIDTH, LANE, MOST = 430, 520, 16, 100.0


def svg(rows: Sequence[dict[str, Any]], providers: Sequence[str]) -> str:
    """The plot as an SVG document; calls that take under a microsecond at the floor are shown by their time."""
    top = 44
    height = top + LANE * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{height}" font-size="11" {FONT}>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="14">time over the larger of floor and 1 us (left is better)</text>',
    ]
    for number, provider in enumerate(providers):
        colour, x = COLOURS[number % len(COLOURS)], 10 + 85 * number
        parts.append(f'<circle cx="{x}" cy="10" r="4" fill="{colour}"/><text x="{x + 8}" y="14">{escape(provider)}</text>')
    for tick in (1, 2, 5, 10, 20, 50, 100):
        x = _place(tick)
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top - 8}" y2="{height - 24}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.0f}" y="{top - 12}" text-anchor="middle">{tick}x</text>')
    for line, row in enumerate(rows):
        y = top + LANE * line + LANE / 2
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{escape(row["op"] + "  " + row["size"])}</text>')
        for number, provider in enumerate(providers):
            us = row["providers"][provider]["us"]
            if us:
                x, colour = _place(us / max(row["floor_us"], 1.0)), COLOURS[number % len(COLOURS)]
                told = escape(f"{provider}: {us:.2f} us")
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.0f}" r="4" fill="{colour}"><title>{told}</title></circle>')
    return "\n".join([*parts, "</svg>"])


def _place(ratio: float) -> float:
    return LEFT + WIDTH * min(max(log10(ratio), 0.0), log10(MOST)) / log10(MOST)
