"""Processes an agent started are left over and no agent looks after them. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import join

CODE = "orphans"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        by_root: dict[str, list[int]] = defaultdict(list)
        for process in audit.tagged:
            if not process.is_agent_alive:
                by_root[process.root].append(process.pid)
        for root, pids in by_root.items():
            holds = [g.index for g in host.gpus if any(p.pid in pids for p in g.processes)]
            is_this = root == evidence.roots.get(host.name)
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                root,
                f"{len(pids)} processes of ours have no agent",
                (
                    f"pids {', '.join(map(str, pids[:10]))}",
                    *([f"they hold GPU {', '.join(map(str, holds))}"] if holds else []),
                ),
                "dynctl up starts the agent, which adopts or ends them; dynctl down ends them all"
                if is_this
                else "they belong to another cluster or root: bring that one down, or end them",
                "dynctl up" if is_this else join(("kill", *map(str, pids[:10]))),
                verify=f"grep -lzs '^DYNCTL_INCARNATION=' {' '.join(f'/proc/{pid}/environ' for pid in pids[:10])}",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Processes of ours without an agent", _judge, (Need.AUDIT,))
