"""Hosts of one deployment have different files for the same model: KV blocks and answers would not match. Pure."""

from collections import Counter
from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, Severity
from dynctl.checks.shell import on_host, quote
from dynctl.core.audit import ModelFiles
from dynctl.core.hardware import Host
from dynctl.core.inventory import DeploymentWish

CODE = "model-differs"


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for wish in evidence.inventory.deployments:
        found = [
            (host, files)
            for host, audit in evidence.audited()
            for files in audit.models
            if files.path == wish.model and files.exists and evidence.may_run(host, wish)
        ]
        if len(found) < 2:
            continue
        counts = Counter(_content(files) for _, files in found)
        usual = counts.most_common(1)[0][0]
        one = next((host, files) for host, files in found if _content(files) == usual)
        for host, files in found:
            if _content(files) != usual:
                yield _finding(evidence, wish, (host, files), one)


def _content(files: ModelFiles) -> tuple[tuple[str, object], ...]:
    return (*sorted(files.sizes_bytes), *sorted(files.digests))


def _finding(
    evidence: Evidence,
    wish: DeploymentWish,
    odd: tuple[Host, ModelFiles],
    usual: tuple[Host, ModelFiles],
) -> Finding:
    a, b = dict(odd[1].sizes_bytes), dict(usual[1].sizes_bytes)
    names = sorted(name for name in a | b if a.get(name) != b.get(name))
    c, d = dict(odd[1].digests), dict(usual[1].digests)
    names += sorted(name for name in c | d if c.get(name) != d.get(name) and name not in names)
    path = f"{wish.model}/{names[0]}"
    line = f"cksum < {quote(path)} 2>&1"
    return Finding(
        CODE,
        Severity.RED,
        odd[0].name,
        wish.name,
        f"{wish.model} is not the same as on {usual[0].name}: {', '.join(names[:4])}",
        tuple(
            f"{n}: {a.get(n, 'missing')} bytes here, {b.get(n, 'missing')} there" for n in names[:6]
        ),
        "copy one revision to all hosts",
        verify=(
            f"a=$({on_host(evidence.entry(odd[0]), line)}); b=$({on_host(evidence.entry(usual[0]), line)}); "
            'echo "$a / $b"; [ "$a" != "$b" ]'
        ),
    )


CHECK = Check(CODE, "Model differs between hosts", _judge, (Need.PEERS, Need.AUDIT))
