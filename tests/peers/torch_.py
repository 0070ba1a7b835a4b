"""Behavior of ``torch.amp.GradScaler``."""

import inspect

import pytest
import torch

from peers import cases


def scaler_after(*grads, scaler=None, **options):
    """Return a scaler after optimizer steps with these gradients, and the scales before and after each step."""
    scaler = scaler or torch.amp.GradScaler("cpu", **options)
    params = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([params], lr=1.0)
    scaler.scale(params)  # The scale of a `GradScaler` is created at its first use.
    scales = [scaler.get_scale()]
    for grad in grads:
        params.grad = torch.tensor(grad)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scaler, scales


def growth():
    good_steps = [1.0] * 4 * cases.PERIOD
    return cases.growth(scaler_after(*good_steps, init_scale=1.0, growth_interval=cases.PERIOD)[1])


def floor():
    return cases.number(scaler_after(*[torch.inf] * 30, init_scale=2.0**-125)[1][-1])


def ceiling():
    return cases.number(scaler_after(*[1.0] * 3, init_scale=2.0**126, growth_interval=1)[1][-1])


def value():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for dtype in torch.float32, torch.float16:
        params = torch.nn.Parameter(torch.ones(()))
        loss = (params.half() * 100).to(dtype)
        scaler.scale(loss).backward()
        assert not params.grad.isfinite()
        assert loss == 100
    return "the true loss"


def unscaling():
    params = torch.nn.Parameter(torch.ones(4))
    params.grad = torch.full((4,), cases.HIGHEST_POWER)
    scaler = torch.amp.GradScaler("cpu", init_scale=cases.HIGHEST_POWER)
    scaler.scale(params)
    scaler.unscale_(torch.optim.SGD([params], lr=1.0))
    return cases.unscaled(*[params.grad.numpy()] * 2)


def float16_gradients():
    params = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match="dtype"):
        params.grad = torch.ones((), dtype=torch.float16)
    params.grad_dtype = None  # `grad_dtype = None` allows gradients of another dtype.
    params.grad = torch.ones((), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(params)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(torch.optim.SGD([params], lr=1.0))
    return "rejected"


def arguments():
    assert [name for name in dir(torch.amp.GradScaler) if name.endswith("_grad") or name.endswith("_and_grad")] == []
    return "no such function"


def _scale_of_a_process(rank, file, scales):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    scales[rank] = scaler_after(torch.inf if rank else 1.0)[1][-1]
    torch.distributed.destroy_process_group()


def one_device():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        scales = torch.ones(2).share_memory_()
        torch.multiprocessing.spawn(_scale_of_a_process, (f"{folder}/file", scales), nprocs=2)
    assert scales.tolist() == [2**16, 2**15]
    return "each process decides on its own"


def compilations():
    calls = []

    class Recording(torch.optim.SGD):
        def step(self):
            calls.append(self)

    params = torch.nn.Parameter(torch.ones(()))
    optimizer, scaler = Recording([params], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(params)
    for grad in 1.0, torch.inf, 1.0:
        params.grad = torch.tensor(grad)
        scaler.step(optimizer)
        scaler.update()
    assert len(calls) == 2
    return "none, because Python makes the decision in each step"


def own_reasons():
    scaler, _ = scaler_after(1.0)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()
    assert scaler.get_scale() == 2.0**16
    return "manually: call neither `step` nor `update`"


def which_layer():
    states = []
    for bad in 0, 1:
        params = [torch.nn.Parameter(torch.ones(())) for _ in range(2)]
        for n, param in enumerate(params):
            param.grad = torch.tensor(torch.nan if n == bad else 1.0)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(params[0])
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.unscale_(optimizer)
        states.append((scaler._found_inf_per_device(optimizer), scaler.state_dict()))
    return cases.which_layer(states)


def hysteresis():
    assert set(inspect.signature(torch.amp.GradScaler).parameters) == {
        "device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled",
    }  # fmt: skip
    return cases.hysteresis(scaler_after(*[torch.inf] * 3)[1])


def schedule():
    params = torch.nn.Parameter(torch.ones(()))
    params.grad = torch.tensor(torch.inf)
    optimizer = torch.optim.SGD([params], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(params)
    scaler.step(optimizer)
    schedule.step()
    assert params == 1.0
    assert schedule.get_last_lr() == [0.5]
    return "advances unless you check"
