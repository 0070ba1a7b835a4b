"""Predicted times of programs that are compiled for GPUs."""

import pickle
from unittest.mock import Mock

import pytest

from benchmarks.autocast import estimates
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, MANUAL_CASTS
from benchmarks.gpu.gpu_program import read
from benchmarks.gpu.specifications import H100, V100

LAUNCH, COPY = 1.2e-6, 2.2e-6  # In seconds.
ATTAINED, CACHED = 0.58 * 3.35e12, 2 * 3.35e12  # In bytes per second.

# A scatter of 8,192 rows of 64 elements into a table.
SCATTER = """
%combine (a: {dtype}[], b: {dtype}[]) -> {dtype}[] {{
  %a = {dtype}[] parameter(0)
  ROOT %c = {dtype}[] {combine}
}}
ENTRY %main (t: {dtype}[100,64], i: s32[8192,1], u: {dtype}[8192,1,64]) -> {dtype}[100,64] {{
  %t = {dtype}[100,64] parameter(0)
  %i = s32[8192,1] parameter(1)
  %u = {dtype}[8192,1,64] parameter(2)
  ROOT %s = {dtype}[100,64] scatter(%t, %i, %u), update_window_dims={{1,2}}, to_apply=%combine{attribute}
}}
"""
# A loop with 1,000 iterations, each of which copies an array, and in one program a slice.
LOOP = """
%sliced (y: f32[1000,256], i: s32[]) -> f32[1,256] {{
  %y = f32[1000,256] parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,256] dynamic-slice(%y, %i), dynamic_slice_sizes={{1,256}}
}}
%body (p: (s32[], f32[{size}], f32[1000,256])) -> (s32[], f32[{size}], f32[1000,256]) {{
  %p = (s32[], f32[{size}], f32[1000,256]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[{size}] get-tuple-element(%p), index=1
  %y = f32[1000,256] get-tuple-element(%p), index=2
  %copy = f32[{size}] copy(%x)
  {slice}
  ROOT %t = (s32[], f32[{size}], f32[1000,256]) tuple(%i, %copy, %y)
}}
ENTRY %main (p: (s32[], f32[{size}], f32[1000,256])) -> (s32[], f32[{size}], f32[1000,256]) {{
  %p = (s32[], f32[{size}], f32[1000,256]) parameter(0)
  ROOT %loop = (s32[], f32[{size}], f32[1000,256]) while(%p), body=%body, config={{"known_trip_count":{{"n":"1000"}}}}
}}
"""
SLICES = {
    "jax 0.10": '%z = f32[1,256] fusion(%y, %i), calls=%sliced, config={"name":"dynamic_slice_fusion"}',
    "jax 0.11": "%z = ((f32[1000,256], s32[]), f32[1,256], u32[]) fusion-start(%y, %i), calls=%sliced\n"
    "  %done = f32[1,256] fusion-done(%z)",
}
MATMUL = """
ENTRY %main (x: {dtype}[200,8192], y: {dtype}[8192,256]) -> ({dtype}[200,256], s8[33554432]) {{
  %x = {dtype}[200,8192] parameter(0)
  %y = {dtype}[8192,256] parameter(1)
  ROOT %m = ({dtype}[200,256], s8[33554432]) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", \
config={{"lhs_contracting_dimensions":["1"]}}
}}
"""
# A matmul whose result is a slice of a larger array.
UPDATE = """
%fused (x: f16[64,512], y: f16[512,2048], a: f16[256,64,2048], i: s32[]) -> (f16[256,64,2048], s8[33554432]) {
  %x = f16[64,512] parameter(0)
  %y = f16[512,2048] parameter(1)
  %a = f16[256,64,2048] parameter(2)
  %i = s32[] parameter(3)
  %m = (f16[64,2048], s8[33554432]) custom-call(%x, %y), custom_call_target="__cublas$lt$matmul", \
config={"lhs_contracting_dimensions":["1"]}
  %result = f16[64,2048] get-tuple-element(%m), index=0
  %slice = f16[1,64,2048] bitcast(%result)
  %updated = f16[256,64,2048] dynamic-update-slice(%a, %slice, %i)
  %workspace = s8[33554432] get-tuple-element(%m), index=1
  ROOT %t = (f16[256,64,2048], s8[33554432]) tuple(%updated, %workspace)
}
ENTRY %main (p: f16[1]) -> (f16[256,64,2048], s8[33554432]) {
  %p = f16[1] parameter(0)
  ROOT %f = (f16[256,64,2048], s8[33554432]) fusion(%p), kind=kCustom, calls=%fused
}
"""


def seconds(text, gpu=H100):
    return read(text, 0).seconds(gpu)


@pytest.mark.parametrize(("dtype", "rate"), [("f32", 5e11), ("f16", 7e10), ("bf16", 7e10)])
def test_scatters_take_the_time_of_their_atomic_operations(dtype, rate):
    text = SCATTER.format(dtype=dtype, combine="add(%a, %a)", attribute="")
    (kernel,) = read(text, 0).kernels
    assert seconds(text) == pytest.approx(LAUNCH + max(kernel.bytes / ATTAINED, 8192 * 64 / rate))


@pytest.mark.parametrize(("combine", "attribute"), [("parameter(1)", ""), ("add(%a, %a)", ", unique_indices=true")])
def test_scatters_without_atomic_operations_take_the_time_of_their_bytes(combine, attribute):
    text = SCATTER.format(dtype="f16", combine=combine, attribute=attribute)
    (kernel,) = read(text, 0).kernels
    assert seconds(text) == pytest.approx(LAUNCH + kernel.bytes / ATTAINED)


def test_kernels_that_move_few_bytes_take_the_time_of_their_launches():
    assert seconds(LOOP.format(size=256, slice="")) == pytest.approx(1000 * (LAUNCH + 2 * 1024 / CACHED))


@pytest.mark.parametrize("version", SLICES)
def test_copies_whose_addresses_the_host_computes_take_longer_than_launches(version):
    added = seconds(LOOP.format(size=256, slice=SLICES[version])) - seconds(LOOP.format(size=256, slice=""))
    assert added == pytest.approx(1000 * (LAUNCH + COPY + (2 * 1024 + 4) / CACHED))


def test_only_loops_whose_iterations_fit_into_the_cache_read_from_it():
    small, large = 6_000_000, 7_000_000  # An iteration reads and writes 48 or 56 million bytes.
    cached, moved = seconds(LOOP.format(size=small, slice="")), seconds(LOOP.format(size=large, slice=""))
    assert cached == pytest.approx(1000 * (LAUNCH + 8 * small / CACHED))
    assert moved == pytest.approx(1000 * (LAUNCH + 8 * large / ATTAINED))
    # A V100 has a cache of 6 MiB.
    assert seconds(LOOP.format(size=small, slice=""), V100) == pytest.approx(
        1000 * (LAUNCH + 8 * small / (0.58 * 9e11))
    )


@pytest.mark.parametrize(
    ("dtype", "gpu", "peak", "cores"),
    [("f32", H100, 2.1e14, 8 / 132), ("f16", H100, 9.89e14, 1), ("f32", V100, 1.57e13, 1)],
)
def test_float32_matmuls_on_an_h100_use_one_core_for_each_tile(dtype, gpu, peak, cores):
    # The result has 2 x 4 tiles of 128 x 64 elements.
    text = MATMUL.format(dtype=dtype)
    moved = (4 if dtype == "f32" else 2) * (200 * 8192 + 8192 * 256 + 200 * 256)
    multiplied = 2 * 200 * 256 * 8192 / peak / cores
    assert seconds(text, gpu) == pytest.approx(LAUNCH + max(moved / (0.58 * gpu.bandwidth), multiplied))


def test_workspaces_of_matmuls_that_update_a_slice_are_not_read_or_written():
    (kernel,) = read(UPDATE, 0).kernels
    # The operands of the matmul, the index, and the slice that is updated.
    assert kernel.bytes == 2 * (64 * 512 + 512 * 2048) + 4 + 2 * 64 * 2048


def test_unknown_instructions_raise_an_error():
    with pytest.raises(NotImplementedError, match="'cholesky'"):
        read("ENTRY %main (x: f32[2,2]) -> f32[2,2] {\n  ROOT %c = f32[2,2] cholesky(%x)\n}", 0)


# --- The benchmark `estimates` ---


def test_measured_ratios_are_read_from_the_results():
    ratios = estimates.measured()
    assert len(ratios) >= 10
    assert ratios["DLRM"] == [0.75, 0.35]


def test_estimates_are_compared_with_measured_times(monkeypatch):
    monkeypatch.setattr(estimates.cuda, "missing", str)
    monkeypatch.setattr(estimates, "measured", lambda: {"A": [0.25, 0.5], "B": [0.75, 1], "C": [0.5, 2]})
    times = {"A": [4, 2, 1.1], "B": [4, 2, 1], "C": [4, 1, 2]}
    places = [FLOAT32, MANUAL_CASTS, AUTOCAST]

    def call_apart(function, name, way, *arguments, timeout):
        pickle.dumps((function, name, way, *arguments))  # The arguments are sent to another process.
        return Mock(seconds=lambda: times[name][places.index(way)])

    monkeypatch.setattr(estimates, "call_apart", call_apart)
    (table,) = estimates.run(False, lambda *_: None)
    assert table.rows[:3] == [
        ("A", MANUAL_CASTS, 0.5, 0.55, pytest.approx(0.1)),
        ("B", MANUAL_CASTS, 1, 0.5, -0.5),
        ("C", MANUAL_CASTS, 2, 2, 0),
    ]
    # The estimates of A and B are in the wrong order.
    assert [mark.value for mark in table.marks] == pytest.approx([0.5, 0.5, 1.5, 2 / 3])
    assert [row[0] for row in estimates.run(True, lambda *_: None)[0].rows] == ["B", "C", "B", "C"]


def test_without_the_compiler_for_gpus_the_marks_name_the_missing_packages(monkeypatch):
    monkeypatch.setattr(estimates.cuda, "missing", lambda: "needs a package")
    (table,) = estimates.run(False, lambda *_: None)
    assert [(mark.value, mark.note) for mark in table.marks] == [(None, "needs a package")] * 4
