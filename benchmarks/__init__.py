"""What loss scaling costs, beside the bare optimizer and beside the peers, and what it gives: ``python -m benchmarks``.

Needs the extra ``bench``. Reading order: `trees` makes what is worked on, `peers` the steps that are compared, `timing`
times them in turns, `isolation` gives each benchmark a process of its own, `report` holds and prints its results.
What XLA compiles for an H100 is read by `hlo`, taken apart into `kernels`, and counted as a `gpu_program`.
The benchmarks themselves are the modules in `BENCHMARKS` and `ON_REQUEST`; each has a function ``run(quick, progress)``
that returns tables.
"""

BENCHMARKS = {
    "optimizer": "the optimizer's step: Adam over 33 M parameters",
    "finite": "`all_finite` alone, beside a plain sum and jmp",
    "compile_time": "trace, lower and compile: the optimizer's step, and a whole training step",
    "policies": "loss scales replayed over recorded and synthetic traces: skipped steps, unused bits",
    "autocast": "`jls.autocast` beside casts by hand: steps for an H100 (group `bench-cuda`), bytes kept, errors",
    "cuda": "the program for an H100, compiled and not run (group `bench-cuda`)",
}

# These run only where they are named.
ON_REQUEST = {
    "cudnn": "cuDNN's attention by `jls.in_half`, compiled for eight H100s (group `bench-cuda`)",
    "collectives": "what a training step on eight devices gathers and reduces, by layout and dtype (15 minutes)",
    "accuracy": "ten small trainings in nine arms: does float16 give float32's result? (most of an hour)",
}
