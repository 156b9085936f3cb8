import ssl

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from dynctl.deploy.tls import ensure_authority, ensure_leaf


def test_certificates_are_kept_until_the_authority_or_address_changes(tmp_path):
    authority = ensure_authority(tmp_path / "tls")
    first = ensure_leaf(tmp_path / "tls", authority, "relay:a", "a", "10.0.0.1")

    assert ensure_authority(tmp_path / "tls") == authority
    assert ensure_leaf(tmp_path / "tls", authority, "relay:a", "a", "10.0.0.1") == first
    assert ensure_leaf(tmp_path / "tls", authority, "relay:a", "a", "10.0.0.9") != first

    other = ensure_authority(tmp_path / "other")
    assert ensure_leaf(tmp_path / "tls", other, "relay:a", "a", "10.0.0.9").cert != first.cert


def test_a_damaged_certificate_is_made_anew(tmp_path):
    authority = ensure_authority(tmp_path)
    ensure_leaf(tmp_path, authority, "relay:a", "a", None)
    (tmp_path / "relay-a.crt").write_bytes(b"-----BEGIN CERTIFICATE-----\n")

    renewed = ensure_leaf(tmp_path, authority, "relay:a", "a", None)

    assert x509.load_pem_x509_certificate(renewed.cert)


def test_private_keys_are_readable_by_the_owner_only(tmp_path):
    authority = ensure_authority(tmp_path / "tls")
    ensure_leaf(tmp_path / "tls", authority, "router:a", "a", None)

    modes = {
        p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "tls").iterdir() if p.suffix == ".key"
    }
    assert set(modes.values()) == {0o600}


def test_a_router_certificate_cannot_serve_and_a_relay_certificate_names_its_host(tmp_path):
    authority = ensure_authority(tmp_path)
    relay = x509.load_pem_x509_certificate(
        ensure_leaf(tmp_path, authority, "relay:a", "a", "10.0.0.1").cert
    )
    router = x509.load_pem_x509_certificate(
        ensure_leaf(tmp_path, authority, "router:a", "a", None).cert
    )

    names = relay.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["a"]
    usage = router.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_openssl_accepts_the_chain(tmp_path):
    authority = ensure_authority(tmp_path)
    ensure_leaf(tmp_path, authority, "relay:a", "a", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    context.load_cert_chain(tmp_path / "relay-a.crt", tmp_path / "relay-a.key")
    context.load_verify_locations(tmp_path / "ca.crt")

    assert len(context.get_ca_certs()) == 1
