"""The code blocks of the README run in order, in one namespace."""

import re
from pathlib import Path

import jax_lossscale as jls

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CHOOSING = (ROOT / "docs" / "choosing.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_and_print_the_shown_output(capsys):
    namespace = {"__name__": "readme"}
    printed = {}
    for number, source in enumerate(blocks("python"), start=1):
        exec(compile(source, f"README.md, python block {number}", "exec"), namespace)
        printed[source] = capsys.readouterr().out
    assert printed[blocks("python")[0]] == "1.0\n"  # the loss of the first step
    shown = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    # The regular expression starts at the first opening fence, so the source is the text after the last one.
    shown = [(source.rpartition("```python\n")[2], output) for source, output in shown]
    assert shown
    for source, output in shown:
        assert printed[source] == output
    comparison = jls.diagnostics.compare_gradients(namespace["loss_fn"], namespace["params"], namespace["batch"])
    assert "`mul` (README.md, python block 2:4) returns NaN" in str(comparison)


def test_second_program_does_not_run_the_step_of_the_first_program(capsys):
    """With ``record_bad_steps=True``, a jitted step would be compiled again anyway, because the state is different."""
    namespace = {"__name__": "readme"}
    first, second = blocks("python")
    exec(first, namespace)
    exec(second.replace(", record_bad_steps=True", ""), namespace)
    assert "Of 10 steps, 0 were applied and 10 were skipped." in capsys.readouterr().out


def test_marked_command_blocks_run_the_demo_and_the_tests():
    marked = dict(re.findall(r"^<!-- run by CI: (\w+) -->\n```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
    demo, tests = marked["demo"], marked["tests"]
    assert blocks("bash")[:2] == [demo, tests]
    for block in demo, tests:
        assert block.startswith("python3 -m venv .venv && . .venv/bin/activate\n")
    assert demo.splitlines()[-1].startswith("python -m jax_lossscale")
    assert tests.splitlines()[-1].startswith("python -m pytest")


def test_diff_results_in_the_complete_program():
    (diff,) = blocks("diff")
    lines = [line for line in diff.splitlines() if line.strip()]
    program = [line.split("  #")[0].rstrip() for line in blocks("python")[0].splitlines()]
    assert [line[1:].split("  #")[0] for line in lines if line[0] in "+ "] == [
        line for line in program if line in {line[1:].split("  #")[0] for line in lines if line[0] in "+ "}
    ]
    assert sum(line.startswith("+") for line in lines) == 5


def test_table_is_part_of_the_table_on_the_page_choosing():
    rows = re.findall(r"^\| float16 \| ([^|]*) \|", README, re.MULTILINE)
    assert rows
    assert set(rows) <= set(re.findall(r"^\| float16 \| ([^|]*) \|", CHOOSING, re.MULTILINE))


def test_links_and_figures_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_continuous_integration_runs_the_readme_test_command():
    assert "<!-- run by CI: tests -->" in (ROOT / ".ci" / "run").read_text()
