"""The pages that tools/docs writes: the reference of the API, and the guides."""

import html
import os
import re
import runpy

import pytest

from harness import ROOT

pytest.importorskip("pdoc", reason="tools/docs installs it")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Returns the folder of the pages."""
    folder = tmp_path_factory.mktemp("docs")
    runpy.run_path(str(ROOT / "tools/_docs.py"), run_name="docs")["main"](folder)
    return folder


def test_the_reference_begins_with_new_comm_and_torchcomm_and_links_the_guides(pages):
    text = (pages / "torchcomms_pg.html").read_text()
    members = re.findall(r'<section id="([\w.]+)">', text)
    assert members[:2] == ["new_comm", "TorchComm"]
    assert "pybind11" not in text and "Overloaded function" not in text
    guides = {f"guides/{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    assert set(re.findall(r'href="(guides/[\w.]+)"', text)) == guides


def test_each_link_of_a_guide_leads_to_a_page_and_a_heading(pages):
    for page in (pages / "guides").glob("*.html"):
        for link in re.findall(r'(?:href|src)="?([^" >]+)', page.read_text()):
            path, _, anchor = link.partition("#")
            target = pages / "guides" / path if path else page
            assert "://" in link or target.is_file(), f"{page.name}: {link}"
            if "://" not in link and anchor:
                assert f'id="{anchor}"' in target.read_text(), f"{page.name}: {link}"


def test_a_guide_shows_names_as_they_are(pages):
    text = (pages / "guides/variables.html").read_text()
    assert "torchcomms_pg in XDG_RUNTIME_DIR" in html.unescape(text)
    assert "<em>" not in text


def test_a_guide_follows_the_browsers_colours_and_scrolls_wide_tables_within(pages):
    text = (pages / "guides/support.html").read_text()
    assert "color-scheme: light dark" in text
    assert "table { display: block; overflow-x: auto" in text
    assert not re.search(r"#(fff|f4f4f4)", text), "a colour that does not fit a dark page"


def test_every_picture_of_the_documents_is_beside_the_guides(pages):
    pictures = {entry.name for entry in (ROOT / "docs").iterdir() if entry.suffix != ".md"}
    assert pictures <= set(os.listdir(pages / "guides"))
