"""An event loop whose clock stands still while anything is done, and jumps to the next timer once nothing is.

So minutes of waiting take seconds, and a busy machine makes nobody late. Everything must happen on the loop and on its
sockets: for a thread or another process it would not wait.
"""

import asyncio
import selectors

_SETTLE_S = 0.001
"""What a socket of this machine was sent may still be on its way."""


class _Waiting(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout=None):
        if timeout is None:
            return super().select()
        found = super().select(0)
        if not found and timeout > 0:
            found = super().select(_SETTLE_S)
            if not found:
                self.now_s += timeout
        return found


class JumpingLoop(asyncio.SelectorEventLoop):
    """For `asyncio.Runner(loop_factory=JumpingLoop)`."""

    def __init__(self):
        self._clock = _Waiting()
        super().__init__(self._clock)

    def time(self):
        """Seconds of its own clock."""
        return self._clock.now_s

    def pass_by(self, seconds):
        """Let time pass all at once."""
        self._clock.now_s += seconds
