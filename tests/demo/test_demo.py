"""The command ``python -m jax_lossscale``: results, the plot and rejected options."""

import sys

import pytest

from jax_lossscale.demo import command, main

pytestmark = pytest.mark.ci

pytest.importorskip("sklearn")
pytest.importorskip("rich")

ARMS = ["float32", "float16", "float16_fixed", "float16_dynamic", "float16_auto"]


@pytest.fixture
def must_not_train(monkeypatch):
    """Make the test fail if the demo starts to train."""

    def fail(**options):
        raise AssertionError("the demo started to train despite an invalid option")

    monkeypatch.setattr(command, "run", fail)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of a short run that also draws a figure."""
    folder, found = tmp_path_factory.mktemp("demo"), {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(command.report, "print_table", found.update)
        assert main(["--steps", "20", "--seed", "1", "--plot", str(folder / "a.png")]) == 0
    assert [path.name for path in folder.iterdir()] == ["a.png"]
    assert list(found) == ARMS
    return found


# --- Statements of the demo about float16 ---


def assert_only_unscaled_float16_fails(arms, worse, tolerances, most_zeros, few_zeros):
    loss = {name: arm.final_loss for name, arm in arms.items()}
    zeros = {name: arm.zero_gradient_fraction for name, arm in arms.items()}
    assert loss["float16"] >= worse * loss["float32"]
    for name, tolerance in tolerances.items():
        assert loss[name] == pytest.approx(loss["float32"], rel=tolerance)
    assert zeros["float16"] > most_zeros
    assert max(zeros[name] for name in ARMS if name != "float16") < few_zeros


def test_float16_underflows_and_scaled_float16_follows_float32_in_20_steps(results):
    assert_only_unscaled_float16_fails(results, 1.005, {"float16_fixed": 2e-3, "float16_auto": 2e-3}, 0.05, 1e-3)


@pytest.mark.slow  # The complete demo is slow.
def test_float16_fails_by_underflow_and_matches_float32_with_loss_scaling(capsys):
    arms = command.run(steps=command.job.STEPS, seed=1)
    tolerances = {"float16_fixed": 0.02, "float16_dynamic": 0.02, "float16_auto": 0.01}
    assert_only_unscaled_float16_fails(arms, 1.4, tolerances, 0.5, 0.01)
    assert arms["float16_dynamic"].skipped_steps > 0
    assert [arms[name].skipped_steps for name in ARMS[:3]] == [0, 0, 0]
    assert [arms[name].final_loss_scale for name in ARMS[:3]] == [1, 1, 2**15]

    command.report.print_table(arms)
    output = capsys.readouterr()
    assert all(name in output.out for name in ARMS)
    assert "higher than in float32" in output.out


# --- Rejected options lead to exit code 2, without training and without output files ---


BAD_OPTIONS = {
    "--steps many": "--steps",
    "--steps 0": "--steps",
    "--seed x": "--seed",
    "--plot missing/picture.png": "directory that exists",
    "--plot folder": "must name a file",
    "--plot picture.txt": ".png",
    "--step 3": "--step",
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.items())
def test_invalid_option_ends_the_program(options, words, tmp_path, monkeypatch, capsys, must_not_train):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as exit_info:
        main(options.split())
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert words in output.err
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


@pytest.mark.parametrize(
    ("module", "extra", "distribution"),
    [("sklearn", "demo", "scikit-learn"), ("matplotlib", "plot", "matplotlib")],
)
def test_error_for_a_missing_package_names_the_extra(
    module, extra, distribution, tmp_path, monkeypatch, capsys, must_not_train
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match="2"):
        main(["--plot", str(tmp_path / "picture.png")])
    output = capsys.readouterr()
    assert f"the extra `{extra}`" in output.err
    assert output.err.endswith(f"pip install {distribution}\n")
    assert list(tmp_path.iterdir()) == []
