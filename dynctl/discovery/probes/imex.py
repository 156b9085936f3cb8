"""The IMEX domain this host is in, by `nvidia-imex-ctl -N`: hosts that may map each other's GPU memory over NVLink. Pure."""

import re

from dynctl.core.command import Completed
from dynctl.core.machine import ImexNode
from dynctl.discovery.facts import ImexFacts
from dynctl.discovery.probe import ABSENT_STATUS, Probe, ToolError, text_of

_SCRIPT = "nvidia-imex-ctl -N"
_NODE = re.compile(
    r"\s*Node #(\d{1,4})\s+-\s+(\S{1,64})\s+-\s+(\S[^-]{0,40}?)\s*(?:-\s*Version:\s*([\w.]{1,20}))?\s*\Z"
)
_DOMAIN = re.compile(r"(?m)^\s*Domain State:\s*([A-Z_]{2,20})")


def parse(done: Completed) -> ImexFacts:
    """Read the nodes and the state of the whole.

    Raises:
        ToolError: when the daemon does not answer.
    """
    if done.exit_status == ABSENT_STATUS:
        return ImexFacts()
    text = text_of(done)
    nodes = [match for line in text.split("\n") if (match := _NODE.match(line[:200]))]
    state = _DOMAIN.search(text)
    if not nodes and state is None:
        said = done.stderr.decode("utf-8", "replace").strip() or text.strip()
        why = said.split("\n")[-1][:160] or f"ended with status {done.exit_status}"
        raise ToolError(f"nvidia-imex-ctl: {why}", "imex", "systemctl status nvidia-imex")
    return ImexFacts(
        state[1] if state else None,
        tuple(ImexNode(match[2], match[3].strip(), match[4]) for match in nodes[:1024]),
    )


PROBE = Probe(
    _SCRIPT,
    parse,
    needs="command -v nvidia-imex-ctl",
    marks=re.compile(r"(?m)^\s*Node #\d{1,4}\s+-\s+\S+\s+-\s|^Domain State: [A-Z]"),
)
