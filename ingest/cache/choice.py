"""Whether keeping what functions make is worth it: `choose`. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN = 0.1
"""The gain must be this share of what the functions cost, or it may be chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCosts:
    """What was measured, in seconds a row."""

    made_s: float
    """The functions' work."""
    read_s: float
    """Reading an entry in its place."""
    written_s: float
    """Writing an entry."""
    passes: float
    """Passes over the rows that are still to come."""

    @property
    def gain_s(self) -> float:
        """The seconds a row that entries save in all passes to come, less those to write them."""
        return self.passes * (self.made_s - self.read_s) - self.written_s

    @property
    def is_worth_it(self) -> bool:
        return self.gain_s > _MARGIN * self.made_s

    def describe(self, names: str) -> str:
        """Returns the choice as a sentence."""
        made, read, written = (
            f"{1e6 * s:,.3g} µs" for s in (self.made_s, self.read_s, self.written_s)
        )
        what = "is kept in the cache" if self.is_worth_it else "is not kept in the cache"
        return (
            f"what {names} makes {what}: a row costs {made} to make, {read} to read back and {written} to write, for "
            f"{self.passes:g} more passes"
        )
