"""The records in `golden`, and the `DynamicLossScale` with the settings of each record."""

import json
from pathlib import Path

import jax_lossscale as jls

GOLDEN = Path(__file__).parent / "golden"
NO_FLOOR = 2.0**-126  # This is the smallest valid `min_loss_scale`.
# A unit in the last place of a float32 is at most this fraction of the number.
ULP = 2.0**-23


def from_tf1(config):
    return jls.DynamicLossScale(**config)


def from_torch(config):
    return jls.DynamicLossScale(
        config["init_scale"],
        config["growth_interval"],
        config["growth_factor"],
        backoff_factor=config["backoff_factor"],
        min_loss_scale=NO_FLOOR,
    )


def from_keras(config):
    return jls.DynamicLossScale(config["initial_scale"], config["dynamic_growth_steps"], min_loss_scale=NO_FLOOR)


def from_megatron(config):
    return jls.DynamicLossScale(
        config["initial_scale"],
        config["growth_interval"],
        config["growth_factor"],
        backoff_factor=config["backoff_factor"],
        min_loss_scale=config["min_scale"],
        hysteresis=config["hysteresis"],
        hysteresis_refill="growth",
    )


FILES = {
    "tf1_dynamic_loss_scale": from_tf1,
    "torch_grad_scaler": from_torch,
    "keras3_loss_scale_optimizer": from_keras,
    "megatron_dynamic_grad_scaler": from_megatron,
}
RECORDS = {path.stem: json.loads(path.read_text())["cases"] for path in GOLDEN.glob("*.json")}
