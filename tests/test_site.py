"""The documentation site: it builds with warnings as errors, needs no network, and its links lead somewhere.

Needs ``pip install -e ".[test]" --group docs``. Run ``python -m pytest -m ci tests/test_site.py``.
"""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


class References(HTMLParser):
    """What a page loads by itself: scripts, styles, pictures, fonts."""

    def __init__(self):
        super().__init__()
        self.loaded, self.links, self.ids = [], [], set()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(attributes.get("src"))
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(attributes.get("href"))
        if tag == "a":
            self.links.append(attributes.get("href"))


def read(page):
    references = References()
    references.feed(page.read_text())
    return references


def test_no_page_loads_anything_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for target in filter(None, read(page).loaded):
            assert not re.match(r"(https?:)?//", target), (page, target)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


def test_every_fence_became_a_block_of_code(site):
    """One that is not closed turns the rest of its page inside out, and stands in it as it was written."""
    for page in site.rglob("*.html"):
        assert "```" not in page.read_text(), page


def test_every_figure_says_what_it_shows(site):
    for page in site.rglob("*.html"):
        for picture in re.findall(r"<img\b[^>]*>", page.read_text()):
            told = re.search(r'alt="([^"]*)"', picture)
            assert told, (page, picture)
            assert len(told[1]) > 25, (page, picture)


def test_every_link_leads_to_a_page_and_to_a_place_in_it(site):
    """Also those that were made of names in backticks, and those in the notebooks."""
    pages = {page: read(page) for page in site.rglob("*.html") if page.name != "404.html"}
    for page, references in pages.items():
        for link in filter(None, references.links):
            if re.match(r"https?:|mailto:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), (page, link)
            if anchor and target in pages:
                assert anchor in pages[target].ids, (page, link)


def test_names_in_backticks_lead_to_the_reference(site):
    text = (site / "guide" / "step" / "index.html").read_text()
    assert re.search(r'href="../../api/gradients/#jax_lossscale.value_and_scaled_grad"[^>]*><code>jls\.value', text)
    text = (site / "api" / "optimizer" / "index.html").read_text()
    assert re.search(r'href="../loss_scales/#jax_lossscale.NoOpLossScale"[^>]*><code>NoOpLossScale</code>', text)
