"""Certificates below our root on a host: whose, and when they end. Pure."""

import re

from cryptography import x509

from dynctl.core.audit import Certificate
from dynctl.core.command import Completed
from dynctl.core.text import clean
from dynctl.discovery.probe import Probe, fail, text_of

_SCRIPT = r"""
[ -n "$DYNCTL_ROOT" ] || exit 0
for file in "$DYNCTL_ROOT"/tls/*.crt; do
  [ -r "$file" ] && { printf '== %s\n' "$file"; head -c 16384 "$file"; echo; }
done
exit 0
"""


def parse(done: Completed) -> tuple[Certificate, ...]:
    """Read the certificates in the order of their paths.

    Raises:
        ProbeError: when a file is no certificate.
    """
    found = []
    pieces = re.split(r"^== (/.{1,1024})$", text_of(done), flags=re.MULTILINE)
    if pieces[0].strip():
        raise fail("certificates", 1, pieces[0], "no path")
    line = 1
    for path, pem in zip(pieces[1::2], pieces[2::2], strict=True):
        try:
            certificate = x509.load_pem_x509_certificate(pem.strip().encode())
            subject = certificate.subject.rfc4514_string()
            ends = certificate.not_valid_after_utc.timestamp()
        except ValueError as error:
            raise fail(
                "certificates", line, path, f"no certificate ({clean(str(error), 60)})"
            ) from None
        found.append(Certificate(path, clean(subject, 200), ends))
        line += pem.count("\n") + 1
    return tuple(found)


PROBE = Probe(_SCRIPT, parse)
