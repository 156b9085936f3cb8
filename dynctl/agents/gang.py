"""An engine over several hosts: what its members tell each other, and what follows for each of them.

Rank 0 starts when all others wait for it, and names the incarnation; the others start with that name or not at all. Whoever
finds that another member is no longer part of its incarnation ends, and waits for the next. Only what a member said counts:
one that is silent may do well, and an engine that hangs for want of it is noticed by its canary.
Not here: how members hear of each other (`links`), processes (`unit`).
Pure.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from dynctl.agents.causes import Cause
from dynctl.agents.protocol import Gang, MemberInfo, Peer
from dynctl.core.deployment import EngineState
from dynctl.core.text import clean


@dataclass(frozen=True, slots=True)
class Word:
    """What was last heard of another member."""

    info: MemberInfo | None = None
    """None: its host named none of that id."""
    silence: str = "not asked yet"
    """Why nothing is heard now; empty: it is."""


Hear = Callable[[Peer], Word]

_RANKS = "0123456789abcdefghijklmnopqrstuvwxyz"
"""One character each: paths of sockets have room for no more."""
_NAMED = re.compile(r"[0-9a-z]{1,8}")
"""What rank 0 may name an incarnation: it becomes the name of a directory here, which is removed at the end."""


def start_of(incarnation: str) -> str:
    """The incarnation of all that a member's own is part of: that with its rank, since processes of one machine are told apart by it."""
    return incarnation.partition(".")[0]


def lacking(gang: Gang, hear: Hear) -> str:
    """Say which members rank 0 has to wait for before it may start, and why; empty: it may."""
    found = [
        f"{peer.id} on {peer.host_name}: {why}"
        for peer in gang.peers
        if (why := _why_not_free(gang, hear(peer)))
    ]
    return f"waits for {'; '.join(found)}" if found else ""


def _why_not_free(gang: Gang, word: Word) -> str:
    info = word.info
    if word.silence:
        return f"its host does not answer: {clean(word.silence, 200)}"
    if info is None:
        return "its host has not been told of it"
    if info.digest != gang.digest:
        return "its host has another plan"
    if info.is_waiting:
        return ""
    error = clean(info.error, 300)
    return f"{info.state.value}: {error}" if error else f"{info.state.value} still"


def to_join(gang: Gang, hear: Hear, last: str) -> str:
    """Return the incarnation a member is to be part of; empty: none yet. It was part of `last` before."""
    word = hear(gang.peers[0])
    info = word.info
    if word.silence or info is None or info.digest != gang.digest:
        return ""
    is_new = _NAMED.fullmatch(info.incarnation) is not None and info.incarnation != start_of(last)
    is_begun = info.state is EngineState.STARTING and is_new
    return f"{info.incarnation}.{_RANKS[gang.rank]}" if is_begun else ""


def why_waiting(gang: Gang, hear: Hear) -> str:
    """Say what a member that runs nothing waits for."""
    peer = gang.peers[0]
    word = hear(peer)
    if word.silence:
        return f"waits for {peer.id} on {peer.host_name}, which does not answer: {clean(word.silence, 200)}"
    if word.info is None or word.info.digest != gang.digest:
        return f"waits for {peer.id} on {peer.host_name}, whose host has another plan"
    return f"waits for {peer.id} on {peer.host_name} to start anew; it is {word.info.state.value}"


def broken(gang: Gang, hear: Hear, incarnation: str) -> Cause | None:
    """Say why an incarnation cannot go on; None: as far as is known it can.

    Rank 0 names incarnations: when it is another's, this one is over. Others are missed once they had joined, or never will.
    """
    for peer in gang.peers:
        info = hear(peer).info
        if info is None or start_of(info.incarnation) == start_of(incarnation):
            continue
        is_lost = start_of(info.last_incarnation) == incarnation or info.state is EngineState.FAILED
        if gang.rank or is_lost:
            return _ended(peer, info)
    return None


def _ended(peer: Peer, info: MemberInfo) -> Cause:
    error = clean(info.error, 300)
    text = f"{peer.id} on {peer.host_name} ended" + (f": {error}" if error else "")
    return Cause("gang", text)


def absent(gang: Gang, hear: Hear, incarnation: str) -> str:
    """Name the members that have not joined an incarnation of rank 0; empty: all have."""
    found = [
        f"{peer.id} on {peer.host_name}"
        for peer in gang.peers
        if (info := hear(peer).info) is None or start_of(info.incarnation) != incarnation
    ]
    return f"{', '.join(found)} not started yet" if found else ""


def is_led(gang: Gang, hear: Hear, incarnation: str) -> bool:
    """Tell whether rank 0 is heard to have produced a token as this incarnation."""
    word = hear(gang.peers[0])
    info = word.info
    is_same = info is not None and info.incarnation == start_of(incarnation)
    return not word.silence and is_same and info is not None and info.state is EngineState.READY


def is_left(gang: Gang, hear: Hear, incarnation: str) -> bool:
    """Tell whether rank 0 is heard to have no use any more for a member of this incarnation."""
    word = hear(gang.peers[0])
    is_same = word.info is not None and word.info.incarnation == start_of(incarnation)
    return not word.silence and not is_same
