"""One page, complete in itself, that nothing from a file can break out of."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser

import pytest
from run_builder import build

from mtplab.report import page, plots
from mtplab.report.results import load_results

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> \"' $\\frac{1}{2}$ &amp;"
VOID = {"meta", "img", "br", "hr", "link"}


class Outline(HTMLParser):
    """Element names, attributes and the balance of the page."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *a) for a in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def outline(html: str) -> Outline:
    parser = Outline()
    parser.feed(html)
    parser.close()
    return parser


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    return page.page(load_results(build(tmp_path_factory.mktemp("p") / "run").folder))


def test_the_page_is_well_formed_and_needs_nothing_from_outside(html):
    seen = outline(html)
    assert seen.open == [] and "script" not in seen.tags and "link" not in seen.tags
    for _, name, value in seen.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("#", "data:")), value
    assert not re.search(r"url\((?!#)", html)
    assert "default-src 'none'" in html


def test_it_shows_tables_plots_depth_and_texts(html):
    seen = outline(html)
    assert seen.tags.count("svg") == 4 and seen.tags.count("table") >= 2
    text = "".join(seen.text)
    for words in ("depth3 pays", "Greedy (temperature 0)", "Sampled (temperature 0.8", "What survives", "Depth chosen"):
        assert words in text
    assert html.count("t-draft") > 10 and html.count("t-correction") > 2


def test_ids_on_the_page_are_unique(html):
    ids = [v for _, n, v in outline(html).attributes if n == "id"]
    assert len(ids) == len(set(ids)) > 10


def test_names_and_texts_from_files_stay_text(tmp_path):
    store = build(tmp_path / "run", corpora=("a<b>&$x$", "_c"), rounds=2, prompts=2, text=EVIL, pieces=EVIL, model=EVIL)
    html = page.page(load_results(store.folder))
    seen = outline(html)
    assert seen.open == [] and not {"script", "img"} & set(seen.tags)
    assert not [a for a in seen.attributes if a[1].startswith("on")]
    assert EVIL in "".join(seen.text)
    assert "a<b>&$x$" in "".join(seen.text)


def test_failures_and_disturbed_trials_are_on_the_page(tmp_path):
    store = build(tmp_path / "run", rounds=2, prompts=2, skip=["000-depth0-0", "000-depth3-0", "000-baseline-0",
                                                             "000-adaptive-0"])  # fmt: skip
    html = page.page(load_results(store.folder))
    assert "failed and in no row" in html and "it &lt;b&gt;broke&lt;/b&gt;" in html


def test_without_matplotlib_the_page_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    results = load_results(build(tmp_path / "run", rounds=1, prompts=2).folder)
    html = page.page(results)
    assert "pip install &#x27;mtplab[plots]&#x27;" in html and "<svg" not in html
    assert "Greedy (temperature 0)" in html


def test_writing_replaces_the_page_whole(tmp_path):
    results = load_results(build(tmp_path / "run", rounds=1, prompts=2, modes=("greedy",)).folder)
    path = page.write(results)
    assert path == results.store.folder / "page.html"
    first = path.read_text()
    assert page.write(results).read_text() == first
    assert not list(path.parent.glob(".page*"))


def test_a_label_never_hides_from_a_legend_and_stays_short():
    assert plots.name("_x") == " _x" and len(plots.name("y" * 100)) == 28 and "\n" not in plots.name("a\nb")
