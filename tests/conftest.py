"""Strict settings for the whole suite, what only CI runs, and a shared fixture."""

import os
from pathlib import Path

TESTS = Path(__file__).parent
# What one run, worker or child process compiled, the others find: most of the time is spent compiling.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# And nearly all of it runs once. Once a week CI sets this to 0.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

# What takes long and breaks seldom. The README's command runs the rest.
ONLY_IN_CI = (
    *("benchmarks", "demo", "frameworks", "interop", "plotting"),
    *("test_docs.py", "test_examples.py", "test_peer_faults.py", "test_peers.py", "test_site.py"),
    *("gradients/test_parts.py", "hardening/test_any_tree.py", "hardening/test_configurations.py"),
    *("hardening/test_faults.py", "hardening/test_properties.py"),
    *("autocast/test_structures.py", "measure/test_largest.py", "measure/test_primitive.py"),
    *("wrapper/test_devices.py", "wrapper/test_eager.py"),
    *("wrapper/test_optimizers.py", "wrapper/test_processes.py", "wrapper/test_resume.py"),
    *("wrapper/test_as_value.py", "wrapper/test_sharded_programs.py", "diagnostics/test_agreement.py"),
    *("autocast/test_acceptance.py", "autocast/test_any_program.py", "autocast/test_mesh.py"),
    *("autocast/test_arguments_and_transformations.py", "autocast/test_in_half.py", "autocast/test_wide_product.py"),
    *("diagnostics/test_arguments.py", "diagnostics/test_autocast_report.py", "diagnostics/test_cost.py"),
    *("diagnostics/test_compare_gradients.py", "diagnostics/test_explain.py", "diagnostics/test_faults_found.py"),
    *("autocast/test_following.py", "diagnostics/test_facts.py", "diagnostics/test_find_precision.py"),
    *("diagnostics/test_in_precision.py", "diagnostics/test_layers.py", "diagnostics/test_models.py"),
    *("diagnostics/test_names_and_truth.py", "diagnostics/test_range.py", "diagnostics/test_range_report.py"),
    *("diagnostics/test_healthy.py", "diagnostics/test_programs_of_others.py"),
    *("diagnostics/test_shadow.py", "diagnostics/test_simulate.py", "diagnostics/test_trainings.py"),
    "gradients/test_accumulation.py::test_a_function_may_close_over_what_is_traced",
    "test_architecture.py::test_the_examples_run",
    "wrapper/test_transform.py::test_the_fast_way_gives_the_bits_of_the_straightforward_one",
)

# What takes longest of what only CI runs, by test and case: once a week. Smaller or quicker cases ask the same.
SLOW_CASES = {
    "autocast/test_in_half.py::test_what_is_differentiated_before_is_the_other_function": ("hessian",),
    "diagnostics/test_compare_gradients.py::test_the_cause_is_named": ("layer_norm", "mask_of_minus_a_billion"),
    "diagnostics/test_compare_gradients.py::test_what_lies_on_a_mesh_is_compared_and_measured_there": (),
    "diagnostics/test_cost.py::test_the_range_report_holds_at_most_four_times_what_a_gradient_does": (),
    "diagnostics/test_find_precision.py::test_each_fault_is_found_and_cured": (
        *("a_loop", "a_shard", "distances", "squares", "two_branches"),
    ),
    "diagnostics/test_find_precision.py::test_in_healthy_networks_every_product_is_narrow": (
        *("float16-a_convolutional_network", "float16-an_lstm", "float16-remat_and_custom_rules"),
    ),
    "diagnostics/test_healthy.py::test_what_is_sound_is_not_accused": (
        *("attention-cross_entropy", "convolution-contrastive", "perceptron-square", "recurrent-small_unit"),
    ),
    "diagnostics/test_models.py::test_whole_models_are_taken": ("nnx_module",),
    "diagnostics/test_names_and_truth.py::test_an_infinity_that_float32_has_is_no_overflow": (),
    "diagnostics/test_programs_of_others.py::test_every_question_has_an_answer": (
        *(f"{name}-range_report" for name in ("bert", "gaussian_process", "mamba", "nnx_classifier", "s5", "vit")),
        *(f"{name}-compare_gradients" for name in ("mamba", "nnx_classifier", "s5", "sinkhorn", "vit")),
        *(f"{name}-find_precision" for name in ("nnx_classifier", "vit")),
    ),
    "diagnostics/test_range.py::test_a_program_grows_by_as_much_with_each_leaf": (),
    "diagnostics/test_range_report.py::test_the_worst_operation_is_the_one_that_is_known": (
        *("mask_of_minus_a_billion", "square_too_large"),
    ),
    "diagnostics/test_shadow.py::test_a_fault_is_called_by_its_name_and_line": (
        *("counts", "difference_of_squares", "loss_in_a_carry", "second_differences"),
    ),
    "diagnostics/test_shadow.py::test_of_a_sound_function_nothing_is_told": (
        *("a_bias_of_the_keys", "recurrent", "transmittances"),
    ),
    "diagnostics/test_trainings.py::test_no_workload_that_trains_is_accused": (),
}
SLOW = {f"{test}[{case}]" for test, cases in SLOW_CASES.items() for case in cases}
SLOW |= {test for test, cases in SLOW_CASES.items() if not cases}

# What speaks of single bits, or of what XLA makes of a program, is compiled as it is for users.
AS_FOR_USERS = (
    *("measure", "test_tree.py", "autocast/test_mesh.py", "hardening/test_properties.py", "wrapper/test_lowering.py"),
    "wrapper/test_sharded_programs.py",
)


def is_among(path, names):
    return any(path == TESTS / name or TESTS / name in path.parents for name in names)


def pytest_ignore_collect(collection_path, config):
    """Import no file whose tests are all left out: half of the files compute what they hold."""
    files = {name.partition("::")[0] for name in ONLY_IN_CI}
    if config.option.markexpr in config.getini("addopts"):
        return True if is_among(collection_path, ONLY_IN_CI) else None
    is_left_out = config.option.markexpr == "ci and not slow" and not is_among(collection_path, files)
    return True if is_left_out and collection_path.name.startswith("test_") else None


def pytest_collection_modifyitems(items):
    """Mark the tests that only CI runs, or only once a week."""
    for item in items:
        name = item.nodeid.removeprefix(f"{TESTS.name}/")
        if is_among(item.path, ONLY_IN_CI) or name.partition("[")[0] in ONLY_IN_CI:
            item.add_marker(pytest.mark.ci)
        if name in SLOW or name.partition("[")[0] in SLOW:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def compiled_programs(request):
    """Forget what a module compiled: another seldom needs it, and kept for the whole run it takes gigabytes."""
    unoptimized = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    jax.config.update("jax_disable_most_optimizations", unoptimized and not is_among(request.path, AS_FOR_USERS))
    yield
    jax.clear_caches()


@pytest.fixture
def compilations():
    """A list that grows by one entry with every program compiled."""
    programs = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield programs
    jax.monitoring.clear_event_listeners()
