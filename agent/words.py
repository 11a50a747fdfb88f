"""Numbers as a person reads them."""

from __future__ import annotations


def count(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.{1 if 0 < value < 0.0995 else 0}f} %"


def seconds(value: float) -> str:
    if value < 60:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
