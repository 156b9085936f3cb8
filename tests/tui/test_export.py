"""A screen as text, as a picture, and its row; where files go."""

import resource
import stat
from xml.etree import ElementTree as ET

import pytest

from dynctl.tui import export
from dynctl.tui.draw import plain
from dynctl.tui.frame import compose
from dynctl.tui.saving import MOST_TRIES, save
from dynctl.tui.view import Choices, Place

SIZES = [(80, 24), (200, 60)]


@pytest.mark.parametrize("size", SIZES)
def test_text_is_what_is_on_the_screen(make_view, size):
    lines = compose(make_view(), *size)
    found = export.text(lines)

    assert found.splitlines() == [plain(line).rstrip() for line in lines]
    assert "chat-prefill-0" in found
    assert found.endswith("q quit\n")


@pytest.mark.parametrize("size", SIZES)
def test_a_picture_is_svg_with_every_word_and_loads_nothing(make_view, size):
    lines = compose(make_view(), *size)
    found = export.svg(lines, size[0], "a <title>")
    root = ET.fromstring(found)
    said = "".join(root.itertext()).replace("\xa0", " ")

    assert root.tag.endswith("svg")
    for expected in ("dynctl top", "chat-prefill-0", "q quit", "a <title>"):
        assert expected in said
    assert "url(http" not in found
    assert "@font-face" not in found


def test_hostile_names_stay_text_in_a_picture(make_view):
    view = make_view(choices=Choices(place=Place(filter="</text><script>&")))
    found = export.svg(compose(view, 120, 24), 120, "t")

    assert "<script>" not in found
    assert ET.fromstring(found) is not None


def test_the_row_is_the_one_under_the_cursor(make_view):
    lines = compose(make_view(choices=Choices(place=Place(cursor=1))), 100, 24)

    assert export.row(lines).startswith("chat-decode-0 ")
    assert export.row(compose(make_view(choices=Choices(screen="kv")), 80, 24)) == ""


def test_files_are_new_and_the_owners_alone(tmp_path):
    first, second = (save(tmp_path, "top", ".txt", f"{n}\n") for n in (1, 2))

    assert (first.name, second.name) == ("top.txt", "top-2.txt")
    assert (first.read_text(), second.read_text()) == ("1\n", "2\n")
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_a_link_is_not_followed_and_a_full_row_of_names_is_an_error(tmp_path):
    (tmp_path / "top.txt").symlink_to(tmp_path / "elsewhere")
    assert save(tmp_path, "top", ".txt", "x").name == "top-2.txt"
    assert not (tmp_path / "elsewhere").exists()

    for number in range(3, MOST_TRIES + 1):
        (tmp_path / f"top-{number}.txt").touch()
    with pytest.raises(OSError, match="100 times"):
        save(tmp_path, "top", ".txt", "x")


def test_what_a_full_disk_cuts_off_is_not_left(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path, "top", ".txt", "a longer screen")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list(tmp_path.iterdir()) == []
