"""Grouped bar charts as plain SVG: no plotting library, and the same file from the same numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence
from html import escape

#: Told apart by people who see colours differently (Okabe and Ito).
COLOURS = ("#999999", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7")
_LEFT, _TOP, _HEIGHT, _BAR, _GAP, _LINE = 56, 46, 200, 9, 12, 14
_FONT = 'font-family="sans-serif" font-size="11"'


def bars(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    line: float | None = None,
) -> str:
    """series: name -> one value per group, None for no bar. line: a level to draw across."""
    values = [v for one in series.values() for v in one if v is not None]
    step = _step(max([*values, line or 0.0], default=1.0))
    top = step * math.ceil(max([*values, line or 0.0], default=1.0) / step)
    group = len(series) * _BAR + _GAP
    width = max(_LEFT + len(groups) * group + 20, 420)
    bottom = _TOP + _HEIGHT + _LINE * (1 + (len(series) - 1) // 4)
    out = [f'<text x="{_LEFT}" y="16" {_FONT} font-weight="bold">{escape(title)}</text>']
    for i, name in enumerate(series):
        x, y = _LEFT + (i % 4) * min((width - _LEFT) // 4, 170), 32 + _LINE * (i // 4)
        out.append(f'<rect x="{x}" y="{y - 8}" width="9" height="9" fill="{COLOURS[i]}"/>')
        out.append(f'<text x="{x + 13}" y="{y}" {_FONT}>{escape(name)}</text>')

    def height(value: float) -> float:
        return round(bottom - _HEIGHT * value / top, 1)

    for i in range(round(top / step) + 1):
        y = height(i * step)
        out.append(f'<path d="M{_LEFT} {y}H{width - 10}" stroke="#ddd"/>')
        label = f"{i * step:g}"
        out.append(f'<text x="{_LEFT - 6}" y="{y + 4}" {_FONT} text-anchor="end">{label}</text>')
    middle = (bottom + bottom - _HEIGHT) // 2
    out.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" {_FONT} text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    for at, name in enumerate(groups):
        x = _LEFT + _GAP // 2 + at * group
        for i, (label, one) in enumerate(series.items()):
            value = one[at]
            if value is None:
                continue
            y = height(value)
            told = escape(f"{name}, {label}: {value:.3g}")
            out.append(
                f'<rect x="{x + i * _BAR}" y="{y}" width="{_BAR - 1}" height="{bottom - y:.1f}" '
                f'fill="{COLOURS[i]}"><title>{told}</title></rect>'
            )
        centre = x + len(series) * _BAR // 2
        out.append(
            f'<text transform="translate({centre + 4} {bottom + 10}) rotate(-40)" {_FONT} '
            f'text-anchor="end">{escape(name)}</text>'
        )
    if line is not None:
        out.append(
            f'<path d="M{_LEFT} {height(line)}H{width - 10}" stroke="#000" stroke-dasharray="4 3"/>'
        )
    body = "\n".join(out)
    size = f'width="{width}" height="{bottom + 76}" viewBox="0 0 {width} {bottom + 76}"'
    white = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{white}\n{body}\n</svg>\n'


def _step(most: float) -> float:
    """A round distance of ticks: four to ten of them."""
    if most <= 0 or not math.isfinite(most):
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(f * power for f in (0.1, 0.2, 0.5, 1.0, 2.0) if most / (f * power) <= 8)
