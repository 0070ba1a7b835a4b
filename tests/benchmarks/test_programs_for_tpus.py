"""The benchmark of programs that are compiled for TPUs."""

import json

import pytest

from benchmarks.autocast import tpu
from benchmarks.autocast.tpu import Estimate
from benchmarks.autocast.ways import AUTOCAST, FLOAT32, HALF_RESIDUAL_STREAM, MANUAL_CASTS

# An excerpt of a program: a loop with 256 iterations, an addition without an estimate, and a conditional.
PROGRAM = """
%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[]{:T(128)}, f32[4]{0:T(512)S(1)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[4]{0:T(512)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%n, %one), backend_config={"estimated_cycles":"9223372036854775807"}
  %twice = f32[4]{0:T(512)} add(%x, %x), backend_config={"estimated_cycles":"10"}
  ROOT %t = (s32[]{:T(128)}, f32[4]{0:T(512)}) tuple(%next, %twice)
}
%condition (p: (s32[], f32[4])) -> pred[] {
  %limit = s32[]{:T(128)} constant(256)
  %p = (s32[]{:T(128)}, f32[4]{0:T(512)S(1)}) parameter(0)
  %n = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[]{:T(512)} compare(%n, %limit), direction=LT
}
%slow (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(512)} parameter(0)
  ROOT %e = f32[4]{0:T(512)} exponential(%x), backend_config={"estimated_cycles":"7"}
}
%fast (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(512)} parameter(0)
  ROOT %n = f32[4]{0:T(512)} negate(%x), backend_config={"estimated_cycles":"3"}
}
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0:T(512)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, f32[4]{0:T(512)}) tuple(%zero, %x)
  %loop = (s32[]{:T(128)}, f32[4]{0:T(512)}) while(%start), condition=%condition, body=%body
  %add.1 = f32[4]{0:T(512)} add(%x, %x), backend_config={"window":{"estimated_cycles":"100"}}
  ROOT %c = f32[4]{0:T(512)} conditional(%add.1, %add.1, %add.1), true_computation=%slow, false_computation=%fast
}
"""


class Compiled:
    """A compiled program, as far as the benchmark reads it."""

    def as_text(self):
        return PROGRAM

    def cost_analysis(self):
        return {"bytes accessed": 64.0}

    def memory_analysis(self):
        return type("Memory", (), {"temp_size_in_bytes": 32})


def test_cycles_of_all_iterations_and_of_the_slowest_branch_are_added():
    assert tpu.read(Compiled()) == Estimate(256 * 10 + 100 + 7, 32, 64)


def test_estimates_are_stored_and_reused(monkeypatch, tmp_path):
    sizes = {FLOAT32: 4, MANUAL_CASTS: 2, AUTOCAST: 1, HALF_RESIDUAL_STREAM: 3, "Adam": 2, "SGD": 1}
    calls = []

    def call_apart(function, kind, name, way, timeout):
        calls.append((kind, name, way))
        if len(calls) > 9 and name == "LSTM" and way == AUTOCAST and kind == "v6e":
            return None  # The program was not compiled in time.
        size = 4 if name == "Mamba" and way == AUTOCAST else sizes[way]
        return Estimate(size, size, size)

    monkeypatch.setattr("importlib.util.find_spec", bool)
    monkeypatch.setattr(tpu, "call_apart", call_apart)
    monkeypatch.setattr(tpu, "ESTIMATES", tmp_path / "tpu.jsonl")
    monkeypatch.setattr(tpu, "_MODELS", ("LSTM", "Mamba"))
    monkeypatch.setattr(tpu, "optimizers", lambda: {"Adam": (), "SGD": ()})
    *tables, of_optimizers = tpu.run(False, lambda *_: None)
    assert of_optimizers.rows == [("Adam", 2 / 1e6, 1.0, 2 / 2**20), ("SGD", 1 / 1e6, 0.5, 1 / 2**20)]
    assert [row[1] for table in tables for row in table.rows] == [2 / 1e6, 2 / 1e6, "not compiled", 2 / 1e6]
    # Only Mamba misses a goal and is compiled with a half residual stream.
    assert [row[4] for row in tables[0].rows] == [None, 1.5]
    assert [mark.value for mark in tables[0].marks] == [1.25, 2, 1.25, 2, 0.625, 1, 0.625, 1]
    assert len(calls) == len(tpu.ESTIMATES.read_text().splitlines()) + 1 == 16
    assert json.loads(tpu.ESTIMATES.read_text().splitlines()[0]) == ["v5e", "LSTM", FLOAT32, 4, 4, 4]
    calls.clear()
    tpu.run(False, lambda *_: None, resume=True)
    assert calls == [("v6e", "LSTM", AUTOCAST)]


def test_missing_libtpu_raises_an_error_that_names_the_group(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="--group bench-tpu"):
        tpu.run(True, lambda *_: None)
