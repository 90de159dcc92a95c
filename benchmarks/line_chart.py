"""Charts of lines or points as SVG, one or several on a sheet, without a library."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 460, 280, 60, 40, 48
LETTER = 6.6  # pixels, about
COLOURS = ("#146", "#c50", "#2a7", "#a2a", "#777", "#b90")
Points = Sequence[tuple[float, float]]


def line_chart(
    title: str,
    lines: Mapping[str, Points],
    across: str,
    up: str,
    diagonal: bool = False,
    points: bool = False,
    joined: bool = True,
) -> str:
    """An SVG document: one line for each name, axes over the values. points: with a dot at every value. joined: False
    leaves the lines out. diagonal: with the line y = x. Raises ValueError without a point."""
    every = [point for line in lines.values() for point in line]
    if not every:
        raise ValueError("a chart without points")
    (x0, x1), (y0, y1) = (_span([point[axis] for point in every]) for axis in (0, 1))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x, y = (point[0] - x0) / (x1 - x0), (point[1] - y0) / (y1 - y0)
        return LEFT + x * WIDTH, TOP + HEIGHT - y * HEIGHT

    drawn = [f'<path d="M{LEFT} {TOP}V{TOP + HEIGHT}H{LEFT + WIDTH}" stroke="#444" fill="none"/>']
    if diagonal:
        ends = [at((max(x0, y0), max(x0, y0))), at((min(x1, y1), min(x1, y1)))]
        drawn.append(_path(ends, "#aaa", "4 4"))
    drawn += _marks((x0, x1), (y0, y1), at)
    for i, (name, line) in enumerate(lines.items()):
        colour, places = COLOURS[i % len(COLOURS)], [at(point) for point in line]
        fill, dashes = (colour, "") if i < len(COLOURS) else ("white", "6 3")
        if joined:
            drawn.append(_path(places, colour, dashes))
        if points or not joined:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" stroke="{colour}" fill="{fill}"/>' for x, y in places]
        beside = LEFT + WIDTH + 14
        middle = TOP + 8 + 20 * i
        if joined:
            drawn.append(_path([(beside, middle), (beside + 18, middle)], colour, dashes))
        else:
            drawn.append(f'<circle cx="{beside + 9}" cy="{middle}" r="3" stroke="{colour}" fill="{fill}"/>')
        drawn.append(f'<text x="{beside + 24}" y="{TOP + 12 + 20 * i}">{escape(name)}</text>')
    foot, centre = TOP + HEIGHT + 38, TOP + HEIGHT / 2
    drawn.append(f'<text x="{LEFT + WIDTH / 2}" y="{foot}" text-anchor="middle">{escape(across)}</text>')
    turned = f'text-anchor="middle" transform="rotate(-90 14 {centre})"'
    drawn.append(f'<text x="14" y="{centre}" {turned}>{escape(up)}</text>')
    width = math.ceil(LEFT + WIDTH + 46 + LETTER * max(map(len, lines)))
    return drawing(title, width, TOP + HEIGHT + BOTTOM, drawn)


def sheet(title: str, charts: Sequence[str], columns: int) -> str:
    """An SVG document of SVG documents, row by row, each as wide as the widest. Raises ValueError without any."""
    sizes = [
        [int(chart.partition(f' {side}="')[2].partition('"')[0]) for side in ("width", "height")] for chart in charts
    ]
    across, down = (max(size[side] for size in sizes) for side in (0, 1))
    placed = [
        chart.replace("<svg ", f'<svg x="{i % columns * across}" y="{TOP + i // columns * down}" ', 1)
        for i, chart in enumerate(charts)
    ]
    return drawing(title, columns * across, TOP + -(-len(charts) // columns) * down, placed)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from low to high, about as many: multiples of 1, 2 or 5 times a power of ten. low < high."""
    rough = (high - low) / about
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _marks(
    across: tuple[float, float], up: tuple[float, float], at: Callable[[tuple[float, float]], tuple[float, float]]
) -> list[str]:
    """The ticks of both axes and their numbers."""
    drawn = []
    for x in ticks(*across):
        px = at((x, up[0]))[0]
        drawn.append(f'<path d="M{px:.1f} {TOP + HEIGHT}v4" stroke="#444"/>')
        drawn.append(f'<text x="{px:.1f}" y="{TOP + HEIGHT + 17}" text-anchor="middle">{x:.5g}</text>')
    for y in ticks(*up):
        py = at((across[0], y))[1]
        drawn.append(f'<path d="M{LEFT - 4} {py:.1f}h4" stroke="#444"/>')
        drawn.append(f'<text x="{LEFT - 7}" y="{py + 4:.1f}" text-anchor="end">{y:.5g}</text>')
    return drawn


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis, a little apart if all values are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _path(places: Sequence[tuple[float, float]], colour: str, dashes: str) -> str:
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path d="M{way}" stroke="{colour}" stroke-width="2" fill="none" stroke-dasharray="{dashes}"/>'


def drawing(title: str, width: int, height: int, lines: Sequence[str]) -> str:
    """An SVG document of some elements, on white, with its title."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    white = '<rect width="100%" height="100%" fill="white"/>'
    named = f'<text x="12" y="22" font-size="14">{escape(title)}</text>'
    return "\n".join([head + 'font-family="sans-serif" font-size="12">', white, named, *lines, "</svg>"]) + "\n"
