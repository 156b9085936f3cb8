"""The mirror comes from the machine's own apt sources, in both of their forms."""

import pytest
from hostlab import rootfs
from hostlab.rootfs import AptSource

pytestmark = pytest.mark.lab

DEB822 = """Types: deb deb-src
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/archive.gpg"""


@pytest.mark.parametrize(
    ("stanza", "found"),
    [
        (
            DEB822,
            AptSource(
                "http://mirror.example/debian", "bookworm", "/usr/share/keyrings/archive.gpg"
            ),
        ),
        (DEB822.replace("bookworm bookworm-updates", "bookworm-security"), None),
        (DEB822.replace("deb deb-src", "deb-src"), None),
        (DEB822.replace("main contrib", "contrib"), None),
        ("", None),
    ],
)
def test_a_stanza_counts_when_it_carries_the_main_suite(
    stanza: str, found: AptSource | None
) -> None:
    assert rootfs._deb822_source(stanza, "bookworm") == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            "deb http://mirror.example/debian bookworm main",
            AptSource("http://mirror.example/debian", "bookworm", None),
        ),
        (
            "deb [arch=amd64 signed-by=/k.gpg] http://m.example/d bookworm main contrib",
            AptSource("http://m.example/d", "bookworm", "/k.gpg"),
        ),
        (
            "deb [ signed-by=/k.gpg ] http://m.example/d bookworm main",
            AptSource("http://m.example/d", "bookworm", "/k.gpg"),
        ),
        ("deb http://mirror.example/debian bookworm-updates main", None),
        ("deb-src http://mirror.example/debian bookworm main", None),
        ("# deb http://mirror.example/debian bookworm main", None),
        ("", None),
    ],
)
def test_a_line_counts_when_it_carries_the_main_suite(line: str, found: AptSource | None) -> None:
    assert rootfs._one_line_source(line, "bookworm") == found


def test_the_cache_key_changes_with_the_package_list(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rootfs.rootfs_path()
    monkeypatch.setattr(rootfs, "ROOTFS_PACKAGES", (*rootfs.ROOTFS_PACKAGES, "nano"))
    assert rootfs.rootfs_path() != before
