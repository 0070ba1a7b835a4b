"""The programs in `examples` run and print their results.

The quick tests run two steps in this process. The slow tests run the commands of ``examples/README.md``.
"""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import jax
import pytest
from kinds import slow_except
from programs.starting import run_python

pytestmark = pytest.mark.ci

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem not in ("command_line", "compare"))
PACKAGES = ["equinox", "flax", "haiku", "matplotlib", "orbax.checkpoint", "rich", "sklearn"]
NOT_IN_THE_TESTS_EXTRA = {"diffrax_neural_ode": "diffrax", "numpyro_vae": "numpyro"} | dict.fromkeys(
    ("tunix_bfloat16", "tunix_grpo"), "tunix"
)
DTYPES = ["float32", "bfloat16", "float16"]
sys.path.append(str(EXAMPLES))  # An example imports the modules next to it.


@functools.cache
def load(name):
    """Import an example as a module."""
    for package in [*PACKAGES, NOT_IN_THE_TESTS_EXTRA.get(name, "jax")]:
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(name, *arguments):
    """Run an example in this process. The example with two processes runs as one process with eight devices."""
    module = load(name)
    with jax.numpy_rank_promotion("allow"):  # numpyro uses rank promotion.
        if name == "sharded_training":
            module.train(module.parse(list(map(str, arguments))))
        else:
            module.main(list(map(str, arguments)))


def numbers(text):
    """Return the numbers in the last lines of the output, by name."""
    printed = re.findall(r"^([a-z][\w -]*): (\S+)(?: of (\d+))?$", text, re.MULTILINE)
    return {name: float(number) for name, number, _ in printed if name != "checksum"}


def run_command(*command):
    """Run a command in a subprocess without the XLA flags of the tests, and return its output."""
    return run_python(*command, cwd=EXAMPLES.parent, XLA_FLAGS="")


# All other examples take longer to compile and test nothing else of this file.
QUICK = ("sharded_training",)


@pytest.mark.parametrize("name", slow_except(QUICK, NAMES))
def test_example_trains_draws_a_figure_and_prints_results(name, tmp_path, capsys):
    arguments = "--steps", 2, "--figure", tmp_path / "figure.png"
    if name.startswith("tunix"):  # tunix raises warnings, and uses rank promotion in a thread.
        load(name)
        output = run_command(EXAMPLES / f"{name}.py", *arguments)
    else:
        run_here(name, *arguments)
        output = capsys.readouterr().out
    printed = numbers(output)
    measures = load("compare").MEASURES[name]
    assert set(measures) < set(printed)
    assert all(number == number and abs(number) < 100 for number in map(printed.get, measures))
    assert any(key.startswith("loss scale") for key in printed)
    assert any(key.startswith("skipped steps") for key in printed)
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_readme_and_comparison_contain_every_example():
    page = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"^python examples/(\w+)\.py", page, re.MULTILINE)) == {*NAMES, "compare"}
    assert sorted(load("compare").MEASURES) == NAMES


def before_the_changes(source, diff):
    """Return the source code before the changes of a diff, whose hunks start with ``@@``."""
    for hunk in diff.split("@@\n")[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert source.count(after) == 1, after
        source = source.replace(after, before)
    return source


def test_diff_in_the_readme_leads_from_a_float32_program_to_the_example(tmp_path, capsys):
    load("diffusion")
    source = (EXAMPLES / "diffusion.py").read_text()
    page = (EXAMPLES / "README.md").read_text()
    float32 = before_the_changes(source, re.search(r"^```diff\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
    assert "jls" not in float32
    namespace = {"__name__": "float32"}
    exec(compile(float32, "float32.py", "exec"), namespace)
    namespace["main"](["--steps", "3"])
    expected = numbers(capsys.readouterr().out)
    run_here("diffusion", "--steps", 3, "--dtype", "float32")
    assert numbers(capsys.readouterr().out)["test loss"] == expected["test loss"]


# The range of a result of each example in float16 with its default number of steps. An untrained network is far outside
# of this range.
REACHED = {
    "linen_classifier": ("test accuracy", 0.93, 1.0),
    "linen_ppo": ("points of an episode", 400, 500),
    "nnx_transformer": ("test loss", 1.5, 2.3),
    "nnx_lora": ("test loss", 2.3, 2.95),
    "equinox_vit": ("test accuracy", 0.87, 1.0),
    "equinox_mamba": ("test accuracy", 0.95, 1.0),
    "diffrax_neural_ode": ("test error", 0.0, 0.02),
    "haiku_graph_network": ("relative error", 0.0, 0.3),
    "numpyro_vae": ("held-out bound", -20.0, -15.0),
    "diffusion": ("test loss", 0.1, 0.13),
    "pinn": ("relative error", 0.0, 0.01),
    "equinox_gan": ("distance of drawn and true digits", 0.0, 0.4),
    "rl_float16": ("reward", 0.9, 1.0),
    "sharded_training": ("mean squared error", 0.0, 0.02),
    "tunix_bfloat16": ("test loss", 0.0, 0.2),
    "tunix_grpo": ("reward", 0.9, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_example_reaches_the_expected_result(name, tmp_path):
    load(name)
    printed = numbers(run_command(EXAMPLES / f"{name}.py", "--figure", tmp_path / "figure.png"))
    measure, lowest, highest = REACHED[name]
    assert lowest <= printed[measure] <= highest


@pytest.mark.slow
def test_float16_has_a_smaller_log_probability_mismatch_than_bfloat16(capsys):
    mismatch = {}
    for dtype in DTYPES:
        run_here("rl_float16", "--steps", 3, "--dtype", dtype)
        mismatch[dtype] = numbers(capsys.readouterr().out)["mismatch of log-probabilities"]
    # float16 has 3 more mantissa bits, so a ratio of 8 is expected.
    assert 4 < mismatch["bfloat16"] / mismatch["float16"] < 16
    assert mismatch["float16"] > 100 * mismatch["float32"]
