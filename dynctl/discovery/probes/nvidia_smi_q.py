"""`nvidia-smi -q` as text, for captures: the live probe asks for the XML form of the same facts.

Indentation tells what belongs to what. Output that ends in the middle still gives what was there.
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.bounds import MAX_GPUS
from dynctl.discovery.facts import QueryFacts
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, fail, text_of
from dynctl.discovery.query import Record, facts_of

_GPU = re.compile(r"\s*GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s*\Z")
_PAIR = re.compile(r"(\s*)(\S.{0,80}?)\s*:(?:\s+(.{0,400}))?\Z")
_TITLE = re.compile(r"(\s*)(\S[^:]{0,80})\Z")


def parse(done: Completed) -> QueryFacts:
    """Read the records; a last one that is cut is kept and marked.

    Raises:
        ProbeError: when the tool failed, or nothing in its output is of this form.
    """
    text = text_of(done)
    head: list[tuple[str, str]] = []
    records: list[Record] = []
    stack: list[tuple[int, str]] = []
    for line in text.split("\n"):
        if gpu := _GPU.match(line[:60]):
            if len(records) < MAX_GPUS:
                records.append(Record(gpu[1]))
            stack = []
            continue
        match = _PAIR.match(line[:600]) or _TITLE.match(line[:600])
        if match is None:
            continue
        depth, name = len(match[1].expandtabs(8)), _name(match[2])
        while stack and stack[-1][0] >= depth:
            stack.pop()
        value = match[3] if match.re is _PAIR else None
        if value is not None:
            path = "/".join([*(level for _, level in stack), name])
            (records[-1].pairs if records else head).append((path, value.strip()))
        if len(stack) < 8:
            stack.append((depth, name))
        if records and name == "processes":
            records[-1].is_complete = True
    if not records and not any(path == "attached_gpus" for path, _ in head):
        if done.exit_status == ABSENT_STATUS:
            return QueryFacts(None, ())
        check_smi(done)
        raise fail("nvidia-smi -q", 1, text[:200], "neither a GPU nor a count of them")
    return facts_of(head, records)


def _name(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


PROBE = Probe(
    "",
    parse,
    marks=re.compile(r"(?m)^=+NVSMI LOG=+|^Attached GPUs\s*:|^\s{4}Product Name\s+:"),
)
