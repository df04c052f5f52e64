"""Lines over two logarithmic axes, as an SVG file. Knows numbers and text; must not know what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from kvstore.errors import PathError, SettingsError

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 72, 150, 48, 56
COLOURS = ("#b3412b", "#2b6cb3", "#3a8f4d", "#8a5fb0", "#b3872b")
Points = Sequence[tuple[float, float]]


def refuse_other_kinds(path: Path) -> None:
    """Raises SettingsError for a name that does not end in ``.svg``, PathError where no file can be made."""
    if path.suffix.lower() != ".svg":
        raise SettingsError(f"{path} is no name of an SVG file", "end it in .svg; any browser converts it")
    if not path.absolute().parent.is_dir():
        raise PathError(f"there is no folder {path.parent}", "make it first")


def write_chart(path: Path, title: str, across: str, up: str, lines: Mapping[str, Points]) -> None:
    """Draw lines by name. Raises PathError."""
    try:
        path.write_text(chart(title, across, up, lines), encoding="utf-8")
    except OSError as error:
        raise PathError(f"{path} cannot be written: {error.strerror}", "choose another name") from error


def chart(title: str, across: str, up: str, lines: Mapping[str, Points]) -> str:
    """The SVG's text. Raises SettingsError for nothing to draw, or what has no logarithm."""
    points = [point for line in lines.values() for point in line]
    if not points or min(min(point) for point in points) <= 0:
        raise SettingsError("a logarithmic chart needs numbers above 0", "leave others out")
    x = _Axis([point[0] for point in points], LEFT, WIDTH - RIGHT, base=2)
    y = _Axis([point[1] for point in points], HEIGHT - BOTTOM, TOP, base=10)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(across)}</text>',
        f'<text transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(up)}</text>",
    ]
    for value in x.ticks():
        at = x(value)
        drawn.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#e4e4e4"/>')
        drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:,.0f}</text>')
    for value in y.ticks():
        at = y(value)
        drawn.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#e4e4e4"/>')
        drawn.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [(x(a), y(b)) for a, b in line]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in places]
        top = TOP + 16 + 20 * number
        drawn.append(f'<rect x="{WIDTH - RIGHT + 14}" y="{top - 9}" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{WIDTH - RIGHT + 32}" y="{top + 1}">{escape(name)}</text>')
    return "\n".join([*drawn, "</svg>", ""])


class _Axis:
    """Where a value lies between two coordinates, by its logarithm; whole powers of ``base`` at both ends."""

    def __init__(self, values: Sequence[float], start: float, stop: float, base: int) -> None:
        self._base, self._start, self._stop = base, start, stop
        self._low = math.floor(math.log(min(values), base) + 1e-9)
        self._high = max(self._low + 1, math.ceil(math.log(max(values), base) - 1e-9))

    def __call__(self, value: float) -> float:
        share = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._start + share * (self._stop - self._start)

    def ticks(self) -> list[float]:
        """The powers between both ends."""
        return [float(self._base) ** power for power in range(self._low, self._high + 1)]
