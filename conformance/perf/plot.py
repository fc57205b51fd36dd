"""A plot of a bench: per op and size, each provider's time as a multiple of another time (logarithmic)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from math import log10
from typing import Any

COLOURS = ("#0b6e4f", "#c2410c", "#1d4ed8", "#7c3aed", "#525252")
FONT = 'font-family="system-ui, sans-serif"'
LEFT, WIDTH, LANE = 430, 520, 16
TICKS = (1, 2, 5)  # of each decade


def over_floor(rows: Sequence[dict[str, Any]], providers: Sequence[str]) -> str:
    """Of a GPU bench; calls that take under a microsecond at the floor are shown by their time."""
    return svg("time over the larger of floor and 1 us", rows, providers, lambda row: (max(row["floor_us"], 1.0), "us"), 0, 2)


def over_reference(rows: Sequence[dict[str, Any]], providers: Sequence[str]) -> str:
    """Of a CPU bench."""
    return svg("time over the reference's", rows, providers, lambda row: (row["reference_ms"], "ms"), -2, 0)


def svg(title: str, rows: Sequence[dict[str, Any]], providers: Sequence[str], unit: Callable, low: int, high: int) -> str:
    """The plot as an SVG document, from 10^low to 10^high. unit(row) -> (the time that counts as 1, its name)."""
    top = 44
    height = top + LANE * len(rows) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{height}" font-size="11" {FONT}>',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="14">{title} (left is better)</text>',
    ]

    def place(ratio: float) -> float:
        return LEFT + WIDTH * (min(max(log10(ratio), low), high) - low) / (high - low)

    for number, provider in enumerate(providers):
        colour, x = COLOURS[number % len(COLOURS)], 10 + 85 * number
        parts.append(f'<circle cx="{x}" cy="10" r="4" fill="{colour}"/><text x="{x + 8}" y="14">{escape(provider)}</text>')
    for tick in (*(n * 10.0**decade for decade in range(low, high) for n in TICKS), 10.0**high):
        x = place(tick)
        parts.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{top - 8}" y2="{height - 24}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.0f}" y="{top - 12}" text-anchor="middle">{tick:g}x</text>')
    for line, row in enumerate(rows):
        y = top + LANE * line + LANE / 2
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{escape(row["op"] + "  " + row["size"])}</text>')
        one, name = unit(row)
        for number, provider in enumerate(providers):
            taken = row["providers"][provider][name]
            if taken:
                x, colour = place(taken / one), COLOURS[number % len(COLOURS)]
                told = escape(f"{provider}: {taken:.3g} {name}")
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.0f}" r="4" fill="{colour}"><title>{told}</title></circle>')
    return "\n".join([*parts, "</svg>"])
