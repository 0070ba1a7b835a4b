"""The README's snippets run, top to bottom, in one namespace, as a reader would try them.

And what `docs/choosing.md`, the page to choose a loss scale by, says is so.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import jax_lossscale as jls
from benchmarks.policies.judge import judge
from benchmarks.policies.traces import of_one_length, recorded

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()
MOST_WORDS = 1_400


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_every_python_snippet_runs_and_prints_what_stands_below_it(capsys):
    namespace = {"__name__": "readme"}
    printed = {}
    for number, source in enumerate(blocks("python"), start=1):
        exec(compile(source, f"README.md, python block {number}", "exec"), namespace)
        printed[source] = capsys.readouterr().out
    assert namespace["loss"] > 0
    shown = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    # From the last snippet's opening fence on: the expression above starts at the first one.
    shown = [(source.rpartition("```python\n")[2], output) for source, output in shown]
    assert shown
    for source, output in shown:
        assert printed[source] == output


def test_the_first_two_command_blocks_are_the_main_job_and_the_tests():
    main_job, tests = blocks("bash")[:2]
    for block in main_job, tests:
        assert block.startswith("python3 -m venv .venv && . .venv/bin/activate\n")
    assert main_job.splitlines()[-1].startswith("python -m jax_lossscale")
    assert tests.splitlines()[-1].startswith("python -m pytest")


def test_it_is_short_enough_to_be_read_and_its_first_screen_leads_on():
    assert len(README.split()) <= MOST_WORDS
    before_the_code, first_block = re.match(r"(.*?)^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL).groups()
    for hardware in "V100", "T4", "A100", "H100", "TPU":  # who reads on, and who need not
        assert hardware in before_the_code
    assert "](" not in before_the_code
    lines = [line for line in first_block.splitlines() if line]
    assert (len(lines), lines[-1]) == (15, "print(loss)")
    first_screen = README.partition("\n## ")[0]
    assert "(docs/migrating.md)" in first_screen
    for page in (ROOT / "docs" / "frameworks").glob("[!i]*.md"):
        assert f"(docs/frameworks/{page.name})" in first_screen


def test_its_table_is_part_of_the_table_to_choose_by():
    rows = re.findall(r"^\| float16 \| ([^|]*) \|", README, re.MULTILINE)
    assert rows
    assert set(rows) <= set(re.findall(r"^\| float16 \| ([^|]*) \|", CHOOSING, re.MULTILINE))


def test_the_notebook_recommends_the_loss_scales_of_the_table():
    notebook = json.loads((ROOT / "notebooks" / "policies.ipynb").read_text())
    (to_copy,) = ["".join(c["source"]) for c in notebook["cells"] if "## To copy" in "".join(c["source"])]
    recommended = dict(
        re.findall(r"\*\*([^*]*?)\.\*\*[^`]*?(?:`[^`\n]*`[^`]*?)*```python\njls\.((?:Auto|Dynamic).*)\n```", to_copy)
    )
    assert len(recommended) == 4
    rows = re.findall(r"^\| float16 \| ([^|]*) \| `([^`]*)`(?:, that is `([^`]*)`)?", CHOOSING, re.MULTILINE)
    table = {condition: constructor or name for condition, name, constructor in rows}
    assert set(recommended.values()) <= set(table.values())
    unknown = table["do not know the size of your gradients, or it changes"]
    assert unknown == recommended["You do not know your gradients"] == "AutoLossScale()"
    # The first example has what a person who knows nothing should have.
    assert jls.get("auto") == jls.AutoLossScale()
    assert "loss_scaled(optax.adamw(3e-4))" in blocks("python")[0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_hysteresis_with_refill_costs_and_wins_what_the_table_says(seed):
    noise = np.random.default_rng(0).normal(size=100_000)
    random = np.random.default_rng(seed)
    when, log2_size = random.random(noise.size), random.uniform(4, 8, noise.size)

    def outcome(rate, **options):
        """Skipped steps in percent, and how many powers of two of the range are not used, as in the notebook."""
        largest = 2.0 ** (-8 + 0.5 * noise + np.where(when < 1 / rate, log2_size, 0))
        run = jls.diagnostics.simulate(jls.DynamicLossScale(2.0**24, **options), largest=largest)
        applied = np.asarray(run.should_apply)
        unused = np.log2(65504 / (largest * np.asarray(run.loss_scale, np.float64)))
        return 100 * (1 - applied.mean()), unused[applied].mean()

    for rate, least, most, wins_more_than, wins_less_than in [
        (200, 0.2, 0.75, 4, 6),
        (500, 0.2, 0.75, 4, 6),
        (1_000, 0.2, 0.75, 4, 6),
        (5_000, 1.0, 1.15, 1, 2),
    ]:
        plain, plain_unused = outcome(rate)
        skipped, unused = outcome(rate, hysteresis=2, hysteresis_refill="finite")
        assert 0.035 < plain < 0.05
        assert least < skipped < most
        assert wins_more_than < plain_unused - unused < wins_less_than


def test_the_automatic_scale_does_on_the_recorded_trainings_what_the_page_says():
    traces = recorded()
    same_length = of_one_length(traces)
    judged = {
        kind: judge(loss_scale, same_length)
        for kind, loss_scale in (
            ("auto", jls.AutoLossScale()),
            ("dynamic", jls.DynamicLossScale()),
        )
    }
    said = re.search(
        r"recorded from (\w+) small real trainings, the automatic scale skipped at most (\d+) steps? of any, and left "
        r"([\d.]+) bits unused on average, where `DynamicLossScale\(\)` leaves ([\d.]+)",
        " ".join(CHOOSING.split()),
    )
    assert said is not None
    assert said[1] == {10: "ten"}[len(traces)]
    assert int(said[2]) == judged["auto"].skipped.max()
    assert float(said[3]) == pytest.approx(judged["auto"].unused_bits.mean(), abs=0.05)
    assert float(said[4]) == pytest.approx(judged["dynamic"].unused_bits.mean(), abs=0.05)


def test_links_and_pictures_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_continuous_integration_runs_the_readme_test_command():
    assert "block == 2" in (ROOT / ".ci" / "run").read_text()
