"""A project for `test_suites.py`. Its tests run under a version of `autocast` that is wrong for four functions."""

import functools

import jax
import jax.numpy as jnp

import jax_lossscale as jls

autocast = jls.autocast


def broken(fun, *args, **options):
    under_autocast = autocast(fun, *args, **options)

    @functools.wraps(fun)
    def wrapped(*args):
        result = under_autocast(*args)
        if fun.__name__ == "crash":
            raise ValueError("planted")
        if fun.__name__ == "infinite" and options.get("dtype") == jnp.bfloat16:
            return result * jnp.inf
        if fun.__name__ == "dtype":
            return result.astype(jnp.float16)
        return result * 1.1 if fun.__name__ == "number" else result

    return wrapped


jls.autocast = broken
x = jnp.arange(6.0).reshape(2, 3)


def crash(x):
    return x + 1


def dtype(x):
    return jnp.sin(x)


def number(x):
    return x @ x.T


def infinite(x):
    return jnp.cos(x)


def right(x):
    return jnp.sum(jnp.sin(x) ** 2)


def test_crash():
    jax.jit(crash)(x)


def test_dtype():
    jax.vmap(dtype)(x)


def test_number():
    assert jax.jit(number)(x)[0, 0] == 5


def test_infinite():
    jax.jit(infinite)(x)


def test_right():
    assert jnp.all(jax.jit(jax.grad(right))(x) == jax.grad(right)(x))


def test_that_fails_without_autocast():
    assert jax.jit(lambda x: x + 2)(1.0) == 2
