"""Which products must not be in half precision: found by measuring what each of them does to the gradients.

Around each product that `autocast` makes narrow stand probes: identities that know which product it is, and that leave
others in the backward pass. The program of value and gradient is traced and compiled once. Where it meets a probe it
rounds the number to half precision, or leaves it, by a number that is an argument. So one program is the function in
float32, under `autocast`, and under each policy. A probe of the backward pass has the value of the forward pass that
its cotangent belongs to: the two tell what rounding this value changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir
from jax.typing import DTypeLike

from jax_lossscale._autocast import PrecisionPolicy, PrecisionRule, autocast
from jax_lossscale._autocast.planner import Planner
from jax_lossscale._autocast.rewrite import Rewriting
from jax_lossscale._check import check_flag, checked_dtype, is_number
from jax_lossscale._limits import limits_of
from jax_lossscale._measure.devices import vary
from jax_lossscale._program import custom_rules, nnx_objects
from jax_lossscale._program.jaxpr import Traced, bind, bind_here
from jax_lossscale._program.location import Location, location_within
from jax_lossscale._program.parameters import parameters_of_operations, path_of
from jax_lossscale._warn import warn_user
from jax_lossscale.diagnostics._asked._question import Call, called
from jax_lossscale.diagnostics._errors import _gradient_errors as errors
from jax_lossscale.diagnostics._report import off, percent, power_of_two, tell
from jax_lossscale.diagnostics._shadow._shadow import MeasuringEvaluator, Rows
from jax_lossscale.diagnostics._tree._bits import reduced

_TOLERANCE = 0.01  # of float16, which has 11 bits; of a dtype with fewer, as much more
_MOST_GRADIENTS = 30
_OF_VERIFYING = 6
_EXACT = {"xla_allow_excess_precision": False}
# What becomes of the products of a site: levels, and how rules name them.
_NARROW, _WIDE_RESULT, _WIDE = range(3)
_PRECISIONS = ("half", "float32_result", "float32")
# What is probed of a product; and of each, its cotangent.
_LEFT, _RIGHT, _RESULT = range(3)
_VALUES, _COTANGENTS = slice(0, 3), slice(3, 6)
# How far the loss scale is below the largest that fits, since batches differ.
_LOG2_HEADROOM = 1
# Parameters moved by this much turn the sign of what goes into a ReLU as often as float16 does, layer after layer. The
# products are not to blame for what that changes, up to so many times the tolerance.
_COARSE = 2.0**-9
_MOST_SENSITIVE = 10.0
# A leaf with less than the first share of the gradient may have ten times its error: it is small because much cancels.
# Of one with less than the second, only what is lost counts.
_SMALL_SHARE = 0.01
_TINY_SHARE = 0.001
_SMALL_LEAF = 10.0


def find_precision(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    dtype: DTypeLike = jnp.float16,
    tolerance: float | None = None,
    batches: Sequence[Any] | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> PrecisionPolicy:
    """Find which products of a function must stay float32, by measurement, so that `autocast` gets it right.

    The function is compared with itself: the program of its value and gradients, compiled once, rounds at each product
    what `autocast` would round, or leaves it. All products are narrow at first. If that is within the tolerance of
    float32, the policy is empty. If not, products whose operands or results exceed the range of ``dtype`` are widened;
    then those of which much is too small for it, values and cotangents; then those whose rounding errors, times their
    cotangents, are largest, until it is within half the tolerance, since other batches come. What was widened without
    need is made narrow again, by bisection, until nothing changes. In the end the function is computed under `autocast`
    with the policy, to be sure.

    A product whose result is at fault keeps its operands narrow, and has a float32 result, which costs tensor cores
    nothing. The loss scale is, for each trial, the largest with which nothing overflows. All this takes at most the
    time of 30 gradients.

    Args:
      fun: a scalar-valued function written for float32, as it would be given to `autocast`.
      *args: its arguments: parameters, or a whole model, and one batch, as in `compare_gradients`.
      argnums: as in `jax.value_and_grad`.
      has_aux: likewise.
      dtype: float16 or bfloat16.
      tolerance: how far the value, the gradients of all leaves together, and those of each leaf may be from float32's,
        relative to their norm. By default 0.01 for float16 and 0.08 for bfloat16. A leaf with less than a hundredth of
        the whole gradient may be ten times as far. Of one with less than a thousandth, only what becomes zero or not
        finite counts; one that is zero, or nothing but rounding, in float32 is not looked at.
      batches: more batches, for which the policy must be right, too: values for the last of ``args``, of the same
        shapes.
      progress: whether to print a line for each trial, on standard error.
      **kwargs: keyword arguments of ``fun``. One that is named like an option of this function must be bound
        beforehand, with `functools.partial`.

    Returns:
      A `PrecisionPolicy` for `autocast`, whose rules say why. They name layers, parameters, operations and functions,
      so they are right for other values, another batch size, and after edits elsewhere. Its ``loss_scale`` is that of
      the last trial, and its ``errors`` are those with all products narrow, and with the rules.

    Raises:
      ValueError: if an argument is not of its kind; if there are no gradients; inside `jax.jit` and other
        transformations.

    Warns:
      UserWarning: if value or gradients are not finite in float32 either; if most gradients are zero in float32; if the
        policy is not within the tolerance; if less than half of the products stay narrow.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> import jax_lossscale as jls
      >>> def loss_fn(weights, x):
      ...     with jax.named_scope("energy"):
      ...         energy = x @ weights  # 1.6e5
      ...     return jnp.mean(jnp.log(energy))
      >>> args = jnp.full((4, 2), 200.0), jnp.full((8, 4), 200.0)
      >>> policy = jls.diagnostics.find_precision(loss_fn, *args)
      >>> policy.rules
      (PrecisionRule('float32_result', layer='energy', operation='dot_general', reason='its result reaches 1.6e+05'),)
      >>> float(jls.autocast(loss_fn, policy=policy)(*args)) == float(loss_fn(*args))
      True
    """
    call = called("find_precision", fun, args, kwargs, argnums, has_aux)
    dtype = checked_dtype(dtype, "find_precision(dtype=...)")
    if dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"`find_precision(dtype=...)` must be float16 or bfloat16, got {dtype.name}.")
    check_flag(progress, "find_precision(progress=...)")
    if tolerance is None:
        tolerance = _TOLERANCE * float(jnp.finfo(dtype).eps / jnp.finfo(jnp.float16).eps)
    if not is_number(tolerance) or not 0 < float(tolerance) < 1:
        raise ValueError(f"`find_precision(tolerance=...)` must be a number between 0 and 1, got {tolerance!r}.")
    tolerance = float(tolerance)
    of_batches = [call.with_args(each) for each in _all_batches(args, batches)]
    if not jax.tree.leaves([call.args[position] for position in call.positions]):
        raise ValueError(f"`find_precision(argnums={argnums})` selects no floating or complex argument.")
    if progress:
        tell("find_precision", f"compiles two programs, and takes at most the time of {_MOST_GRADIENTS} gradients")
    # Under `autocast` the parameters of nnx modules have other paths than here.
    search = Search(of_batches, dtype, tolerance, bool(progress), not nnx_objects.flattened((args, kwargs)).objects)
    if not search.is_exact_finite():
        faults = call.faults()
        why = " ".join(faults.nan + faults.infinite) or "`jls.diagnostics.compare_gradients` tells where it begins."
        warn_user(
            "`find_precision`: value or gradients are not finite in float32 either, so there is nothing to compare "
            f"with. {why} The policy has no rules."
        )
        return PrecisionPolicy()
    if sum(math.prod(leaf.shape) * (2 * leaf.is_zero - 1) for leaf in search.leaves) > 0:
        warn_user(f"`find_precision`: {errors.of_zeros(search.leaves)}")

    def policy(trial: _Trial, reasons: Sequence[str] | None = None) -> PrecisionPolicy:
        return PrecisionPolicy(tuple(_rules_for(search.sites, trial.levels, reasons)), loss_scale=trial.scale)

    search.tell(f"{search.numbers.sum()} products at {len(search.sites)} places, {len(of_batches)} batches")
    first, best = search.found()
    while True:
        ratio, error, where = search.verified(policy(best))
        search.tell(f"under `autocast`, {where} is {off(error)}")
        if ratio <= 1 or not (best.levels < _WIDE).any():
            break
        best = search.wider(best, max(1, int((best.levels > 0).sum())))
    if ratio > 1:
        warn_user(
            f"`find_precision`: with every product in float32, {where} is {off(error)}, more than the "
            f"tolerance of {percent(tolerance)}. It is not {dtype.name} that is to blame."
        )
    narrow = int(search.numbers[best.levels < _WIDE].sum())
    if 2 * narrow < search.numbers.sum():
        warn_user(
            f"`find_precision`: only {narrow} of {search.numbers.sum()} products stay narrow, so little is gained. "
            f"`jls.diagnostics.compare_gradients(jls.autocast(fun), ...)` says what is wrong with {dtype.name} there."
        )
    before_and_after = min(first.error, 1.0), min(error, 1.0)
    return dataclasses.replace(policy(best, search.reasons(best)), errors=before_and_after)


def _all_batches(args: tuple[Any, ...], batches: Any) -> list[tuple[Any, ...]]:
    """Give the arguments, once for each batch."""
    if batches is None:
        return [args]
    if not isinstance(batches, Sequence) or isinstance(batches, str) or len(batches) == 0:
        raise ValueError(
            f"`find_precision(batches=...)` must be a sequence of values for the last argument, got {batches!r}. Put a "
            "single one into a list."
        )
    types = [jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), each) for each in (args[-1], *batches)]
    for other in types[1:]:
        if other != types[0]:
            raise ValueError(
                "`find_precision(batches=...)` must hold values like the last argument, of the same structure, shapes "
                f"and dtypes; that is {types[0]}, and one is {other}."
            )
    return [args, *((*args[:-1], batch) for batch in batches)]


# Probes, and the program that they stand in.


class _ProductSite(NamedTuple):
    """Products, or calls of `in_half`, that no rule of a policy can tell apart."""

    operation: str
    place: Location  # of which rules know the layer, the source, the functions and the parameter


_Met: TypeAlias = dict[_ProductSite, dict[int, Any]]  # the products at each site, by their ids


class _Measured(NamedTuple):
    """What a probe measures.

    Attributes:
      largest: the largest magnitude.
      error: the sum of rounding errors, relative to that of magnitudes.
      damage: of a cotangent, the sum of its magnitudes times the rounding errors of the value that it belongs to: what
        rounding that value changes in the result, to first order.
    """

    largest: Any
    error: Any
    damage: Any


def _probed(fun: Callable[..., Any], dtype: jnp.dtype, names_parameters: bool, met: _Met) -> Callable[..., Any]:
    """Make the function with probes; note the products that are met when it is traced."""

    def with_probes(*args: Any, **kwargs: Any) -> Any:
        traced = Traced(fun, args, kwargs)
        parameters = parameters_of_operations(traced, args, kwargs) if names_parameters else {}

        def product(eqn: Any, within: tuple[Any, ...], operands: Sequence[Any]) -> list[Any]:
            place = location_within(eqn, within)._replace(stack="", column="", is_backward=False, instructions=())
            site = _ProductSite(eqn.primitive.name, place._replace(parameter=parameters.get(path_of(within, eqn), "")))
            met.setdefault(site, {})[id(eqn)] = eqn  # kept, lest its id be taken by another
            number = list(met).index(site)
            operands = [_probe_float(value, number, min(n, _RIGHT)) for n, value in enumerate(operands)]
            # Else a GPU would round operands that are meant to be exact.
            exact = {"precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)} if "precision" in eqn.params else {}
            return [_probe_float(value, number, _RESULT) for value in bind_here(eqn, operands, {**eqn.params, **exact})]

        planner = Planner(dtype, PrecisionPolicy(recompute=False))
        plan = planner.plan(traced.jaxpr)
        return traced.result(Rewriting(planner, measured=product).declared(plan, traced.jaxpr, traced.inputs))

    return with_probes


_probe_primitive = Primitive("probe")  # of a number, and of the value that it belongs to
_probe_primitive.def_impl(lambda number, value, **_: number)
_probe_primitive.def_abstract_eval(lambda number, value, **_: number)
mlir.register_lowering(_probe_primitive, lambda context, number, value, **_: [number])


def _differentiate(primals: Any, tangents: Any, *, kind: str, **at: int) -> tuple[Any, Any]:
    (number, value), (tangent, _) = primals, tangents
    if not isinstance(tangent, ad.Zero):
        tangent = _probe_primitive.bind(tangent, value, kind="tangent", **at)
    return _probe_primitive.bind(number, value, kind=kind, **at), tangent


def _transpose(cotangent: Any, number: Any, value: Any, *, kind: str, **at: int) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [cotangent, None]
    if ad.is_undefined_primal(value):  # of a function that is linear, and transposed as it stands: there is no value
        value = jnp.zeros_like(cotangent)
    return [_probe_primitive.bind(cotangent, value, kind="cotangent", **at), None]


ad.primitive_jvps[_probe_primitive] = _differentiate
ad.primitive_transposes[_probe_primitive] = _transpose


def _probe_float(value: Any, site: int, role: int) -> Any:
    is_probed = value.dtype == jnp.float32
    return _probe_primitive.bind(value, value, site=site, role=role, kind="value") if is_probed else value


class _RoundingEvaluator(MeasuringEvaluator):
    """Evaluates jaxprs with probes, each of which measures, and adds a row of the fields of `_Measured`.

    Args:
      dtype: the half precision.
      strengths: ``float32[2, sites]``: whether what is rounded, 0 or 1: the result of each product, and all else (its
        operands, and every cotangent).
      axes: those of the mesh that it is evaluated on, inside `jax.shard_map`.
    """

    fields = len(_Measured._fields)

    def __init__(self, dtype: jnp.dtype, strengths: Any = None, axes: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._dtype, self._strengths, self._axes = dtype, strengths, axes

    def goes_into(self, eqn: Any) -> bool:
        return super().goes_into(eqn) and bool(self.names_within(eqn))

    def measured_of(self, eqn: Any) -> list[Any]:
        """Name a probe by its site and its role; the roles of cotangents come after those of values."""
        if eqn.primitive is not _probe_primitive or eqn.params["kind"] == "tangent":
            return []
        roles = _COTANGENTS if eqn.params["kind"] == "cotangent" else _VALUES
        return [(eqn.params["site"], roles.start + eqn.params["role"])]

    def nothing(self, program: ClosedJaxpr) -> Rows:
        return [vary(row, self._axes) for row in super().nothing(program)]

    def operation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        for site, role in self.measured_of(eqn):
            number, value = inputs
            self.rows.append(vary(_statistics(number, value, self._dtype, role >= _COTANGENTS.start), self._axes))
            is_rounded = self._strengths[0 if role == _RESULT else 1, site] > 0
            return [jnp.where(is_rounded, number.astype(self._dtype).astype(number.dtype), number)]
        return bind(eqn, inputs, eqn.params)

    def _shard_map(self, eqn: Any, inputs: list[Any]) -> Any:
        """Return what each shard measures as an output that is divided over the mesh."""
        axes = custom_rules.axes_of_shard_map(eqn)
        of_shards = _RoundingEvaluator(self._dtype, self._strengths, axes)

        def evaluated(jaxpr: ClosedJaxpr, shards: Sequence[Any]) -> list[Any]:
            outputs, rows = of_shards.evaluate(jaxpr, shards)
            return [*outputs, *(row[None] for row in rows)]

        divided = [jax.sharding.PartitionSpec(tuple(sorted(axes)))] * len(self.names_within(eqn))
        outputs = custom_rules.shard_map(evaluated, eqn, inputs, more_out_specs=divided)
        count = len(eqn.outvars)
        return outputs[:count], [vary(jnp.max(row, axis=0), self._axes) for row in outputs[count:]]

    rules: ClassVar[dict[str, Callable[..., Any]]] = MeasuringEvaluator.rules | {"shard_map": _shard_map}


def _statistics(number: jax.Array, value: jax.Array, dtype: jnp.dtype, is_cotangent: bool) -> jax.Array:
    def rounding(number: jax.Array, otherwise: jax.Array) -> jax.Array:
        """Give the magnitudes of the rounding errors, and something else where they are not finite."""
        error = jnp.abs(number.astype(dtype).astype(number.dtype) - number)
        return jnp.where(jnp.isfinite(error), error, jnp.where(jnp.isfinite(otherwise), otherwise, 0))

    magnitude = jnp.where(jnp.isfinite(number), jnp.abs(number), 0)
    damages = magnitude * rounding(value, jnp.abs(value)) if is_cotangent else jnp.zeros_like(magnitude)
    largest, error, norm, damage = reduced([magnitude], [rounding(number, magnitude), magnitude, damages])
    return jnp.stack([largest, error / jnp.where(norm > 0, norm, 1), damage])


# Trials, and the search.


class _Trial(NamedTuple):
    """What was found with some products wide.

    Attributes:
      levels: ``int[sites]``: narrow, with a wide result, or wide.
      scale: the loss scale.
      ratio: the worst error of the value, of all gradients or of a leaf, over what it may be.
      error: that error; infinite if anything is not finite.
      where: of what it is, in words.
    """

    levels: np.ndarray
    scale: float
    ratio: float
    error: float
    where: str

    @property
    def is_right(self) -> bool:
        """Whether all errors are within what they may be; once something is wide, half of it: other batches come."""
        return self.ratio <= (0.5 if self.levels.any() else 1.0)


class _Exact(NamedTuple):
    """What float32 gives for a batch.

    Attributes:
      value: the value.
      leaves: the gradients by path.
      rounding: how much of each gradient is rounding in float32, too.
      tolerances: how large the errors of the value, of each leaf and of all may be; 0 where they are not judged.
      total: the norm of all gradients.
    """

    value: Any
    leaves: dict[str, Any]
    rounding: list[errors.Measurement]
    tolerances: list[float]
    total: float

    def judged(self, value: Any, leaves: dict[str, Any], scale: float) -> list[tuple[float, float, str]]:
        """Give the errors of a result at a loss scale: each over what it may be, as it is, and of what it is."""
        reports, total = errors.reports_of(self.leaves, [errors.measure(leaves, self.leaves, scale)], self.rounding)
        found = [("the value", errors.relative_error(value, self.value))]
        for leaf in reports:
            is_tiny = leaf.norm < _TINY_SHARE * self.total and not leaf.nonfinite[0]
            error = leaf.lost[0] if is_tiny else leaf.relative_error[0]
            found.append((f"the gradient of {leaf.path or 'the only leaf'}", error))
        found.append(("the whole gradient", total.relative_error[0]))
        return [
            (error / tolerance, error, name)
            for (name, error), tolerance in zip(found, self.tolerances, strict=True)
            if tolerance
        ]


class Search:
    """A function on some batches, that is tried with some products wide, until what is wide is enough, and needed.

    Attributes:
      sites: the products that `autocast` makes narrow.
      numbers: how many products there are at each site.
      spent: how many gradients have been computed, for each batch.
      leaves: the gradients of the first batch in float32.
    """

    def __init__(
        self, batches: Sequence[Call], dtype: jnp.dtype, tolerance: float, progress: bool, names_parameters: bool
    ) -> None:
        self._call, self._batches, self._progress = batches[0], batches, progress
        self._dtype, self._tolerance, self._overflow = dtype, tolerance, limits_of(dtype).overflow
        self.spent = 0
        self._known: dict[bytes, _Trial] = {}
        met: _Met = {}
        self._traced, _ = self._call._replace(fun=_probed(self._call.fun, dtype, names_parameters, met)).scaled()
        self.sites, self.numbers = tuple(met), np.array([len(equations) for equations in met.values()], int)

        def measured(strengths: Any, scale: Any, inputs: Any) -> Any:
            outputs, rows = _RoundingEvaluator(dtype, strengths).evaluate(self._traced.jaxpr, [scale, *inputs])
            return outputs, jnp.asarray(rows)

        self._compiled = jax.jit(measured, compiler_options=_EXACT)
        self._names = _RoundingEvaluator(dtype).names(self._traced.jaxpr)  # of the rows
        wide = np.full(len(self.sites), _WIDE)
        exact, measured_of = self._run(wide, 1.0)
        self._largest = measured_of.largest  # in float32, unscaled: ``float[sites, 2 * roles]``
        damage = np.nan_to_num(measured_of.damage[:, _COTANGENTS])
        self._damages = np.stack([damage[:, _RESULT], damage[:, [_LEFT, _RIGHT]].sum(axis=1)], axis=1)
        nudged = (
            [errors.nudged(batch, keep_dtypes=False, by=by) for batch in batches] for by in (errors.NUDGE, _COARSE)
        )
        results = zip(exact, *(self._run(wide, 1.0, each)[0] for each in nudged), strict=True)
        self._exact = [self._judged(*of_batch) for of_batch in results]
        first = self._exact[0]
        self.leaves, _ = errors.reports_of(first.leaves, [first.rounding], first.rounding)

    def _judged(self, exact: Any, fine: Any, coarse: Any) -> _Exact:
        """Say how large errors may be, by what two nudges of the parameters change in float32.

        An error is not judged if the fine nudge makes one as large. It may be larger if the coarse nudge, which is like
        rounding to half precision, makes one, as where it turns the sign of what goes into a ReLU.
        """
        value, leaves = exact
        rounding = errors.measure(fine[1], leaves, 1.0)
        reports, total = errors.reports_of(leaves, [errors.measure(coarse[1], leaves, 1.0)], rounding)
        of_value = errors.relative_error(fine[0], value)

        def allowed(coarse: float, fine: float) -> float:
            """Say how large an error may be, by what the two nudges change: in proportion to them, without kinks."""
            if coarse <= 2 * fine * _COARSE / errors.NUDGE:
                return self._tolerance
            return min(max(coarse, self._tolerance), _MOST_SENSITIVE * self._tolerance)

        tolerances = [allowed(errors.relative_error(coarse[0], value), of_value) * (of_value <= self._tolerance / 2)]
        for leaf in reports:
            is_judged = leaf.norm > 0 and not leaf.rounding > self._tolerance / 2
            times = _SMALL_LEAF if leaf.norm < _SMALL_SHARE * total.norm else 1.0
            tolerances.append(is_judged * times * allowed(leaf.relative_error[0], leaf.rounding))
        tolerances.append(allowed(total.relative_error[0], total.rounding))
        return _Exact(value, leaves, rounding, tolerances, total.norm)

    def _run(
        self, levels: np.ndarray, scale: float, batches: Sequence[Sequence[Any]] | None = None
    ) -> tuple[list[Any], _Measured]:
        """Give the value and the gradients by path for each batch, and the worst that the probes measure."""
        self.spent += 1
        strengths = jnp.asarray(np.stack([levels < _WIDE_RESULT, levels < _WIDE]), jnp.float32)
        worst, results = np.zeros((len(self.sites), _COTANGENTS.stop, len(_Measured._fields))), []
        for args in batches or [batch.args for batch in self._batches]:
            inputs = self._traced.inputs_from((np.float32(1), *args), self._call.kwargs)[1:]
            outputs, rows = self._compiled(strengths, jnp.float32(scale), inputs)
            for site_and_role, row in zip(self._names, np.asarray(rows), strict=True):
                worst[site_and_role] = np.maximum(worst[site_and_role], row)
            results.append(errors.value_and_leaves(self._traced.result(outputs), self._call.has_aux))
        return results, _Measured(*np.moveaxis(worst, -1, 0))

    def _measured_at(self, scale: float) -> _Measured:
        """Give what the probes meet in float32, at a loss scale."""
        return self._run(np.full(len(self.sites), _WIDE), scale)[1]

    def _errors(self, results: Callable[[], Sequence[Any]], scale: float) -> tuple[float, float, str]:
        """Give the worst error in the values and gradients of the batches."""
        found = [(0.0, 0.0, "nothing")]
        try:
            for (value, leaves), exact in zip(results(), self._exact, strict=True):
                found += exact.judged(value, leaves, scale)
        except (RuntimeError, ValueError) as error:  # of a solver, say, that refuses infinities
            if not errors.is_of_the_program(error):
                raise
            found.append((math.inf, math.inf, "the value"))
        return max(found)

    def is_exact_finite(self) -> bool:
        """Tell whether value and gradients are finite in float32."""
        numbers = (number for each in self._exact for number in (each.value, *(leaf.largest for leaf in each.rounding)))
        return all(map(math.isfinite, numbers))

    def verified(self, policy: PrecisionPolicy) -> tuple[float, float, str]:
        """Give the error of the function itself, under `autocast` with a policy, as a trial has it."""
        self.spent += 1
        traced, _ = self._call._replace(fun=autocast(self._call.fun, self._dtype, policy=policy)).scaled()
        compiled = jax.jit(jaxpr_as_fun(traced.jaxpr), compiler_options=_EXACT)
        scale = policy.loss_scale or 1.0

        def results() -> list[Any]:
            inputs = (traced.inputs_from((np.float32(scale), *batch.args), batch.kwargs) for batch in self._batches)
            return [errors.value_and_leaves(traced.result(compiled(*each)), self._call.has_aux) for each in inputs]

        return self._errors(results, scale)

    def tell(self, what: str) -> None:
        """Print a line if progress is asked for."""
        if self._progress:
            tell("find_precision", f"{self.spent} of at most {_MOST_GRADIENTS} gradients; {what}")

    def _best_scale(self, levels: np.ndarray) -> float:
        """Give the largest power of two with which no cotangent of a narrow product overflows, with a little room."""
        if self._dtype != jnp.float16:
            return 1.0
        largest = self._largest[levels < _WIDE, _COTANGENTS].max(initial=0.0)
        if not 0 < largest < math.inf:
            return 2.0**15
        return 2.0 ** min(max(math.floor(math.log2(self._overflow / largest)) - _LOG2_HEADROOM, -100), 100)

    def _trial(self, levels: np.ndarray) -> _Trial:
        """Try the products of each site narrow or wide, at the best loss scale; what was tried before is known."""
        if levels.tobytes() not in self._known:
            scale = self._best_scale(levels)
            trial = _Trial(levels, scale, *self._errors(lambda: self._run(levels, scale)[0], scale))
            wide, half = (int(self.numbers[levels == level].sum()) for level in (_WIDE, _WIDE_RESULT))
            self.tell(
                f"{wide} of {self.numbers.sum()} products wide, {half} with a wide result, loss scale "
                f"{power_of_two(scale)}: {trial.where} is {off(trial.error)}"
            )
            self._known[levels.tobytes()] = trial
        return self._known[levels.tobytes()]

    def found(self) -> tuple[_Trial, _Trial]:
        """Give the trial with all products narrow, and the narrowest that is right."""
        first = trial = self._trial(np.full(len(self.sites), _NARROW))
        if not trial.is_right:  # what overflows in the forward pass, where a loss scale changes nothing
            trial = self._trial(_levels(self._largest >= self._overflow, slice(0, 0)))
        if not trial.is_right:
            lost = _levels(self._too_small(self._measured_at(trial.scale)), _COTANGENTS)
            trial = self._trial(np.maximum(trial.levels, lost))
        most = 1
        while not trial.is_right and most < self._damages.size and self._may_go_on():
            trial = self.wider(trial, most)
            most *= 2
        return first, self._narrowed(trial if trial.is_right else self._trial(np.full_like(trial.levels, _WIDE)))

    def wider(self, trial: _Trial, most: int = 1) -> _Trial:
        """Widen so much more, what does most damage first."""
        steps = np.argsort(-self._damages, axis=None, kind="stable")
        sites, levels = steps // 2, np.where(steps % 2, _WIDE, _WIDE_RESULT)
        left = np.flatnonzero(trial.levels[sites] < levels)[:most]
        widened = trial.levels.copy()
        np.maximum.at(widened, sites[left], levels[left])
        is_last = self.spent >= _MOST_GRADIENTS - _OF_VERIFYING // 2 or len(left) == 0
        return self._trial(np.full_like(widened, _WIDE) if is_last else widened)

    def _narrowed(self, best: _Trial) -> _Trial:
        """Make narrow again what was widened without need, by bisection, until nothing changes."""
        order = np.argsort(self._damages.max(axis=1), kind="stable")  # what does least damage first
        before = None
        while before is not best:
            before = best
            for level in (_NARROW, _WIDE_RESULT):
                wide = order[best.levels[order] > level]
                parts = [wide] if len(wide) else []
                while parts and self._may_go_on():
                    part = parts.pop(0)
                    levels = best.levels.copy()
                    levels[part] = level
                    trial = self._trial(levels)
                    if trial.is_right:
                        best = trial
                    elif len(part) > 1:
                        parts = [part[: len(part) // 2], part[len(part) // 2 :], *parts]
        return best

    def _may_go_on(self) -> bool:
        return self.spent < _MOST_GRADIENTS - _OF_VERIFYING

    def _too_small(self, measured: _Measured) -> np.ndarray:
        """Tell what is below the range: within it rounding makes an eighth of this error."""
        return np.asarray(measured.error > 2 * float(jnp.finfo(self._dtype).eps))

    def reasons(self, trial: _Trial) -> list[str]:
        """Say of each product that is not narrow what would be wrong if it were, until all gradients are spent."""
        measured: dict[float, _Measured] = {}
        reasons = [""] * len(trial.levels)
        for site in map(int, np.flatnonzero(trial.levels)):
            levels = trial.levels.copy()
            levels[site] = _NARROW
            scale = self._best_scale(levels)
            if scale not in measured and self.spent < _MOST_GRADIENTS:
                measured[scale] = self._measured_at(scale)
            reason = self._out_of_range(measured[scale], site, levels, scale) if scale in measured else ""
            if not reason and self.spent < _MOST_GRADIENTS:
                without = self._trial(levels)
                reason = f"narrow, {without.where} is {off(without.error)}"
            reasons[site] = reason or "what is made of it is sensitive to rounding"
        return reasons

    def _out_of_range(self, measured: _Measured, site: int, levels: np.ndarray, scale: float) -> str:
        """Say what leaves the range of the dtype if a product is narrow, at the best loss scale that there is then."""
        too_large, too_small = np.asarray(measured.largest >= self._overflow), self._too_small(measured)
        of_values = ((_LEFT, "an operand"), (_RIGHT, "an operand"), (_RESULT, "its result"))
        for role, what in of_values:
            if too_large[site, role]:
                return f"{what} reaches {measured.largest[site, role]:.2g}"
        for role, what in of_values:
            if too_small[site, role]:
                largest = measured.largest[site, role]
                return f"{what} is at most {largest:.2g}, much of it too small for {self._dtype.name}"
        gradients, is_narrow = measured.largest[:, _COTANGENTS], levels < _WIDE
        is_lost, top = too_small[:, _COTANGENTS].max(axis=1), gradients[site].max()
        log2 = math.floor(math.log2(self._overflow / max(top, 1e-30))) - 1
        if is_lost[site] and log2 >= 1:
            largest = gradients[site, measured.error[site, _COTANGENTS].argmax()]
            return (
                f"its gradients are at most {largest:.2g}, too small for {self._dtype.name}, at a loss scale of "
                f"{power_of_two(scale)}, above which others overflow; to have it narrow, give its part a scale of its "
                f"own: `jls.scale_gradient(result, 2.0**{log2})`, `jls.unscale_gradient(parameters_and_inputs, "
                f"2.0**{log2})`"
            )
        # Else there are small ones, too, where the same names stand, or where others are narrow.
        if is_lost[site] or ((is_lost & is_narrow).any() and top == gradients[is_narrow].max()):
            return (
                f"its gradients reach {top:.2g} at a loss scale of {power_of_two(scale)}, at which others are too "
                f"small for {self._dtype.name}; to have it narrow, give the small ones a scale of their own, with "
                "`jls.scale_gradient` and `jls.unscale_gradient`"
            )
        return ""


def _levels(is_out: np.ndarray, cotangents: slice) -> np.ndarray:
    """Give the levels at which nothing is out of range: ``is_out``, ``bool[sites, 2 * roles]``, says what is."""
    others = is_out[:, [_LEFT, _RIGHT]].any(axis=1) | is_out[:, cotangents].any(axis=1)
    return np.where(others, _WIDE, np.where(is_out[:, _RESULT], _WIDE_RESULT, _NARROW))


# From what was found, to rules that a person can judge: as few names as tell the products apart, and why.


def _rules_for(sites: Sequence[_ProductSite], levels: np.ndarray, reasons: Sequence[str] | None) -> list[PrecisionRule]:
    """Make a rule for each product that is not narrow, or for several that are alike.

    The first that matches decides, so the widest come first: where names do not tell products apart, too much is wide.
    """
    rules: list[PrecisionRule] = []
    for number in sorted(map(int, np.flatnonzero(levels)), key=lambda number: -int(levels[number])):
        level = int(levels[number])
        if any(rule.matches(sites[number].operation, sites[number].place) for rule in rules):
            continue
        for names in _names(sites[number]):
            rule = PrecisionRule(_PRECISIONS[level], **names, reason=reasons[number] if reasons else "")
            matched = [other for other, site in enumerate(sites) if rule.matches(site.operation, site.place)]
            if all(levels[other] == level for other in matched):
                break
        rules.append(rule)
    return [rule for rule in rules if not any(_contains(other, rule) for other in rules)]


def _contains(one: PrecisionRule, other: PrecisionRule) -> bool:
    """Tell whether one rule matches all that the other matches, and decides it alike."""
    patterns, others = ({*rule.get_config().items()} - {("reason", rule.reason)} for rule in (one, other))
    return patterns < others


def _names(site: _ProductSite) -> list[dict[str, str]]:
    """List ways to name a product, the one that survives most edits first."""
    place, operation = site.place, {"operation": site.operation}
    layer = {"layer": place.layer} if place.layer else {}
    parameter = {"parameter": place.parameter}  # "" if it takes none
    function = {"function": place.functions[0]} if place.functions else {}
    ways = [layer, parameter if place.parameter else {}, function]
    ways += [layer | parameter, parameter | function, layer | function, layer | parameter | function]
    return [names | operation for names in ways if names]
