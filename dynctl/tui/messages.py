"""What the worker tells the app. Pure."""

from textual.message import Message

from dynctl.core.snapshot import Snapshot
from dynctl.telemetry.answers import Answers, Asks
from dynctl.telemetry.look import Look


class SnapshotTaken(Message):
    """A new snapshot; may replace an older one that was not looked at yet only in what is drawn, not in what counts."""

    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self.snapshot = snapshot
        self.now_s = now_s
        super().__init__()


class Answered(Message):
    """What the shown screen had asked."""

    def __init__(self, asks: Asks, answers: Answers) -> None:
        self.asks = asks
        self.answers = answers
        super().__init__()


class Reached(Message):
    """Another place in a recording."""

    def __init__(self, look: Look) -> None:
        self.look = look
        super().__init__()
