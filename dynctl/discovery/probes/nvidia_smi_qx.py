"""`nvidia-smi -q -x`: everything the driver tells of each GPU, as XML.

Read by its tags alone, never by an XML parser: nothing is expanded or fetched, and output that ends in the middle still
gives what was there. Source: schemas nvsmi_device_v11 to v13.
Pure.
"""

import re

from dynctl.core.command import Completed
from dynctl.discovery.bounds import MAX_GPUS
from dynctl.discovery.facts import QueryFacts
from dynctl.discovery.probe import ABSENT_STATUS, Probe, check_smi, fail, text_of
from dynctl.discovery.query import Record, facts_of

_SCRIPT = "exec nvidia-smi -q -x"
_TOKEN = re.compile(r"<(/?)([A-Za-z_][\w.-]{0,60})([^<>]{0,400})>|([^<>]+)")
_ID = re.compile(r"""id\s*=\s*["']([0-9A-Fa-f:.]{4,20})["']""")
_REFERENCES = (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&"))
_MAX_DEPTH = 12


def parse(done: Completed) -> QueryFacts:
    """Read the records; a last one that is cut is kept and marked.

    Raises:
        ProbeError: when the tool failed, or there is no such document in its output.
    """
    text = text_of(done)
    at = text.find("<nvidia_smi_log")
    if at < 0:
        if done.exit_status == ABSENT_STATUS:
            return QueryFacts(None, ())
        check_smi(done)
        raise fail("nvidia-smi -q -x", 1, text[:200], "no nvidia_smi_log element")
    head: list[tuple[str, str]] = []
    records: list[Record] = []
    stack: list[str] = []
    open_record: Record | None = None
    for match in _TOKEN.finditer(text, at):
        closes, name, attributes, content = match.groups()
        if content is not None:
            where = "/".join(stack[1:] if stack[:1] == ["gpu"] else stack)
            if where and content.strip():
                pairs = open_record.pairs if open_record else head
                pairs.append((where.lower(), _plain(content.strip())))
        elif closes:
            if name in stack:
                del stack[len(stack) - 1 - stack[::-1].index(name) :]
            if name == "gpu" and open_record is not None:
                open_record.is_complete, open_record, stack = True, None, []
        elif not attributes.rstrip().endswith("/"):
            if name == "gpu" and (bus := _ID.search(attributes)) and len(records) < MAX_GPUS:
                open_record, stack = Record(bus[1]), ["gpu"]
                records.append(open_record)
            elif name != "nvidia_smi_log" and len(stack) < _MAX_DEPTH:
                stack.append(name)
    return facts_of(head, records)


def _plain(text: str) -> str:
    for reference, character in _REFERENCES:
        text = text.replace(reference, character)
    return text[:400]


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-smi",
    marks=re.compile(r"<nvidia_smi_log\b|<!DOCTYPE nvidia_smi_log"),
)
