import base64
import hashlib
import hmac
import threading

import pytest

from dynctl.remote.known_hosts import HostKey, KnownHosts, lookup_name

KEY = HostKey("ssh-ed25519", b"one")
OTHER = HostKey("ssh-ed25519", b"two")


def hashed(name: str) -> str:
    salt = b"0123456789abcdef0123"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.fixture
def known(tmp_path):
    return KnownHosts(tmp_path / "known_hosts", others=(tmp_path / "global",))


@pytest.mark.parametrize(
    ("patterns", "host", "port", "is_found"),
    [
        ("gpu-01", "gpu-01", 22, True),
        ("gpu-01", "GPU-01", 22, True),
        ("gpu-01", "gpu-01", 2222, False),
        ("[gpu-01]:2222", "gpu-01", 2222, True),
        ("[gpu-01]:2222", "gpu-01", 22, False),
        ("a,gpu-01,b", "gpu-01", 22, True),
        ("gpu-*", "gpu-01", 22, True),
        ("gpu-0?", "gpu-01", 22, True),
        ("*,!gpu-01", "gpu-01", 22, False),
        ("*,!gpu-01", "gpu-02", 22, True),
        ("[*]:2222", "gpu-01", 2222, True),
        (hashed("gpu-01"), "gpu-01", 22, True),
        (hashed("gpu-01"), "gpu-02", 22, False),
        (hashed("[gpu-01]:2222"), "gpu-01", 2222, True),
        ("|1|broken", "gpu-01", 22, False),
    ],
)
def test_names_match_as_openssh_matches_them(known, patterns, host, port, is_found):
    known.path.write_text(f"# comment\n\n{patterns} {KEY.line} someone@somewhere\n")

    found = known.lookup(host, port)

    assert [(k.line_number, k.key) for k in found] == ([(3, KEY)] if is_found else [])


def test_markers_both_files_and_broken_lines(known, tmp_path):
    known.path.write_text(
        f"@cert-authority *.net {KEY.line}\nh.net ssh-ed25519 !!!\nshort\n@revoked h.net {OTHER.line}\n"
    )
    (tmp_path / "global").write_text(f"h.net {KEY.line}\n")

    found = known.lookup("h.net", 22)

    assert [(k.marker, k.key, k.path.name) for k in found] == [
        ("@cert-authority", KEY, "known_hosts"),
        ("@revoked", OTHER, "known_hosts"),
        ("", KEY, "global"),
    ]


def test_a_missing_file_knows_nobody(known):
    assert known.lookup("a", 22) == ()


def test_new_keys_are_added_once_on_their_own_lines(known):
    known.path.write_text("last line without an end")
    known.add([("a", 22, KEY), ("a", 22, KEY), ("b", 2222, OTHER)])
    known.add([("a", 22, KEY)])

    assert known.path.read_text() == (
        f"last line without an end\na {KEY.line}\n[b]:2222 {OTHER.line}\n"
    )
    assert known.lookup("b", 2222)[0].key == OTHER


def test_a_new_file_is_private_and_runs_at_once_lose_nothing(known, tmp_path):
    many = KnownHosts(tmp_path / "new" / "known_hosts")
    threads = [threading.Thread(target=many.add, args=([(f"h{i}", 22, KEY)],)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(set(many.path.read_text().splitlines())) == 20
    assert many.path.stat().st_mode & 0o777 == 0o600


def test_fingerprints_look_as_ssh_keygen_prints_them():
    """Checked against `ssh-keygen -lf` for this public key (OpenSSH 9.2)."""
    blob = base64.b64decode("AAAAC3NzaC1lZDI1NTE5AAAAIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4f")

    assert (
        HostKey("ssh-ed25519", blob).fingerprint
        == "SHA256:ZkAslGjFiUHdGf/WUL8rQvkib4PTvQatUV0OUQSncCA"
    )
    assert lookup_name("h", 22) == "h"
