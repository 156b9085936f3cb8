"""What the worker tells the app. Pure."""

from textual.message import Message

from dynctl.core.snapshot import Snapshot


class SnapshotTaken(Message):
    """A new snapshot; may replace an older one that was not looked at yet only in what is drawn, not in what counts."""

    def __init__(self, snapshot: Snapshot, now_s: float) -> None:
        self.snapshot = snapshot
        self.now_s = now_s
        super().__init__()
