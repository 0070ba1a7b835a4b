"""The documentation site builds without warnings, has valid links and search results, and works offline.

Install ``pip install -e ".[test]" --group docs`` and run ``python -m pytest -m ci tests/test_site.py``.
"""

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
    """Parser that collects the links of a page and the files that it loads: scripts, styles, images and fonts."""

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


def test_pages_load_nothing_from_other_hosts(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for target in filter(None, read(page).loaded):
            assert not re.match(r"(https?:)?//", target), (page, target)
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//", style.read_text()), style


def test_all_code_fences_are_rendered(site):
    """A fence that is not closed appears as text and turns the rest of the page into code."""
    for page in site.rglob("*.html"):
        assert "```" not in page.read_text(), page


def test_figures_have_alternative_texts(site):
    for page in site.rglob("*.html"):
        for picture in re.findall(r"<img\b[^>]*>", page.read_text()):
            alt = re.search(r'alt="([^"]*)"', picture)
            assert alt, (page, picture)
            assert len(alt[1]) > 25, (page, picture)


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


# Each line contains a search query, and the page or section that must be among the first three results.
SEARCHES = """
tensorboard                                  guide/metrics/#every-n-steps-tensorboard-wandb-csv
wandb                                        guide/metrics/#every-n-steps-tensorboard-wandb-csv
gradscaler                                   migrating/#from-torch-pytorch-amp-gradscaler-and-autocast
torch.amp.GradScaler                         migrating/#from-torch-pytorch-amp-gradscaler-and-autocast
amp                                          migrating/#from-torch-pytorch-amp-gradscaler-and-autocast
pytorch                                      migrating/#from-torch-pytorch-amp-gradscaler-and-autocast
deepspeed                                    migrating/#from-deepspeed
lossscaleoptimizer                           migrating/#from-keras
apply_if_finite                              migrating/#from-optaxapply_if_finite
autolossscale                                api/loss_scales/#jax_lossscale.AutoLossScale
scaled_grad                                  api/gradients/#jax_lossscale.scaled_grad
jls.value_and_scaled_grad                    api/gradients/#jax_lossscale.value_and_scaled_grad
trainstate                                   api/interop/#jax_lossscale.interop.flax.TrainState
cheat sheet                                  api/
install with pip                             install/
pip install                                  install/
changelog                                    changelog/
faq                                          faq/
float8                                       faq/#what-about-float8
webgpu                                       why/#float16-or-bfloat16-which-one-to-use
V100                                         why/#float16-or-bfloat16-which-one-to-use
bfloat16 or float16                          why/#float16-or-bfloat16-which-one-to-use
memory saved                                 why/#memory-saved-time-saved
softmax in float16                           why/#what-must-stay-float32-softmax-layernorm-and-other-norm-layers-long-sums
training slower in fp16                      performance/#why-is-training-slower-in-float16-fp16-or-not-faster
overhead                                     performance/#overhead-of-the-optimizer-step-what-it-costs
tf32                                         performance/#is-it-faster-than-float32-the-estimated-speedup-on-h100-tensor-cores
loss scale keeps decreasing                  troubleshooting/#the-loss-scale-keeps-decreasing-down-to-its-floor
loss is nan                                  troubleshooting/
gradients are zero                           troubleshooting/#the-loss-does-not-fall-and-no-step-is-skipped-gradients-are-zero
which layer overflows                        troubleshooting/#which-layer-is-nan
mixed precision policy per layer             guide/precision/#a-mixed-precision-policy-per-layer-what-autocast-should-keep-in-float32
rotary                                       guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
RoPE                                         guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
position                                     guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
Fourier                                      guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
timestep                                     guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
FFT                                          guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
dice                                         guide/precision/#operations-that-need-float32-rotary-embeddings-rope-position-timestep-fourier-fft-counts-dice
strict                                       guide/precision/#check-which-matmuls-are-in-float16
flash attention                              guide/precision/#kernels-that-support-only-16-bits
cast by hand                                 guide/precision/#manual-casts-casting-by-hand
eval mode                                    guide/recipes/#evaluation-disable-autocast-for-eval-or-keep-it
resume training                              guide/recipes/#resume-training
freeze parameters                            guide/recipes/#freeze-parameters
multisteps                                   guide/accumulation/#one-micro-batch-per-call-optaxmultisteps
gradient accumulation                        guide/accumulation/
gradient clipping                            guide/metrics/#gradient-clipping
grad norm                                    guide/metrics/#log-the-gradient-norm
multi gpu                                    guide/devices/
shard_map                                    guide/devices/#jaxshard_map-and-jaxpmap-name-the-axes-with-axis_name
batch norm                                   guide/skipped_steps/#batch-norm-statistics-moving-averages-random-keys
all steps are skipped                        guide/skipped_steps/
learning rate schedule                       guide/skipped_steps/#learning-rate-schedules-and-warmup
gan                                          guide/multiple_losses/
lbfgs                                        guide/step/#line-searches-and-other-extra-arguments
numpyro                                      guide/trainers/#or-let-the-optimizer-compute-the-gradient-numpyro
ema weights                                  guide/recipes/#moving-averages-ema-of-the-weights
batchnorm                                    frameworks/linen/
gradients are not scaled                     troubleshooting/#gradients-are-not-scaled
trainer computes gradients                   guide/libraries/
troubleshooting                              troubleshooting/
bf16                                         why/#float16-or-bfloat16-which-one-to-use
tutorial                                     notebooks/quickstart/
getting started                              notebooks/quickstart/
quickstart                                   notebooks/quickstart/
speedup                                      performance/#is-it-faster-than-float32-the-estimated-speedup-on-h100-tensor-cores
fallback                                     guide/precision/#kernels-that-support-only-16-bits
tensor core                                  performance/#is-it-faster-than-float32-the-estimated-speedup-on-h100-tensor-cores
layernorm                                    why/#what-must-stay-float32-softmax-layernorm-and-other-norm-layers-long-sums
gradient checkpointing                       guide/autocast/#memory-what-is-saved-and-what-is-recomputed-gradient-checkpointing
warmup                                       guide/skipped_steps/#learning-rate-schedules-and-warmup
trainer                                      guide/libraries/
tunix                                        guide/libraries/#tunix-grpo-in-float16
keras                                        migrating/#from-keras
grpo                                         guide/rl/
reinforcement learning                       examples/#why-reinforcement-learning-went-back-to-float16
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
    expected = dict(re.split(r"  +", line) for line in SEARCHES.strip().splitlines())
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
