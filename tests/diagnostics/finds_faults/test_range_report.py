"""`range_report` names, locates and measures operations that leave the range of a dtype, and suggests a fix."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import workloads
from jax import lax

import jax_lossscale as jls
from jax_lossscale.diagnostics import range_report

SOURCE = "tests/diagnostics/workloads.py:"
pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("in_the_checkout")]


@functools.cache
def reported(name, loss_scale=1.0):
    fun, *args = getattr(workloads, name)()
    return range_report(fun, *args, loss_scale=loss_scale)


# The known worst operation of each workload: its name, the operation of which it is the derivative, its layer, whether
# it is in the backward pass, and words of the suggestion.
KNOWN = {
    "square_too_large": ("integer_pow", "", "energy", False, "Compute `integer_pow` in float32."),
    "matmul_too_large": ("dot_general", "", "logits", False, "Make the operands smaller"),
    "layer_norm": ("div", "rsqrt", "norm", False, "The derivative of `rsqrt`"),
    "mask_of_minus_a_billion": ("convert_element_type", "", "attention", False, "If this is the fill value of a mask"),
    "mean_over_a_million": ("reduce_sum", "", "mean", False, "Compute the sum and the subsequent division in float32"),
    "sum_for_a_mean": ("convert_element_type", "", "", True, "If it overflows at every loss scale, compute"),
    "two_branches": ("convert_element_type", "", "", True, "give this branch a separate loss scale"),
    "tiny_loss": ("convert_element_type", "", "", True, "Use a larger loss scale"),
}


SLOW = ("mask_of_minus_a_billion", "matmul_too_large", "square_too_large", "sum_for_a_mean", "layer_norm")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in KNOWN])
def test_known_worst_operation_is_reported_first(name):
    operation, derivative_of, layer, is_backward, suggestion = KNOWN[name]
    worst = reported(name)[0]
    assert (worst.operation, worst.derivative_of, worst.layer) == (operation, derivative_of, layer)
    assert worst.is_backward is is_backward
    assert suggestion in worst.suggestion
    assert worst.source.startswith(SOURCE)


@pytest.mark.parametrize(("name", "loss_scale"), [("healthy", 2.0**12), ("tiny_loss", 2.0**39)])
def test_summary_if_all_operations_stay_in_range(name, loss_scale):
    report = reported(name, loss_scale)
    assert report.bad == ()
    matmuls, summary = repr(report).splitlines()
    assert matmuls == "Matrix multiplications and convolutions (matmuls): 5 of 5 in float16."
    assert summary.startswith(f"All {len(report)} float16 operations stay in range at a loss scale of 2^")


def test_reported_line_in_a_notebook_is_the_line_in_the_cell(monkeypatch, tmp_path):
    shell_class = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # IPython stores its files in this directory.
    shell = shell_class.instance(config=Config({"HistoryManager": {"hist_file": ":memory:"}}))
    try:
        shell.run_cell(
            "import jax.numpy as jnp\n"
            "from jax_lossscale.diagnostics import range_report\n"
            "def square(w):\n"
            "    return (w.astype(jnp.float16) ** 2).astype(jnp.float32)\n",
            store_history=True,
        ).raise_error()
        shell.run_cell("worst = range_report(square, jnp.float32(300.0))[0]", store_history=True).raise_error()
        assert shell.user_ns["worst"].source == "Cell In[1]:4"
    finally:
        shell_class.clear_instance()


def test_only_operations_of_the_side_branch_underflow():
    underflowing = [operation for operation in reported("two_branches").bad if operation.operation == "dot_general"]
    # The only such operation computes the gradient of the transposed kernel of the side branch.
    assert [operation.shape for operation in underflowing] == [(4, 8)]


# Measured values.


def measured(fun, *args, **options):
    """Return the statistics of the operations of the forward pass, by name of the operation."""
    report = range_report(fun, *args, **{"loss_scale": 1.0, **options})
    return {operation.operation: operation for operation in report if not operation.is_backward}


NUMBERS = np.array([0.0, 1e-9, 2.0**-25, 3e-8, 1e-6, 1.0, 300.0, 70000.0, -65519.0, -65520.0], np.float32)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_shares_equal_those_of_a_numpy_cast(dtype):
    with np.errstate(over="ignore"):
        cast = NUMBERS.astype(dtype).astype(np.float32)
    nonzero = NUMBERS != 0
    normal = float(jnp.finfo(dtype).smallest_normal)

    def fun(x):
        return jnp.sum(x.astype(dtype).astype(jnp.float32))

    of = measured(fun, jnp.asarray(NUMBERS), dtype=dtype)["convert_element_type"]
    assert of.overflow == pytest.approx(np.mean(np.isinf(cast)))
    assert of.zero == pytest.approx(np.mean(cast[nonzero] == 0))
    assert of.subnormal == pytest.approx(np.mean((cast[nonzero] != 0) & (np.abs(cast[nonzero]) < normal)))
    assert of.largest == 70000
    assert (of.shape, of.dtype) == ((10,), jnp.dtype(dtype).name)


def test_number_of_bits_above_and_below_the_range():
    def fun(x, power):
        return jnp.sum((x.astype(jnp.float16) * jnp.float16(power)).astype(jnp.float32))

    above = measured(functools.partial(fun, power=2.0**10), jnp.float32(2.0**9))["mul"]
    below = measured(functools.partial(fun, power=2.0**-10), jnp.float32(2.0**-9))["mul"]
    inside = measured(functools.partial(fun, power=2.0**-5), jnp.float32(2.0**-9))["mul"]
    # The powers of two that are normal numbers in float16 range from 2**-14 to 2**15.
    assert (above.log2_overflow, above.log2_underflow, above.largest) == (4, 0, 2.0**19)
    assert (below.log2_overflow, below.log2_underflow) == (0, 5)
    assert (inside.log2_overflow, inside.log2_underflow, inside.suggestion) == (0, 0, "")


def test_loss_scale_affects_only_the_backward_pass():
    one, many = reported("healthy"), reported("healthy", 2.0**12)
    key = lambda of: (of.is_backward, of.operation, of.source, of.layer, of.shape, of.largest)  # noqa: E731
    for a, b in zip(sorted(one, key=key), sorted(many, key=key), strict=True):
        assert b.largest == pytest.approx(a.largest * (2.0**12 if a.is_backward else 1))


def test_overflow_does_not_hide_the_next_overflow():
    def fun(x):
        x = x.astype(jnp.float16)
        return jnp.sum(jnp.exp(-(x * x) * x).astype(jnp.float32))

    report = range_report(fun, jnp.full(3, 300.0), loss_scale=1.0)
    assert [(o.operation, o.largest) for o in report.forward_overflows()] == [("mul", 90000), ("mul", 27e6)]


def test_value_that_is_infinite_in_float32_is_measured():
    of = measured(lambda x: jnp.sum(jnp.log(x.astype(jnp.float16))).astype(jnp.float32), jnp.array([-1.0, 0.0, 1.0]))
    assert of["log"].overflow == pytest.approx(1 / 3)  # The value -inf is also the float32 result.
    assert math.isnan(of["log"].largest)


def test_smaller_scale_is_not_suggested_for_a_nan_at_every_scale():
    def fun(x):
        return jnp.linalg.norm((0 * x.astype(jnp.float16)).astype(jnp.float32))

    worst = range_report(fun, jnp.ones(3), loss_scale=1.0)[0]
    assert worst.is_backward
    assert "no loss scale helps" in worst.suggestion


# Control flow.


def grows(x, steps):
    """Square a value in each step of a scan. The value 4 becomes 16, 256 and 65536."""
    return jax.lax.scan(lambda carry, _: (carry * carry, None), x, None, length=steps)[0]


def in_a_while_loop(x):
    """Multiply a number by 1, 30000 and 2, each in one iteration, so that the second iteration is the worst."""
    factors = jnp.array([1, 30000, 2], jnp.float16)

    def body(state):
        n, carry, _ = state
        return n + 1, carry, carry * factors[n]

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x, x * 0))[2]


CONTROL_FLOW = {
    "scan": lambda x: grows(x, 3),
    "reverse scan with inputs": lambda x: lax.scan(
        lambda c, y: (c * y, c), x, jnp.full(9, 4, jnp.float16), reverse=True
    )[0],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda _, x: x * x, x),
    "while_loop": lambda x: lax.stop_gradient(in_a_while_loop(lax.stop_gradient(x))) * 1 + 0 * x,
    "cond": lambda x: lax.cond(x > 0, lambda x: x * jnp.float16(30000), lambda x: x * 1, x),
    "switch": lambda x: lax.switch(1, [jnp.sin, lambda x: x * jnp.float16(30000), jnp.cos], x),
    "jit": jax.jit(lambda x: x * jnp.float16(30000)),
    "checkpoint": jax.checkpoint(lambda x: x * jnp.float16(30000)),
    "scan of a checkpoint": lambda x: lax.scan(jax.checkpoint(lambda c, _: (c * c, None)), x, None, length=3)[0],
    "vmap": lambda x: jax.vmap(lambda y: y * jnp.float16(30000))(x[None])[0],
    "custom_jvp": lambda x: jax.nn.relu(x * jnp.float16(30000)),
    "scan of a cond": lambda x: lax.scan(
        lambda c, n: (lax.cond(n == 1, lambda c: c * jnp.float16(30000), lambda c: c, c), None), x, jnp.arange(3)
    )[0],
}


@pytest.mark.parametrize("flow", CONTROL_FLOW)
def test_operations_in_control_flow_are_measured(flow):
    def fun(x):
        with jax.named_scope("inside"):
            y = CONTROL_FLOW[flow](x.astype(jnp.float16))
        return y.astype(jnp.float32)

    report = range_report(fun, jnp.float32(4.0), loss_scale=1.0)
    over = report.forward_overflows()
    assert over[0].operation == "mul"
    assert {operation.layer for operation in over} == {"inside"}
    sources = {operation.source.split(":")[0] for operation in over}
    assert sources == {"tests/diagnostics/finds_faults/test_range_report.py"}
    squared = ("scan", "fori_loop", "scan of a checkpoint")
    expected = 2.0**20 if "inputs" in flow else 2.0**16 if flow in squared else 120000
    assert over[0].largest == expected


def test_recomputed_forward_pass_is_not_backward():
    def fun(x):
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x.astype(jnp.float16))))(x).astype(jnp.float32)

    report = range_report(fun, jnp.float32(1.0), loss_scale=2.0**10)
    assert {o.is_backward for o in report if o.operation in ("sin", "cos")} == {False}
    assert {o.is_backward for o in report if o.largest > 2} == {True}


def test_measured_gradients_equal_those_of_in_precision():
    """The largest gradients that are measured equal those of `in_precision`."""
    fun, *args = workloads.healthy()
    grads = jax.jit(jax.grad(jls.diagnostics.in_precision(fun)))(*args)
    largest = {o.shape: o.largest for o in reported("healthy") if o.is_backward and o.operation == "dot_general"}
    for kernel in (grads["layer0"]["kernel"], grads["layer1"]["kernel"]):
        assert largest[kernel.shape[::-1]] == pytest.approx(float(jnp.max(jnp.abs(kernel))), rel=1e-6)


# Arguments, and functions that cannot be measured completely.


@pytest.mark.parametrize(
    "loss_scale", [jls.FixedLossScale(8.0), jls.DynamicLossScale(8.0), 8, jnp.float32(8), np.float32(8)]
)
def test_loss_scale_may_be_a_number_or_a_loss_scale(loss_scale):
    report = range_report(lambda x: jnp.sin(x.astype(jnp.float16)).astype(jnp.float32), 1.0, loss_scale=loss_scale)
    assert report.loss_scale == 8
    assert {operation.largest for operation in report if operation.is_backward} >= {8.0}


def test_function_without_half_precision_is_reported():
    report = range_report(lambda w: jnp.sum(w**2), jnp.ones(3))
    assert len(report) == 0
    assert repr(report).splitlines()[1].startswith("`fun` computes nothing in float16.")


# Printed reports.


def test_report_is_printed_as_a_table_with_suggestions_below():
    matmuls, summary, headings, first, second, *notes = repr(reported("layer_norm")).splitlines()
    assert matmuls == "Matrix multiplications and convolutions (matmuls): none."
    assert summary == "At a loss scale of 2^0, 2 of 25 float16 operations overflow."
    names = (
        "operation layer line pass shape largest out of range by overflow zero subnormal input error error suggestion"
    )
    assert headings.split() == names.split()
    assert first.startswith("div (derivative of rsqrt)  norm   tests/diagnostics/workloads.py:")
    assert first.split()[-6:] == ["3.2e+07", "2^9", "3.1%", "0.035%", "inf", "[1]"]
    assert second.startswith("mul (derivative of rsqrt)")
    assert len(notes) == 1
    assert notes[0].startswith("[1] The derivative of `rsqrt` is computed in the forward pass, so no loss scale helps.")


def test_summary_names_the_dtype_of_a_function_in_another_half_precision_dtype():
    def loss(w, x):
        return jnp.sum(jnp.square(x @ w))

    report = jls.diagnostics.range_report(jls.autocast(loss, jnp.bfloat16), jnp.full((8, 8), 1e4), jnp.ones((4, 8)))
    number = sum(operation.dtype == "bfloat16" for operation in report)
    assert f" of {number} bfloat16 operations overflow in float16" in str(report)


def test_operations_that_overflow_are_listed_in_the_order_of_the_program():
    def fun(w, x):
        w, x = w.astype(jnp.float16), x.astype(jnp.float16)
        first, second = w * w, x * x
        return jnp.sum(first.astype(jnp.float32)) + jnp.sum(second.astype(jnp.float32))

    # In the second product, three elements also become zero.
    report = jls.diagnostics.range_report(fun, jnp.full(4, 1e3), jnp.array([1e3, 1e-5, 1e-5, 1e-5]))
    assert [(each.overflow, each.zero) for each in report.operations[:2]] == [(1.0, 0.0), (0.25, 0.75)]
