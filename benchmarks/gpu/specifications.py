"""Specifications of the GPUs for which programs are compiled: an H100, a V100 and a T4.

The peak rates are from NVIDIA's data sheets, except for the memory bandwidth of a T4, which is from its product brief,
and the rate of an H100 in TF32. The other values are from the tables of compute capabilities in the CUDA C++
Programming Guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
      name: the name of the GPU.
      description: the description from which XLA compiles, a `GpuTargetConfigProto` as text.
      bandwidth: the memory bandwidth in bytes per second.
      peak: the peak rate of matmuls in operations per second, by the dtype of the operands.
      tf32_cores: the number of cores (streaming multiprocessors) with support for TF32.
      cache: the size of the L2 cache in bytes.
    """

    name: str
    description: str
    bandwidth: float
    peak: Mapping[str, float]
    tf32_cores: float
    cache: float


# If one of these values is missing, XLA fails or compiles a different program. For example, without the versions and
# the platform, XLA does not use cuBLASLt for float8 matmuls. Values that do not affect the program are omitted. The
# versions are the same for all GPUs.
_DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock}
  threads_per_warp: 32 threads_per_core_limit: {threads} threads_per_block_limit: 1024
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: {shared} shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin}
  l2_cache_size: {cache} device_memory_size: {memory} memory_bandwidth: {bandwidth:.0f}
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 patch: 0 }}
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
"""


def _gpu(name: str, bandwidth: float, peak: Mapping[str, float], **values: float) -> Gpu:
    cores = values["cores"] if peak["f32"] > peak["f32, not TF32"] else 0
    return Gpu(name, _DESCRIPTION.format(bandwidth=bandwidth, **values), bandwidth, peak, cores, values["cache"])


# An H100 SXM5. JAX computes float32 matmuls in TF32 by default. The rate of these matmuls was fitted to the times in
# `benchmarks/results/on_gpu.md` and is 42% of the rate in the data sheet.
H100 = _gpu(
    "H100",
    3.35e12,
    {"f8": 1.979e15, "f16": 9.89e14, "bf16": 9.89e14, "f32": 2.1e14, "f32, not TF32": 6.7e13, "f64": 6.7e13},
    **{"major": 9, "minor": 0, "cores": 132, "units": 128, "clock": 1.98, "threads": 2048},
    **{"shared": 233_472, "optin": 232_448, "cache": 52_428_800, "memory": 80_000_000_000},
)
# A V100 SXM2 and a T4, which have tensor cores for float16, but not for TF32 and bfloat16.
V100 = _gpu(
    "V100",
    9e11,
    {"f16": 1.25e14, "f32": 1.57e13, "f32, not TF32": 1.57e13, "f64": 7.8e12},
    **{"major": 7, "minor": 0, "cores": 80, "units": 64, "clock": 1.53, "threads": 2048},
    **{"shared": 98_304, "optin": 98_304, "cache": 6_291_456, "memory": 16_000_000_000},
)
T4 = _gpu(
    "T4",
    3.2e11,
    {"f16": 6.5e13, "f32": 8.1e12, "f32, not TF32": 8.1e12, "f64": 2.5e11},
    **{"major": 7, "minor": 5, "cores": 40, "units": 64, "clock": 1.59, "threads": 1024},
    **{"shared": 65_536, "optin": 65_536, "cache": 4_194_304, "memory": 16_000_000_000},
)
