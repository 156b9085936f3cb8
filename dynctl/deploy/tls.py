"""The cluster's certificate authority and the certificates it signs, for the relays' mutual TLS.

The CA's key stays on the operator's machine, 0600. Losing it is harmless: the next `up` makes a new one and replaces
every certificate. IO: files.
"""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dynctl.files import write_atomic

CA_DAYS = 3650
LEAF_DAYS = 825
RENEW_DAYS = 60
"""A certificate this close to its end is replaced by the next `up`."""

CLOCK_SKEW = dt.timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, both PEM."""

    cert: bytes
    key: bytes


def ensure_authority(directory: Path) -> KeyPair:
    """Return the cluster CA kept in a directory, making it at the first use."""
    cert_path, key_path = directory / "ca.crt", directory / "ca.key"
    if cert_path.exists() and key_path.exists():
        return KeyPair(cert_path.read_bytes(), key_path.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dynctl cluster CA")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    builder = _builder(name, name, key, CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    pair = KeyPair(_pem(builder.sign(key, hashes.SHA256())), _pem_key(key))
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(key_path, pair.key)
    write_atomic(cert_path, pair.cert, mode=0o644)
    return pair


def ensure_leaf(
    directory: Path, authority: KeyPair, common_name: str, host_name: str, address: str | None
) -> KeyPair:
    """Return the certificate for one party, making it when missing, near its end or signed by another CA.

    `common_name` tells the party's right (`relay:HOST` or `router:HOST`); `host_name` and `address` go into its
    subject alternative names.
    """
    stem = common_name.replace(":", "-")
    cert_path, key_path = directory / f"{stem}.crt", directory / f"{stem}.key"
    ca = x509.load_pem_x509_certificate(authority.cert)
    if (
        cert_path.exists()
        and key_path.exists()
        and _is_current(cert_path.read_bytes(), ca, address)
    ):
        return KeyPair(cert_path.read_bytes(), key_path.read_bytes())
    ca_key = serialization.load_pem_private_key(authority.key, password=None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
    builder = _builder(name, ca.subject, key, LEAF_DAYS)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=False, path_length=None), critical=True
    )
    usage = (
        [ExtendedKeyUsageOID.SERVER_AUTH]
        if common_name.startswith("relay:")
        else [ExtendedKeyUsageOID.CLIENT_AUTH]
    )
    builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    builder = builder.add_extension(
        x509.SubjectAlternativeName(_names(host_name, address)), critical=False
    )
    builder = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
    )
    pair = KeyPair(_pem(builder.sign(ca_key, hashes.SHA256())), _pem_key(key))
    write_atomic(key_path, pair.key)
    write_atomic(cert_path, pair.cert, mode=0o644)
    return pair


def _is_current(cert: bytes, ca: x509.Certificate, address: str | None) -> bool:
    try:
        leaf = x509.load_pem_x509_certificate(cert)
        leaf.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        # Damaged, of another issuer, of another kind of key, or not signed by this one.
        return False
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    left = leaf.not_valid_after_utc - dt.datetime.now(dt.UTC)
    return left.days > RENEW_DAYS and all(wanted in list(names) for wanted in _names(None, address))


def _names(host_name: str | None, address: str | None) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.DNSName(host_name)] if host_name else []
    if address:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(address)))
        except ValueError:
            names.append(x509.DNSName(address))
    return names


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


def _pem_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
