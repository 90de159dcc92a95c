"""A picture of numbers with their intervals, as SVG: one line a number, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, LINE, LEFT, RIGHT, TOP = 720, 26, 150, 110, 44


class Mark(NamedTuple):
    """One line: what it is called, the value, and its interval's ends."""

    label: str
    value: float
    low: float
    high: float


def interval_plot(title: str, marks: Sequence[Mark], note: str) -> str:
    """An SVG document. The axis spans the finite values; an interval that reaches beyond is cut at the edge."""
    values = sorted(x for m in marks for x in (m.value, m.low, m.high) if math.isfinite(x))
    low, high = (values[0], values[-1]) if values else (0.0, 1.0)
    if high <= low:
        low, high = low - 1.0, high + 1.0

    def x(value: float) -> float:
        return LEFT + share(value, low, high) * (WIDTH - LEFT - RIGHT)

    lines = []
    for i, mark in enumerate(marks):
        y = TOP + LINE * i + LINE / 2
        lines.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(mark.label)}</text>')
        if math.isfinite(mark.value):
            start, stop = x(mark.low), x(mark.high)
            lines.append(f'<path d="M{start:.1f} {y:.1f}H{stop:.1f}" stroke="#8aa" stroke-width="3"/>')
            lines.append(f'<circle cx="{x(mark.value):.1f}" cy="{y:.1f}" r="4.5" fill="#146"/>')
            lines.append(f'<text x="{WIDTH - RIGHT + 12}" y="{y + 4:.1f}">{mark.value:.6g}</text>')
        else:
            lines.append(f'<text x="{LEFT}" y="{y + 4:.1f}" fill="#888">no number</text>')
    foot = TOP + LINE * len(marks) + 16
    lines.append(f'<path d="M{LEFT} {foot - 10}H{WIDTH - RIGHT}" stroke="#444"/>')
    lines.append(f'<text x="{LEFT}" y="{foot + 6}">{low:.6g}</text>')
    lines.append(f'<text x="{WIDTH - RIGHT}" y="{foot + 6}" text-anchor="end">{high:.6g}</text>')
    lines.append(f'<text x="12" y="{foot + 20}" fill="#666">{escape(note)}</text>')
    return drawing(title, WIDTH, foot + 24, lines)


def share(value: float, low: float, high: float) -> float:
    """Where between low and high a value is, 0 to 1; values outside are at the edge."""
    return (min(max(value, low), high) - low) / (high - low)


def drawing(title: str, width: int, height: int, lines: Sequence[str]) -> str:
    """An SVG document of some elements, on white, with its title."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    white = '<rect width="100%" height="100%" fill="white"/>'
    named = f'<text x="12" y="22" font-size="14">{escape(title)}</text>'
    return "\n".join([head + 'font-family="sans-serif" font-size="12">', white, named, *lines, "</svg>"]) + "\n"
