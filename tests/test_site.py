"""The documentation site builds without warnings, has valid links and search results, and works offline.

Install ``pip install -e ".[test]" --group docs`` and run ``python -m pytest -m ci tests/test_site.py``.
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci

pytest.importorskip("mkdocs")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


class References(HTMLParser):
    """Parser that collects the links, the descriptions of figures, and the files that a page loads."""

    def __init__(self):
        super().__init__()
        self.loaded, self.links, self.descriptions, self.ids = [], [], [], set()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.ids.add(attributes.get("id"))
        if tag in ("script", "img", "iframe", "source"):
            self.loaded.append(attributes.get("src"))
        if tag == "link" and attributes.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            self.loaded.append(attributes.get("href"))
        if tag == "img":
            self.descriptions.append(attributes.get("alt") or "")
        if tag == "a":
            self.links.append(attributes.get("href"))


@functools.cache
def read(page):
    references = References()
    references.feed(page.read_text())
    return references


def test_pages_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for target in filter(None, read(page).loaded):
            assert not re.match(r"(https?:)?//", target), (page, target)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


def test_figures_have_alternative_texts(site):
    for page in site.rglob("*.html"):
        assert [alt for alt in read(page).descriptions if len(alt) <= 25] == [], page


def test_links_lead_to_existing_pages_and_anchors(site):
    """Links from names in backticks and links in notebooks are included."""
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


def test_names_in_backticks_link_to_the_reference(site):
    text = (site / "guide" / "step" / "index.html").read_text()
    assert re.search(r'href="../../api/gradients/#jax_lossscale.value_and_scaled_grad"[^>]*><code>jls\.value', text)
    text = (site / "api" / "optimizer" / "index.html").read_text()
    assert re.search(r'href="../loss_scales/#jax_lossscale.NoOpLossScale"[^>]*><code>NoOpLossScale</code>', text)


def test_reference_shows_functions_and_not_modules(site):
    import jax_lossscale as jls

    text = (site / "api" / "autocast" / "index.html").read_text()
    for page in (site / "api").rglob("index.html"):
        assert "doc-symbol-module" not in page.read_text(), page
    for name in ("autocast", "in_half", "keep_float32"):
        assert f'id="jax_lossscale.{name}" class="doc doc-heading"' in text
        assert callable(getattr(jls, name))
    begin = text.index('id="jax_lossscale.keep_float32"')
    signatures = text[begin : text.index("<p>", begin)]
    assert signatures.count("-&gt;") + signatures.count("->") == 2  # One signature for each overload.


# Each line contains a page or section, and the search queries for which it must be among the first three results.
SEARCHES = """
guide/metrics/#every-n-steps-tensorboard-wandb-csv  tensorboard, wandb
migrating/#from-torch-pytorch-amp-gradscaler-and-autocast  gradscaler, torch.amp.GradScaler, amp, pytorch
migrating/#from-deepspeed  deepspeed
migrating/#from-keras  lossscaleoptimizer, keras
migrating/#from-optaxapply_if_finite  apply_if_finite
api/loss_scales/#jax_lossscale.AutoLossScale  autolossscale
api/gradients/#jax_lossscale.scaled_grad  scaled_grad
api/gradients/#jax_lossscale.value_and_scaled_grad  jls.value_and_scaled_grad
api/interop/#jax_lossscale.interop.flax.TrainState  trainstate
api/  cheat sheet
install/  install with pip, pip install
changelog/  changelog
troubleshooting/#questions-and-answers-faq  faq
troubleshooting/#what-about-float8  float8
why/#float16-or-bfloat16-which-one-to-use  webgpu, V100, bfloat16 or float16, bf16
why/#memory-saved-time-saved  memory saved
guide/precision/#what-must-stay-float32-softmax-layernorm-and-other-norm-layers-long-sums  softmax in float16, layernorm
performance/#why-is-training-slower-in-float16-fp16-or-not-faster  training slower in fp16
performance/#overhead-of-the-optimizer-step-what-it-costs  overhead
performance/#is-it-faster-than-float32-the-estimated-speedup-on-h100-tensor-cores  speedup, tensor core
performance/  tf32
troubleshooting/#the-loss-scale-keeps-decreasing-down-to-its-floor  loss scale keeps decreasing
troubleshooting/  loss is nan, troubleshooting
troubleshooting/#the-loss-does-not-fall-and-no-step-is-skipped-gradients-are-zero  gradients are zero
troubleshooting/#which-layer-is-nan  which layer overflows
guide/precision/#a-mixed-precision-policy-per-layer-what-autocast-should-keep-in-float32  mixed precision policy per layer
guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice  rotary, RoPE, position, Fourier, timestep, FFT, dice
guide/precision/#check-which-matmuls-are-in-float16  strict
guide/precision/#kernels-that-support-only-16-bits  flash attention, fallback
guide/precision/#manual-casts-casting-by-hand  cast by hand
guide/recipes/#evaluation-disable-autocast-for-eval-or-keep-it  eval mode
guide/recipes/#resume-training  resume training
guide/recipes/#freeze-parameters  freeze parameters
guide/accumulation/#one-micro-batch-per-call-optaxmultisteps  multisteps
guide/accumulation/  gradient accumulation
guide/metrics/#gradient-clipping  gradient clipping
guide/metrics/#log-the-gradient-norm  grad norm
guide/devices/  multi gpu
guide/devices/#jaxshard_map-and-jaxpmap-name-the-axes-with-axis_name  shard_map
guide/skipped_steps/#batch-norm-statistics-moving-averages-random-keys  batch norm
guide/skipped_steps/  all steps are skipped
guide/skipped_steps/#learning-rate-schedules-and-warmup  learning rate schedule, warmup
guide/multiple_losses/  gan
guide/step/#line-searches-and-other-extra-arguments  lbfgs
guide/trainers/#or-let-the-optimizer-compute-the-gradient-numpyro  numpyro
guide/recipes/#moving-averages-ema-of-the-weights  ema weights
frameworks/linen/  batchnorm
troubleshooting/#gradients-are-not-scaled  gradients are not scaled
guide/libraries/  trainer computes gradients, trainer
notebooks/quickstart/  tutorial, getting started, quickstart
guide/autocast/#memory-what-is-saved-and-what-is-recomputed-gradient-checkpointing  gradient checkpointing
guide/libraries/#tunix-grpo-in-float16  tunix
guide/rl/  grpo
examples/#why-reinforcement-learning-went-back-to-float16  reinforcement learning
"""  # noqa: E501
# The script runs the search worker of the site, as a browser does. The result for each query is a list of pages. Each
# page is a list of matching sections, the best one first.
ASK = """
const [worker, index, queries] = process.argv.slice(1), answers = [], read = require("fs").readFileSync
let ask
Object.assign(globalThis, {
  self: globalThis,
  addEventListener: (kind, listener) => { ask = data => listener({data}) },
  postMessage: answer => answers.push(answer.data),
});
(0, eval)(read(worker, "utf8"))
const run = async () => {
  await ask({type: 0, data: {...JSON.parse(read(index)), options: {}}})
  for (const query of JSON.parse(queries)) await ask({type: 2, data: query})
  console.log(JSON.stringify(answers.slice(1).map(({items}) => items.map(page => page.map(part => part.location)))))
}
run()
"""


def test_search_finds_the_expected_page(site):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed; it is part of the group `docs`")
    lines = [line.split("  ") for line in SEARCHES.strip().splitlines()]
    expected = {query: place for place, queries in lines for query in queries.split(", ")}
    [worker] = site.glob("assets/javascripts/workers/search.*.min.js")
    command = [node, "-e", ASK, str(worker), str(site / "search" / "search_index.json"), json.dumps([*expected])]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert completed.returncode == 0, completed.stderr
    found = [[parts[0] for parts in pages[:3]] for pages in json.loads(completed.stdout)]
    assert [
        (query, place, hits)
        for (query, place), hits in zip(expected.items(), found, strict=True)
        if place not in [*hits, *(hit.partition("#")[0] for hit in hits)]
    ] == []


def test_old_addresses_redirect_to_existing_pages(site):
    """Other tests check the links of all pages, including the pages that redirect."""
    for old, new in {"frameworks/orbax": "guide/checkpoints", "differences": "migrating"}.items():
        text = (site / old / "index.html").read_text()
        target = re.search(r'location.replace\("(.*)" \+ location.hash\)', text)[1]
        assert (site / old / target).resolve() == site / new
        assert (site / new / "index.html").exists()
        assert f"/{old}/" not in (site / "sitemap.xml").read_text()


def test_benchmark_results_are_not_part_of_the_site(site):
    assert "This page has moved" in (site / "results" / "policies" / "index.html").read_text()
    assert "benchmarks/results/policies.md" in (site / "choosing" / "index.html").read_text()
