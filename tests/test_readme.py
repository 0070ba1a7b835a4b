"""The code and command blocks of the README work, and its links and figures exist."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_lossscale as jls

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("kinds", [" -", " +"], ids=["before", "after"])
def test_program_before_and_after_the_diff_takes_the_same_step(kinds):
    (diff,) = blocks("diff")
    source = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[:1] in kinds or line == "\n")
    assert ("jls" in source) is ("+" in kinds)
    namespace = {"jax": jax, "jnp": jnp, "optax": optax, "jls": jls}
    exec(compile(source, "README.md", "exec"), namespace)
    batch = {"x": jnp.ones((64, 8)), "y": jnp.ones((64, 1))}
    params = {"kernel": jnp.zeros((8, 1))}
    state = namespace["tx"].init(params)
    params, state, loss = namespace["train_step"](params, state, batch)
    assert loss == 1.0
    assert jnp.allclose(params["kernel"], 3e-4, rtol=1e-3)  # the first step of Adam


def test_table_of_situations_has_short_rows_without_numbers_below_the_first_code():
    before, heading, after = README.partition("| your situation | what you need |\n|---|---|\n")
    assert heading
    assert "|---" not in before
    assert "```bash" in before
    assert "```diff" in before
    rows = [line.strip("|").split("|") for line in after.partition("\n\n")[0].splitlines()]
    assert any("my float16 run diverges" in situation for situation, _ in rows)
    for row in rows:
        assert "".join(row).count("](") == 1, row
        for cell in row:
            text = re.sub(r"\]\([^)]*\)", "", cell)  # without the target of the link
            assert len(text.split()) <= 20, row
            assert not re.search(r"\d[.%]|\d times", text), row


def test_marked_command_blocks_run_the_demo_and_the_tests():
    marked = dict(re.findall(r"^<!-- run by CI: (\w+) -->\n```bash\n(.*?)^```$", README, re.MULTILINE | re.DOTALL))
    demo, tests = marked["demo"], marked["tests"]
    assert blocks("bash") == ["pip install .\n", demo, tests]
    for block in demo, tests:
        assert block.startswith("python3 -m venv .venv && . .venv/bin/activate\n")
    assert demo.splitlines()[-1].startswith("python -m jax_lossscale")
    assert tests.splitlines()[-1].startswith("python -m pytest")
