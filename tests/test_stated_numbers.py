"""Numbers on pages and in the README equal the numbers in ``benchmarks/results``."""

import importlib.util
import itertools
import re
import statistics
from pathlib import Path

from benchmarks import BENCHMARKS, ON_REQUEST
from benchmarks.harness.report import index

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def words(path):
    """Return the text of a file without line breaks."""
    return " ".join(path.read_text().split())


def rows(path, heading):
    """Return the cells of the first table below a heading."""
    lines = re.search(r"(?:^\|.*\n)+", path.read_text().partition(heading)[2], re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def number(cell):
    return float(re.match(r"[\d.]+", cell)[0])


TIME, MEMORY = "predicted time over manual casts", "temporaries over manual casts"


def marks(benchmark):
    """Return the measured value of each mark of a benchmark as text.

    Marks are rounded once, so they can differ in the last digit from ratios of the rounded numbers in the tables.
    """
    prefix = "GPU program (compiled, not run): "
    return {
        (name.removeprefix(prefix), "".join(note)): measured
        for name, measured, _, _, *note in rows(RESULTS / f"{benchmark}.md", "## Marks")
    }


def measured_on_an_h100():
    """Return the cells of each training step that was measured on an H100. Pages do not show its estimate."""
    return {name: cells for name, *cells in rows(RESULTS / "on_gpu.md", "### Training steps on NVIDIA H100")}


def test_predictions_for_an_h100():
    marked = marks("autocast")
    predicted = {
        (model, loss): (number(time), number(temporaries))
        for model, loss, time, _, temporaries, *_ in rows(RESULTS / "autocast.md", "### Training steps for an H100")
    }
    stated = rows(ROOT / "docs" / "performance.md", "## Is it faster than float32?")
    models = [model for model, loss in predicted if loss == "autocast" and model not in measured_on_an_h100()]
    assert [model for model, *_ in stated] == models
    for model, *cells in stated:
        ours, whole, manual = (predicted[model, loss] for loss in ("autocast", "float32", "manual casts"))
        ratios = ours[0] / whole[0], ours[0] / manual[0], ours[1] / whole[1], ours[1] / manual[1]
        kinds = "predicted time over float32", TIME, None, MEMORY
        assert cells == [
            marked.get((f"autocast, {model}: {kind}", ""), f"{ratio:.2f}")
            for kind, ratio in zip(kinds, ratios, strict=True)
        ], model
    page = words(ROOT / "docs" / "guide" / "autocast.md")
    ways, models = ("", ", half residual stream"), ("ResNet-50", "convolution net")
    times = [marked[f"autocast{way}, {model}: {TIME}", ""] for model in models for way in ways]
    assert "from {} to {} for ResNet-50 and from {} to {} for a convolutional network".format(*times) in page


def test_predictions_for_models_that_were_not_used_for_tuning():
    results = rows(RESULTS / "untuned.md", "## Tables")
    assert len(results) >= 32
    of_all = [
        (name, *(float(cell) if cell != "-" else None for cell in (time, memory, half)))
        for name, _, time, _, memory, half, *_ in results
    ]
    shown = [row for row in of_all if row[0] not in measured_on_an_h100()]
    stated = rows(ROOT / "docs" / "performance.md", "### Models that were not used to tune")
    assert stated == [[name, *(f"{cell:.2f}" for cell in cells)] for name, *cells in shown if cells[0] > 1.1]
    medians = [f"{statistics.median(row[n] for row in of):.2f}" for of in (shown, of_all) for n in (1, 2)]
    text = "take a median time of {} and a median memory of {} (all models: {} and {}).".format(*medians)
    assert text in words(ROOT / "docs" / "performance.md")


def test_predictions_for_older_gpus():
    # The columns with times and sizes are only in the results.
    measured = [[*row[:2], *row[3:5], *row[6:]] for row in rows(RESULTS / "older_gpus.md", "## Tables")]
    assert rows(ROOT / "docs" / "performance.md", "## V100 and T4") == measured


def test_errors_of_the_estimates():
    marked = {row[0]: row[1] for row in rows(RESULTS / "estimates.md", "## Marks")}
    name = "GPU program (compiled, not run): estimated time of autocast over {}: largest error"
    manual, float32 = (100 * number(marked[name.format(way)]) for way in ("manual casts", "float32"))
    text = f"measured above by at most {manual:.0f}%, and the times relative to float32 by at most {float32:.0f}%"
    assert text in words(ROOT / "docs" / "performance.md")


def test_estimates_for_tpus():
    def estimates():
        for name, _, manual, float32, half, _, manual_memory, float32_memory, *_ in rows(
            RESULTS / "tpu.md", "## Tables"
        ):
            yield name, [float32, manual, float32_memory, manual_memory], half

    page = words(ROOT / "docs" / "performance.md")
    assert rows(ROOT / "docs" / "performance.md", "## TPU") == [[name, *cells] for name, cells, _ in estimates()]
    found = {name: (cells[1], half) for name, cells, half in estimates()}
    (net, half_net), (mixer, half_mixer) = found["convolution net"], found["MLP-Mixer"]
    times = (
        f"convolution net is {half_net} instead of {net}, and that of the MLP-Mixer {half_mixer} instead of {mixer}."
    )
    assert times in page
    marked = {row[0]: row[1] for row in rows(RESULTS / "tpu.md", "## Marks")}
    v6e = "TPU v6e program (compiled, not run): autocast: {} cycles over {}"
    ratios = [marked[v6e.format(*which)] for which in itertools.product(("median", "max"), ("float32", "manual casts"))]
    medians = "{} relative to float32 and {} relative to manual casts.".format(*ratios[:2])
    assert f"{medians} The maxima are {ratios[2]} (50,304 words) and {ratios[3]} (MLP-Mixer)." in page
    cycles = {name: number(cell) for name, cell, *_ in rows(RESULTS / "tpu.md", "### Optimizers on a TPU")}
    in_float16 = cycles["`loss_scaled(adam)`, `autocast` in float16"]
    assert f"takes {in_float16 / cycles['Adam, `autocast` in bfloat16']:.2f} times as many cycles in float16" in page
    adam = cycles["Adam in float32"]
    for name in ("`loss_scaled(adam)` in float32", "Adam in float32, clipped by the global norm"):
        assert f"each increase the cycles by {100 * (cycles[name] / adam - 1):.0f}%" in page
    half = cycles["Adam, bfloat16 parameters"]
    names = "stochastic_rounding(adam)", "master_weights(adam)", "stochastic_rounding(half_precision_state(adam))"
    increases = [f"{100 * (cycles[f'`{name}`'] / half - 1):.0f}%" for name in names]
    text = "increases them by {}, `master_weights` by {}, and `stochastic_rounding` with `half_precision_state` by {}."
    assert text.format(*increases) in page


def test_table_of_the_readme():
    stated = rows(ROOT / "README.md", "Time and temporary memory of a training step")
    measured = measured_on_an_h100()
    estimated = {tuple(row[:2]): row for row in rows(RESULTS / "older_gpus.md", "## Tables")}
    compared = []
    for hardware, model, *cells in stated:
        if hardware == "H100, measured (0.7.0)":
            assert cells == [measured[model][column] for column in (3, 4, 6, 7)], model
        elif hardware == "V100, estimated":
            row = estimated["V100", model]
            assert cells == [*row[3:5], *row[6:]], model
        else:
            assert hardware == "TPU v5e, estimated"
            row = next(row for row in rows(RESULTS / "tpu.md", "## Tables") if row[0] == model)
            assert cells == [row[column] for column in (3, 2, 7, 6)], model
        compared.append(hardware)
    assert compared == ["H100, measured (0.7.0)"] * 2 + ["TPU v5e, estimated"] * 2 + ["V100, estimated"] * 2


def test_bytes_saved_for_the_backward_pass():
    page = words(ROOT / "docs" / "why.md")
    table = rows(RESULTS / "autocast.md", "### Saved for the backward pass: transformer 4 x 512")
    saved = {loss: f"{number(cell):.0f} MiB" for dropout, loss, cell, _ in table if dropout == "0.0"}
    assert f"save {saved['float32']} in float32, {saved['manual casts']} with manual casts" in page
    assert f"and {saved['autocast']} under `jls.autocast`" in page


def test_other_costs_of_autocast():
    page = words(ROOT / "docs" / "performance.md")
    cpu = {row[0]: row[3] for row in rows(RESULTS / "autocast.md", "### Training steps on a CPU")}
    under_autocast = f"takes {cpu['autocast']} times as long under `autocast` as in float32"
    assert f"{under_autocast}, and {cpu['manual casts']} times" in page
    calls = {row[0]: number(row[1]) for row in rows(RESULTS / "autocast.md", "### Calls of two layers")}
    assert f"takes {calls['autocast']:.0f} ms instead of {calls['float32']:.2f} ms" in page


def test_compile_time_of_autocast():
    page = words(ROOT / "docs" / "performance.md")
    for_gpu = {row[0]: row[2] for row in rows(RESULTS / "autocast.md", "### Trace, lower and compile for an H100")}
    text = "H100 takes {} times as long as in float32. With manual casts, it takes {} times as long as in float32"
    assert text.format(for_gpu["autocast"], for_gpu["manual casts"]) in page
    for_cpu = [row[4] for row in rows(RESULTS / "autocast.md", "### Trace and compile time on a CPU")]
    assert len(for_cpu) == 8
    assert f"eight smaller programs takes {min(for_cpu)} to {max(for_cpu)} times as long as in float32" in page


def test_compile_time_of_a_training_step():
    page = words(ROOT / "docs" / "performance.md")
    over = {row[0]: row[2] for row in rows(RESULTS / "compile_time.md", "### Compile time of a training step")}
    auto, dynamic = over["ours, update_and_apply, 'auto'"], over["ours, update_and_apply"]
    assert f'takes {auto} times as long to compile with `"auto"`, {dynamic} times with `"dynamic"`, ' in page
    others = over["apply_if_finite"], over["flax"], over["jmp"]
    assert "{} times with `apply_if_finite`, {} times with flax, and {} times with jmp.".format(*others) in page
    assert f"step that skips non-finite gradients takes {over['handwritten']} times as long." in page


def test_times_on_a_gpu():
    stated = rows(ROOT / "docs" / "performance.md", "## Training steps measured on an H100")
    measured = measured_on_an_h100()
    assert [name for name, *_ in stated] == list(measured)
    for name, ours, *ratios in stated:
        assert ours == f"{number(measured[name][2]):.2f} ms", name
        assert ratios == [measured[name][column] for column in (3, 4, 6, 7)], name
    page = words(ROOT / "docs" / "performance.md")
    assert f"takes {measured['LSTM'][5]} times as long as with manual casts (quartiles)" in page


def test_cost_of_an_optimizer_step_on_a_gpu():
    over = {}
    for size in ("100.0", "1000.0"):
        for gradients in ("float32", "float16"):
            heading = f"### Adam, {size} M float32 parameters in 57 leaves, {gradients} gradients"
            for name, _, _, ratio, spread, *_ in rows(RESULTS / "optimizer_on_gpu.md", heading):
                over.setdefault((size, name), []).extend([ratio, spread])
    page, ours = words(ROOT / "docs" / "performance.md"), "ours, update_and_apply"
    large = "{} times as long with float32 gradients, and {} times with float16 gradients"
    assert large.format(*over["1000.0", ours][::2]) in page
    small = "{} ({}) with float32 gradients, and {} ({}) with float16 gradients, compared with {} and {} with jmp"
    assert small.format(*over["100.0", ours], *over["100.0", "jmp"][::2]) in page
    with_cond = 'With `skip="cond"`, the ratios are {} and {}'
    assert with_cond.format(*over["100.0", f"{ours}, skip='cond'"][::2]) in page


# The keys are rows of `docs/performance.md`, and the values are rows of the benchmark.
CONTENDERS = {
    '`update_and_apply`, `"auto"`': "ours, update_and_apply, 'auto'",
    '`update_and_apply`, `"dynamic"`': "ours, update_and_apply",
    "`optax.apply_if_finite`, with a manual loss scale": "apply_if_finite",
    "jmp": "jmp",
    "flax": "flax",
}


def test_cost_of_an_optimizer_step():
    stated = {row[0]: row[1:] for row in rows(ROOT / "docs" / "performance.md", "## Overhead of the optimizer step")}
    assert stated.keys() == CONTENDERS.keys()
    for place, gradients in enumerate(["float32 gradients", "float16 gradients"]):
        table = rows(RESULTS / "optimizer.md", f"leaves, {gradients}")
        measured = {row[0]: (row[3], *row[4].split(" to ")) for row in table}
        for name, contender in CONTENDERS.items():
            median, first, third = measured[contender]
            assert stated[name][place].partition(",")[0] == f"{median} ({first} to {third})", name


def test_data_movement_between_devices():
    moved = {(layout, way): number(cells[5]) for layout, way, *cells in rows(RESULTS / "collectives.md", "### Coll")}
    stated = rows(ROOT / "docs" / "guide" / "devices.md", "## What `jls.autocast` moves")
    ways = ("manual casts", "autocast", "autocast, recompute=False", "autocast, table cast")
    assert len(stated) == 4
    for layout, *cells in stated:
        assert [f"{moved[layout, way]:.0f}" for way in ways] == cells, layout


# The traces with NaNs and large values, whose results the page combines.
NANS_AND_LARGE_VALUES = [
    *(f"NaN 1 in {one_in}, 2^6" for one_in in (20, 100, 400)),
    *(f"NaN 1 in {one_in}, 2^12" for one_in in (50, 200)),
    *(f"NaN 1 in {one_in}, 2^8, noise {noise}" for one_in, noise in ((100, 2), (100, 4), (400, 4))),
]


def least_to_most(values):
    """Return the rounded range of the values in the notation of the page."""
    least, most = f"{min(values):.0f}", f"{max(values):.0f}"
    return least if least == most else f"{least} to {most}"


def test_limits_of_the_automatic_scale():
    path = ROOT / "docs" / "choosing.md"
    rare = {row[0]: list(map(float, row[1:])) for row in rows(RESULTS / "policies.md", "### Rare kinds of batches")}
    assert rows(path, "one kind of batch has values") == [
        [f"one in {one_in}", f"{least_to_most(rare[one_in][:-2])}%", f"{rare[one_in][-1]:.0f}%"]
        for one_in in ("50", "200", "400")
    ]
    mixed = {row[0]: list(map(float, row[1:])) for row in rows(RESULTS / "policies.md", "### Large values inside")}
    stated = {factor: skipped for factor, *skipped in rows(path, "In the second table")}
    few = {
        "about 2^8, varies by 3 to 4 bits": ("2^8, noise 3", "2^8, noise 3.5", "2^8, noise 4"),
        "becomes 4 times as large every 1,000 steps, until 2^20": ("grows by 2^2 in 1,000 steps, to 2^20",),
    }
    for factor, names in few.items():
        assert stated.pop(factor) == ["about 1", "at most 1"]
        assert all(mixed[name][0] < 1.2 and mixed[name][2] <= 1 for name in names)
    for factor, name in {
        "the same, until 2^28": "grows by 2^2 in 1,000 steps, to 2^28",
        "about 2^16, varies by 6 bits": "2^16, noise 6",
        "heavy-tailed distribution": "2^8, noise of Student's t, 2",
    }.items():
        auto, _, dynamic, _ = mixed[name]
        assert stated.pop(factor) == [f"{auto:.0f}", f"{dynamic:.0f}"]
    page = words(path)
    assert "both scales skip only the steps with NaNs" in page
    assert max(mixed[f"NaN 1 in {one_in}"][column] for one_in in (20, 50, 100, 200, 400) for column in (0, 2)) < 0.1
    auto, unused, dynamic, dynamic_unused = zip(*(mixed[name] for name in NANS_AND_LARGE_VALUES), strict=True)
    [skipped] = stated.values()
    assert skipped == [f"{least_to_most(auto)}, not counting the steps with NaNs", "0"]
    assert max(dynamic) < 0.5
    text = f'`"dynamic"` leaves {least_to_most(dynamic_unused)} bits unused, and `"auto"` leaves'
    assert f"{text} {least_to_most(unused)} bits" in page


def test_index_of_the_results_is_current():
    assert {path.stem for path in RESULTS.iterdir()} <= {*BENCHMARKS, *ON_REQUEST}
    assert (ROOT / "benchmarks" / "RESULTS.md").read_text() == index(RESULTS)


def test_every_benchmark_has_an_existing_module():
    modules = [benchmark.module for benchmark in (BENCHMARKS | ON_REQUEST).values()]
    assert [module for module in modules if importlib.util.find_spec(f"benchmarks.{module}") is None] == []


def test_bytes_and_times_of_16_bit_parameters():
    names = {
        "none, float32 parameters": "float32 parameters, autocast",
        "none, bfloat16 parameters (loses updates)": "rounded to nearest (loses updates)",
        "`master_weights`": "master weights",
        "`stochastic_rounding`": "stochastic rounding",
        "`half_precision_state`, float32 parameters": "float32 parameters, half-precision state",
        "`master_weights` and `half_precision_state`": "master weights, half-precision state",
        "`stochastic_rounding` and `half_precision_state`": "stochastic rounding, half-precision state",
    }
    results = RESULTS / "sixteen_bit_steps.md"
    steps = {
        (batch, step): (number(stored), number(over), number(time))
        for batch, step, stored, time, over, *_ in rows(results, "### Steps for one H100")
    }
    what = "estimated time over float32 parameters under autocast"
    times = {name.removeprefix(f"{what}, "): time for (name, _), time in marks("sixteen_bit_steps").items()}
    path = ROOT / "docs" / "guide" / "sixteen_bit.md"
    stated = rows(path, "## Which wrapper when")
    assert [wrapper for wrapper, *_ in stated] == list(names)
    timed = {name: cells for name, *cells in rows(RESULTS / "sixteen_bit_times.md", "### Measured on")}
    for wrapper, *_, stored, over, measured in stated:
        bytes_stored, _, time = steps["2 x 512", names[wrapper]]
        assert float(stored) == bytes_stored, wrapper
        over_reference = time / steps["2 x 512", "float32 parameters, autocast"][2]
        assert over == times.get(names[wrapper], f"{over_reference:.2f}"), wrapper
        assert measured == f"{number(timed[names[wrapper]][2]):.2f}", wrapper
    steps_of_float32 = "float32 parameters, autocast", "float32", "float32 parameters, manual casts"
    medians = [number(timed[step][0]) for step in steps_of_float32]
    in_words = "takes {:.2f} ms, compared with {:.2f} ms in float32 and {:.2f} ms with manual casts".format(*medians)
    assert in_words in words(ROOT / "docs" / "performance.md")
    moved = {(layout, step): number(over) for layout, step, *_, over, _ in rows(results, "### Collectives of one of")}
    page = words(path)
    explicit, automatic = moved["FSDP, explicit axes", "master weights"], moved["FSDP", "master weights"]
    assert f"move {explicit:.2f} times (explicit axes) or {automatic:.2f} times (automatic axes) as many bytes" in page
    large = [100 * (1 - steps["32 x 512", names[wrapper]][1]) for wrapper, *_ in stated[1:]]
    assert f"reduce the estimated time by only {min(large):.0f}% to {max(large):.0f}%." in page


def test_final_losses_of_16_bit_parameters():
    path = RESULTS / "sixteen_bit.md"
    heading = "### Final loss with bfloat16 parameters"
    headings = re.search(r"^\|.*", path.read_text().partition(heading)[2], re.MULTILINE)[0].strip("|").split("|")
    columns = [name.strip() for name in headings]
    of_name = {row[0]: dict(zip(columns, row, strict=True)) for row in rows(path, heading)}

    def largest(column, *names):
        cells = [cells[column] for name, cells in of_name.items() if name not in names]
        return max(abs(float(cell.rstrip(" %").replace(",", ""))) for cell in cells if cell[0] in "+-" and cell != "-")

    small = "stochastic rounding, half-precision state"
    assert largest(small) <= 0.2
    page = words(ROOT / "docs" / "guide" / "sixteen_bit.md")
    for column in ("stochastic rounding", small):
        assert largest(column, "pinn") <= 0.16
    for column in ("master weights", "master weights, half-precision state"):
        assert largest(column, "pinn") <= 0.05
    assert "with stochastic rounding (up to 0.16%) than with master weights (up to 0.05%, evaluated in float32)" in page
    assert largest("float32, half-precision state") <= 0.05
    assert "**With float32 parameters and a half-precision state**, the difference is at most 0.05%" in page
    nearest = {name: cells["rounded to nearest"] for name, cells in of_name.items()}
    assert (nearest["convnet"], nearest["pinn"]) == ("+24.9 %", "+1,140 %")
    rest = [cell for name, cell in nearest.items() if name not in ("convnet", "pinn") and "noise" not in cell]
    others = [float(cell.rstrip(" %")) for cell in rest]
    assert 0.75 < min(others) <= max(others) < 5
    assert (of_name["pinn"]["master weights"], of_name["pinn"]["stochastic rounding"]) == ("+40.5 %", "+1.9 %")
