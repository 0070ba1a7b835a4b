"""Map from source files to the tests that check them.

`python tools/source_map.py` writes the map to CONTRIBUTING.md. Run it again after a change of the map.
"""

from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- begin: written by `python tools/source_map.py` -->\n", "<!-- end -->\n"

# The following tests check all public signatures and all error messages.
OF_ALL = ["test_public_api.py", "hardening/test_bad_input.py"]

# The core consists of these files and folders. `tools/mutation.py` changes them and runs these tests in this order.
CORE = {
    "_tree.py": ["test_tree.py", "wrapper/test_step_inputs.py"],
    "_check.py": ["loss_scales", "wrapper/test_step_inputs.py"],
    "_measure": [
        "measure",
        "diagnostics/test_nonfinite.py",
        "diagnostics/test_recording.py",
        "wrapper/test_measuring.py",
        "wrapper/test_devices.py",
        "wrapper/test_sharded_programs.py",
    ],
    "_loss_scale": [
        "loss_scales",
        "test_golden.py",
        "gradients/test_gradients.py",
        "wrapper/test_monitoring.py",
    ],
    "_trainers": ["gradients/test_scaled_backward.py", "wrapper/test_mixed_precision.py"],
    "_sixteen_bit": ["wrapper/test_rounding.py", "wrapper/test_half_parameters.py", "wrapper"],
    "_gradients": [
        "gradients/test_gradients.py",
        "gradients",
        "wrapper/test_data_parallel.py",
        "frameworks/test_nnx.py",
        "frameworks/test_autocast_nnx.py",
    ],
    "_optax": [
        "wrapper/test_step_inputs.py",
        "wrapper/test_measuring.py",
        "wrapper/test_transform.py",
        "wrapper/test_monitoring.py",
        "wrapper/test_data_parallel.py",
        "diagnostics/test_recording.py",
        "diagnostics/true_statements/test_explain.py",
        "wrapper",
        "hardening/test_any_tree.py",
        "hardening/test_properties.py",
    ],
    "_program": [
        "autocast/test_parameters.py",
        "autocast/test_policy.py",
        "autocast/test_structures.py",
        "diagnostics/test_in_precision.py",
        "gradients/test_scaled_backward.py",
        "diagnostics/true_statements/test_layers.py",
        "diagnostics/true_statements/test_facts.py",
        "frameworks/test_autocast_nnx.py",
        "diagnostics/true_statements/test_verdicts.py",
        "diagnostics/finds_faults/test_range_report.py",
        "diagnostics/finds_faults/test_shadow.py",
        "autocast",
        "frameworks/test_nnx.py",
        "diagnostics/true_statements/test_names_and_truth.py",
        "diagnostics/finds_faults/test_programs_of_others.py",
    ],
    "diagnostics/_in_precision.py": [
        "diagnostics/test_in_precision.py",
        "diagnostics/finds_faults/test_compare_gradients.py",
    ],
    "_autocast": [
        "autocast/test_policy.py",
        "autocast/test_exceptions.py",
        "autocast/test_structures.py",
        "autocast",
        "diagnostics/test_traced_gradients.py",
        "diagnostics/true_statements/test_autocast_report.py",
        "frameworks/test_autocast_nnx.py",
        "frameworks/test_lora.py",
    ],
}

# The values are the tests of all other files and folders. A test folder stands for all tests in it.
OTHERS = {
    "jax_lossscale/_compat.py": ["test_versions.py"],
    "jax_lossscale/_limits.py": ["test_limits.py", "diagnostics/test_range.py"],
    "jax_lossscale/_warn.py": ["gradients/test_gradients.py"],
    "jax_lossscale/_version.py": ["test_release.py"],
    "jax_lossscale/diagnostics": ["diagnostics"],
    "jax_lossscale/interop": ["interop", "frameworks", "test_golden.py", "test_peers.py", "test_peer_faults.py"],
    "jax_lossscale/plotting": ["plotting"],
    "jax_lossscale/demo": ["demo"],
    "jax_lossscale/__main__.py": ["demo"],
    "jax_lossscale/__init__.py": ["test_architecture.py", "test_public_api.py", "test_types.py", "hardening"],
    "README.md": ["test_readme.py"],
    "benchmarks": ["benchmarks", "test_stated_numbers.py"],
    "docs": ["test_docs.py", "test_numerics.py", "test_site.py", "test_stated_numbers.py"],
    "examples": ["test_examples.py"],
    "notebooks": ["test_notebooks.py"],
    "tools/source_map.py": ["test_source_map.py"],
    "tools/random_programs.py": ["autocast/test_random_programs.py"],
    "tools/suites.py": ["test_suites.py"],
}
MAP = {f"jax_lossscale/{name}": tests for name, tests in CORE.items()} | OTHERS


def is_below(name, folder):
    """Return whether a path is equal to a folder or lies inside it."""
    return name == folder or name.startswith(f"{folder}/")


def rows():
    """Yield each source with its tests. Tests inside a listed folder are omitted."""
    for source, tests in MAP.items():
        yield source, [test for test in tests if not any(test != other and is_below(test, other) for other in tests)]


def table():
    """Return the map as a Markdown table."""
    lines = [f"| `{source}` | {', '.join(f'`{test}`' for test in tests)} |" for source, tests in rows()]
    return "\n".join(["", "| source | tests, below `tests/` |", "|---|---|", *lines, "", ""])


def with_table(page):
    """Return the text of the page with the current table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
