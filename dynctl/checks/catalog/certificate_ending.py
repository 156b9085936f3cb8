"""A certificate of relay or router ends soon; routing between hosts stops with it. Pure."""

from collections.abc import Iterator

from dynctl.checks.evidence import Evidence, Need
from dynctl.checks.finding import Check, Finding, red_if
from dynctl.checks.shell import quote

CODE = "certificate-ending"


_SOON_DAYS, _NOW_DAYS = 60, 7


def _judge(evidence: Evidence) -> Iterator[Finding]:
    for host, audit in evidence.audited():
        for certificate in audit.certificates:
            days = (certificate.ends_unix_s - evidence.now_unix_s) / 86400
            if days > _SOON_DAYS:
                continue
            yield Finding(
                CODE,
                red_if(days < _NOW_DAYS),
                host.name,
                certificate.path,
                "has ended: the relay refuses every router"
                if days < 0
                else f"ends in {days:.0f} days",
                (certificate.subject,),
                "dynctl up replaces certificates this near to their end",
                "dynctl up",
                verify=f"openssl x509 -noout -enddate -in {quote(certificate.path)} && ! openssl x509 -noout -checkend {_SOON_DAYS * 86400} -in {quote(certificate.path)}",
                verify_on=host.name,
            )


CHECK = Check(CODE, "Certificate near its end", _judge, (Need.AUDIT,))
