"""The documentation site: it builds with warnings as errors, needs no network, and its search finds what is asked.

Needs the extra ``docs``: ``pip install -e ".[docs]"``, then ``python -m pytest -m ci tests/test_site.py``.
"""

import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from questions import IN_OTHER_WORDS, QUESTIONS

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")
pytest.importorskip("lunr")

ROOT = Path(__file__).parent.parent
FIRST_RESULTS = 3  # what is seen without scrolling


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


# The search.


@pytest.fixture(scope="module")
def search(site):
    """What mkdocs-material's worker does in the browser, with lunr in Python.

    Words are split as the index says, there is no stemming, each word that is typed may be the beginning of one, long
    texts are at no disadvantage, titles count a thousand times, and whole pages and complete matches count more.
    """
    from lunr.builder import Builder
    from lunr.pipeline import Pipeline
    from lunr.stop_word_filter import stop_word_filter
    from lunr.token import Token

    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])

    def words(text):
        return [word.lower() for word in separator.split(html.unescape(re.sub(r"<[^>]+>", " ", text))) if word]

    def words_of(field):  # a list is taken as it is: lunr's own tokenizer does not split as the site does
        return lambda document: words(document[field])

    assert index["config"]["pipeline"] == ["stopWordFilter"]
    builder = Builder()
    builder.pipeline, builder.search_pipeline = Pipeline(), Pipeline()
    builder.pipeline.add(stop_word_filter)
    builder.ref("location")
    builder.b(0)
    for name, options in index["config"]["fields"].items():
        if name != "tags":  # of which there are none
            builder.field(name, boost=options["boost"], extractor=words_of(name))
    for document in index["docs"]:
        builder.add(document, {"boost": document.get("boost", 1)})
    built = builder.build()

    def pages(typed):
        asked = words(typed)
        counted = {word for word in asked if stop_word_filter(Token(word)) is not None}
        found = []
        query = built.create_query()
        for term in {term for word in asked for term in built.inverted_index if term.startswith(word)}:
            query.term(term, use_pipeline=False)
        for result in built.query(query) if query.clauses else []:
            matched = list(result["match_data"].metadata)
            shares = {word: any(term.startswith(word) for term in matched) for word in counted}
            complete = (result["ref"].find("#") < 0) + sum(shares.values()) / max(len(shares), 1)
            found.append((result["score"] * (1 + complete**2), result["ref"].partition("#")[0]))
        return list(dict.fromkeys(page for _, page in sorted(found, reverse=True)))

    return pages


def test_no_question_is_asked_twice():
    assert len({question.typed for question in QUESTIONS}) == len(QUESTIONS) == 45


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.typed)
def test_the_search_finds_the_page_in_one_try(search, question):
    shown = 1 if question in IN_OTHER_WORDS else FIRST_RESULTS
    assert question.page in search(question.typed)[:shown], search(question.typed)[:10]


def test_words_that_stand_nowhere_are_not_found(search):
    assert search("zyxwvut") == []


def test_names_are_found_by_their_parts(search):
    """``jls.autocast`` is two words on the site."""
    assert {"guide/precision/", "guide/step/", "cheat_sheet/"} <= set(search("autocast"))
