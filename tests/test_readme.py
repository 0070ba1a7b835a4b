"""The code blocks of the README run in order, in one namespace."""

import re
from pathlib import Path

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
    assert namespace["loss"] > 0
    shown = re.findall(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    # The regular expression starts at the first opening fence, so the source is the text after the last one.
    shown = [(source.rpartition("```python\n")[2], output) for source, output in shown]
    assert shown
    for source, output in shown:
        assert printed[source] == output


def test_first_two_command_blocks_run_the_demo_and_the_tests():
    main_job, tests = blocks("bash")[:2]
    for block in main_job, tests:
        assert block.startswith("python3 -m venv .venv && . .venv/bin/activate\n")
    assert main_job.splitlines()[-1].startswith("python -m jax_lossscale")
    assert tests.splitlines()[-1].startswith("python -m pytest")


def test_table_is_part_of_the_table_on_the_page_choosing():
    rows = re.findall(r"^\| float16 \| ([^|]*) \|", README, re.MULTILINE)
    assert rows
    assert set(rows) <= set(re.findall(r"^\| float16 \| ([^|]*) \|", CHOOSING, re.MULTILINE))


def test_links_and_figures_exist():
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_continuous_integration_runs_the_readme_test_command():
    assert "block == 2" in (ROOT / ".ci" / "run").read_text()
