"""`benchmarks.kernels`: bytes, products and time of programs that are short enough to count by hand."""

import pytest

from benchmarks.gpu_program import read
from benchmarks.kernels import BANDWIDTH, PEAK

BODIES = """
%body (state: (s32[], f32[10,256])) -> (s32[], f32[10,256]) {
  %state = (s32[], f32[10,256]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  %x = f32[10,256]{1,0} get-tuple-element(%state), index=1
  %y = f32[10,256]{1,0} copy(%x)
  %one = s32[] constant(1)
  %more = s32[] fusion(%n), kind=kLoop, calls=%added
  ROOT %both = (s32[], f32[10,256]{1,0}) tuple(%more, %y)
}

%added (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %c = s32[] constant(1)
  ROOT %sum = s32[] add(%p, %c)
}

%compared (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %c = s32[] constant(7)
  ROOT %less = pred[] compare(%p, %c), direction=LT
}

%condition (state: (s32[], f32[10,256])) -> pred[] {
  %state = (s32[], f32[10,256]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] fusion(%n), kind=kLoop, calls=%compared
}

%sliced (p: f32[10,256], i: s32[]) -> f32[256] {
  %p = f32[10,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,256}
  %flat = f32[256]{0} bitcast(%row)
  ROOT %twice = f32[256]{0} add(%flat, %flat)
}

%updated (p: f32[10,256], row: f32[256], i: s32[]) -> f32[10,256] {
  %p = f32[10,256]{1,0} parameter(0)
  %row = f32[256]{0} parameter(1)
  %line = f32[1,256]{1,0} bitcast(%row)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %new = f32[10,256]{1,0} dynamic-update-slice(%p, %line, %i, %zero)
}

%gathered (p: f32[10,256], rows: s32[3,1]) -> f32[3,256] {
  %p = f32[10,256]{1,0} parameter(0)
  %rows = s32[3,1]{1,0} parameter(1)
  ROOT %found = f32[3,256]{1,0} gather(%p, %rows), offset_dims={1}, slice_sizes={1,256}
}

%scattered (p: f32[10,256], rows: s32[3,1], added: f32[3,256]) -> f32[10,256] {
  %p = f32[10,256]{1,0} parameter(0)
  %rows = s32[3,1]{1,0} parameter(1)
  %updates = f32[3,256]{1,0} parameter(2)
  ROOT %sums = f32[10,256]{1,0} scatter(%p, %rows, %updates), to_apply=%added
}

%multiplied (a: f16[512,1024], b: f32[1024,2048]) -> f16[512,2048] {
  %a = f16[512,1024]{1,0} parameter(0)
  %b = f32[1024,2048]{1,0} parameter(1)
  %narrow = f16[1024,2048]{1,0} convert(%b)
  ROOT %dot = f16[512,2048]{1,0} dot(%a, %narrow), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""

ENTRY = """
ENTRY %main (x: f32[10,256]) -> f32[10,256] {{
  %x = f32[10,256]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[256]{{0}} parameter(2)
  %rows = s32[3,1]{{1,0}} parameter(3)
  %added_rows = f32[3,256]{{1,0}} parameter(4)
  %a = f16[512,1024]{{1,0}} parameter(6)
  %b = f32[1024,2048]{{1,0}} parameter(7)
  %images = f16[8,32,32,64]{{3,2,1,0}} parameter(8)
  %filters = f16[128,3,3,64]{{3,2,1,0}} parameter(9)
  %cotangents = f16[8,16,16,128]{{3,2,1,0}} parameter(10)
  %query = f16[2,128,4,64]{{3,2,1,0}} parameter(11)
  %e4m3 = f8e4m3fn[256,256]{{1,0}} parameter(12)
  %wide = f32[512,1024]{{1,0}} parameter(13)
  %key = f16[2,128,4,64]{{3,2,1,0}} parameter(14)
  %value = f16[2,128,4,64]{{3,2,1,0}} parameter(15)
  %e5m2 = f8e5m2[256,256]{{1,0}} parameter(16)
  %two = s32[] constant(2)
  %start = s32[] copy(%two)
  %state = (s32[], f32[10,256]{{1,0}}) tuple(%start, %x)
  ROOT %result = {}
}}
"""

X = 10 * 256 * 4  # bytes
CONV = "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="
CONV_PRODUCTS = {"f16": 2 * (8 * 16 * 16 * 128) * (3 * 3 * 64)}
IMAGES, FILTERS, COTANGENTS = 2 * 8 * 32 * 32 * 64, 2 * 128 * 3 * 3 * 64, 2 * 8 * 16 * 16 * 128
Q = 2 * 2 * 128 * 4 * 64
FMHA = 'backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"F16",'
FMHA += '"dimensions":["2","4","128","128"]}}}'


def program(result):
    text = BODIES + ENTRY.format(result)
    return read(text, 0)


# What the last instruction is: bytes, operations of products.
KERNELS = {
    "copy": ("f32[10,256]{1,0} copy(%x)", 2 * X, {}),
    "slice": ("f32[256]{0} fusion(%x, %i), kind=kLoop, calls=%sliced", 1024 + 4 + 1024, {}),
    "update in place": ("f32[10,256]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%updated", 2 * 1024 + 4, {}),
    "gather": ("f32[3,256]{1,0} fusion(%x, %rows), kind=kLoop, calls=%gathered", 2 * 3 * 1024 + 12, {}),
    # The rows are read, added to, and written; and the indices and what is added are read.
    "scatter": (
        "f32[10,256]{1,0} fusion(%x, %rows, %added_rows), kind=kInput, calls=%scattered", 3 * 3 * 1024 + 12, {}
    ),
    "product": (
        "f16[512,2048]{1,0} fusion(%a, %b), kind=kCustom, calls=%multiplied",
        2 * 512 * 1024 + 4 * 1024 * 2048 + 2 * 512 * 2048, {"f16": 2 * 512 * 1024 * 2048},
    ),
    "product in TF32": (
        "f32[512,2048]{1,0} dot(%wide, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        4 * (512 * 1024 + 1024 * 2048 + 512 * 2048), {"f32": 2 * 512 * 1024 * 2048},
    ),
    "product of a library, with its workspace": (
        '(f32[256,256]{1,0}, s8[4194304]{0}) custom-call(%e4m3, %e5m2), custom_call_target="__cublas$lt$matmul$f8", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        2 * 256 * 256 + 4 * 256 * 256, {"f8": 2 * 256**3},
    ),
    "convolution": (
        f'(f16[8,16,16,128]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%images, %filters), {CONV}"__cudnn$convForward"',
        IMAGES + FILTERS + COTANGENTS, CONV_PRODUCTS,
    ),
    "its derivative by filters": (
        f'(f16[128,3,3,64], u8[0]) custom-call(%images, %cotangents), {CONV}"__cudnn$convBackwardFilter"',
        IMAGES + FILTERS + COTANGENTS, CONV_PRODUCTS,
    ),
    "attention": (
        '(f16[2,128,4,64], u8[0]) custom-call(%query, %key, %value), custom_call_target="__cudnn$fmhaSoftmax", '
        + FMHA, 4 * Q, {"f16": 2 * 2 * (2 * 4 * 128 * 128) * 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", KERNELS)
def test_bytes_and_products_of_a_kernel(case):
    result, moved, products = KERNELS[case]
    kernel = program(result).kernels[-1]
    assert (kernel.bytes, dict(kernel.products)) == (moved, products)
    multiplied = sum(count / PEAK[dtype] for dtype, count in products.items())
    assert kernel.seconds == max(moved / BANDWIDTH, multiplied)


STATE = "(s32[], f32[10,256]{1,0})"
KNOWN = 'backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}'
LOOP = f"{STATE} while(%state), condition=%condition, body=%body"
START = 4  # bytes: the copy of the counter


@pytest.mark.parametrize(("loop", "turns"), [(f"{LOOP}, {KNOWN}", 12), (LOOP, 5)])
def test_the_body_of_a_loop_runs_as_often_as_the_loop_turns(loop, turns):
    found = program(loop)
    assert [(kernel.name, kernel.launches) for kernel in found.kernels] == [("start", 1), ("y", turns), ("more", turns)]
    assert found.bytes == START + turns * (2 * X + 8)
    assert found.seconds == pytest.approx(found.bytes / BANDWIDTH)


def test_of_a_conditional_the_branch_that_takes_longest_counts():
    branches = """
%little (p: f32[10,256]) -> f32[256] {
  %p = f32[10,256]{1,0} parameter(0)
  ROOT %first = f32[256]{0} slice(%p), slice={[0:1], [0:256]}
}

%much (p: f32[10,256]) -> f32[10,256] {
  %p = f32[10,256]{1,0} parameter(0)
  ROOT %again = f32[10,256]{1,0} copy(%p)
}
"""
    choice = "f32[10,256]{1,0} conditional(%i, %x, %x), branch_computations={%little, %much}"
    found = read(branches + BODIES + ENTRY.format(choice), 0)
    assert [kernel.name for kernel in found.kernels] == ["start", "again"]


UNKNOWN = {
    "loop that goes up by two": (LOOP.replace("%body", "%by_two"), "how often"),
    "loop from a variable": (LOOP.replace("%state", "%from_variable"), "how often"),
    "instruction": ("f32[10,256]{1,0} fft(%x), fft_type=RFFT", "'fft' launches"),
    "library": ('f32[10,256] custom-call(%x, %x), custom_call_target="lapack_getrf"', "'lapack_getrf' multiplies"),
    "dtype of a product": ("f32[10,256] dot(%rows, %rows), lhs_contracting_dims={1}", "fast products of s32"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_an_error(case):
    result, complaint = UNKNOWN[case]
    body = BODIES[BODIES.index("%body") : BODIES.index("%compared")]
    for one, two in ("constant(1)", "constant(2)"), ("%body", "%by_two"), ("%added", "%added_two"):
        body = body.replace(one, two)
    entry = ENTRY.format(result).replace(
        "  ROOT %result", "  %from_variable = (s32[], f32[10,256]{1,0}) tuple(%i, %x)\n  ROOT %result"
    )
    with pytest.raises(NotImplementedError, match=complaint):
        read(BODIES + body + entry, 0)


def test_what_is_not_read_is_an_error():
    with pytest.raises(ValueError, match="not read as an instruction: %x is odd"):
        read("ENTRY %main () -> f32[] {\n  %x is odd\n}\n", 0)
    with pytest.raises(ValueError, match="no entry"):
        read(BODIES, 0)
