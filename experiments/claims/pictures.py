"""A chart of lines as SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 460, 280, 60, 40, 210, 48
COLOURS = ("#146", "#c50", "#2a7", "#a2a", "#777", "#b90")
Points = Sequence[tuple[float, float]]


def line_chart(
    title: str, lines: Mapping[str, Points], across: str, up: str, diagonal: bool = False, points: bool = False
) -> str:
    """An SVG document: one line for each name, axes over the values. points: with a dot at every value. diagonal: with
    the line y = x. Raises ValueError without a point."""
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
    for i in range(5):
        x, y = x0 + (x1 - x0) * i / 4, y0 + (y1 - y0) * i / 4
        (px, _), (_, py) = at((x, y0)), at((x0, y))
        drawn.append(f'<text x="{px:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{x:.3g}</text>')
        drawn.append(f'<text x="{LEFT - 6}" y="{py + 4:.1f}" text-anchor="end">{y:.3g}</text>')
    for i, (name, line) in enumerate(lines.items()):
        colour, places = COLOURS[i % len(COLOURS)], [at(point) for point in line]
        dashes = "" if i < len(COLOURS) else "6 3"
        drawn.append(_path(places, colour, dashes))
        if points:
            drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        beside = LEFT + WIDTH + 14
        sample = (beside, TOP + 8 + 20 * i), (beside + 18, TOP + 8 + 20 * i)
        drawn.append(_path(sample, colour, dashes))
        drawn.append(f'<text x="{beside + 24}" y="{TOP + 12 + 20 * i}">{escape(name)}</text>')
    foot, middle = TOP + HEIGHT + 38, TOP + HEIGHT / 2
    drawn.append(f'<text x="{LEFT + WIDTH / 2}" y="{foot}" text-anchor="middle">{escape(across)}</text>')
    turned = f'text-anchor="middle" transform="rotate(-90 14 {middle})"'
    drawn.append(f'<text x="14" y="{middle}" {turned}>{escape(up)}</text>')
    return _drawing(title, drawn)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis, a little apart where all values are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _path(places: Sequence[tuple[float, float]], colour: str, dashes: str) -> str:
    way = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path d="M{way}" stroke="{colour}" stroke-width="2" fill="none" stroke-dasharray="{dashes}"/>'


def _drawing(title: str, drawn: Sequence[str]) -> str:
    width, height = LEFT + WIDTH + RIGHT, TOP + HEIGHT + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
    white = '<rect width="100%" height="100%" fill="white"/>'
    named = f'<text x="12" y="22" font-size="14">{escape(title)}</text>'
    return "\n".join([head + 'font-family="sans-serif" font-size="12">', white, named, *drawn, "</svg>"]) + "\n"
