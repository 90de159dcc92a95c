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
    """An SVG document. The axis spans what is finite; an interval that reaches beyond is cut at the edge."""
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


def scatter_plot(title: str, points: Sequence[tuple[float, float, float, float]], across: str, up: str) -> str:
    """An SVG document: a point (x, y) with a bar from low to high for each (x, y, low, high), and the line y = x.

    Both axes span the middle 99 % of the x and y; what lies outside is drawn at the edge. Points may be thousands: they
    are faint. across, up: the axes' names.
    """
    size, left, top = 420, 64, 44
    values = sorted(v for point in points for v in point[:2] if math.isfinite(v)) or [0.0, 1.0]
    low, high = values[len(values) // 200], values[-1 - len(values) // 200]
    low, high = (low, high) if high > low else (low - 1.0, high + 1.0)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + size * share(x, low, high), top + size - size * share(y, low, high)

    faint = min(1.0, max(0.15, 60 / max(len(points), 1)))
    lines = [
        f'<path d="M{left} {top}V{top + size}H{left + size}" stroke="#444" fill="none"/>',
        f'<path d="M{left} {top + size}L{left + size} {top}" stroke="#aaa" stroke-dasharray="4 4"/>',
    ]
    for x, y, start, stop in points:
        (px, py), (_, first), (_, last) = at(x, y), at(x, start), at(x, stop)
        bar = f'<path d="M{px:.1f} {first:.1f}V{last:.1f}" stroke="#8aa" stroke-width="1.5" opacity="{faint / 2:.2f}"/>'
        lines += [bar, f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="#146" opacity="{max(faint, 0.4):.2f}"/>']
    for i in range(5):
        value = low + (high - low) * i / 4
        x, y = at(value, value)
        lines.append(f'<text x="{x:.1f}" y="{top + size + 18}" text-anchor="middle">{value:.3g}</text>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    lines.append(f'<text x="{left + size / 2}" y="{top + size + 40}" text-anchor="middle">{escape(across)}</text>')
    middle = top + size / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
    lines.append(f'<text x="16" y="{middle}" {turned}>{escape(up)}</text>')
    return drawing(title, left + size + 30, top + size + 60, lines)


def share(value: float, low: float, high: float) -> float:
    """Where between low and high a value is, 0 to 1; values outside are at the edge."""
    return (min(max(value, low), high) - low) / (high - low)


def drawing(title: str, width: int, height: int, lines: Sequence[str]) -> str:
    """An SVG document of some elements, on white, with its title."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    white = '<rect width="100%" height="100%" fill="white"/>'
    named = f'<text x="12" y="22" font-size="14">{escape(title)}</text>'
    return "\n".join([head + 'font-family="sans-serif" font-size="12">', white, named, *lines, "</svg>"]) + "\n"
