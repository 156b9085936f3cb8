"""Engines of one deployment run under different Python versions. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from dynctl.checks.advisories import release
from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import on_host, program
from dynctl.core.hardware import Host
from dynctl.core.machine import EngineSoftware

CODE = "python-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    by_wish: dict[str, list[tuple[Host, EngineSoftware, tuple[int, ...]]]] = defaultdict(list)
    for host, wish, software in evidence.engines():
        if software.python_version:
            by_wish[wish.name].append((host, software, release(software.python_version)[:2]))
    for name, members in by_wish.items():
        counts = Counter(version for _, _, version in members)
        if len(counts) < 2:
            continue
        usual = counts.most_common(1)[0][0]
        one = next(member for member in members if member[2] == usual)
        for host, software, version in members:
            if version == usual:
                continue
            a = on_host(evidence.entry(host), f"{program(software.python)} -V")
            b = on_host(evidence.entry(one[0]), f"{program(one[1].python)} -V")
            yield Finding(
                CODE,
                Severity.WARNING,
                host.name,
                name,
                f"the engine runs under Python {software.python_version}, elsewhere under {one[1].python_version}",
                tuple(f"{h.name}: {s.python_version}" for h, s, _ in members),
                "make the engines' environments alike: hashes and pickled configuration may differ between versions",
                verify=f'a=$({a}); b=$({b}); echo "$a / $b"; [ "$a" != "$b" ]',
            )


CHECK = Check(CODE, "Python differs between engines", _judge, (Need.PEERS,))
