"""Something that is so only once it has lasted, and over only once that has lasted. Pure."""

from dataclasses import dataclass


@dataclass(slots=True)
class Lasting:
    """One such thing; times are monotonic."""

    begins_s: float
    """It has to be so for this long, …"""
    ends_s: float
    """… and otherwise for this long."""
    is_on: bool = False
    lasted_s: float = 0.0
    """How long the last one that ended was so."""
    _since_s: float = 0.0
    """Since when it is so."""
    _turns_since_s: float | None = None
    """Since when it looks otherwise than `is_on` says; None: it does not."""

    def turns(self, looks_on: bool, now_s: float) -> bool:
        """Take in how it looks now; tells whether it just began or ended."""
        if looks_on == self.is_on:
            self._turns_since_s = None
            return False
        if self._turns_since_s is None:
            self._turns_since_s = now_s
        if now_s - self._turns_since_s < (self.begins_s if looks_on else self.ends_s):
            return False
        if looks_on:
            self._since_s = self._turns_since_s
        else:
            # What it took to be sure that it is over is no part of it.
            self.lasted_s = self._turns_since_s - self._since_s
        self.is_on, self._turns_since_s = looks_on, None
        return True
