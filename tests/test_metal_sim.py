"""The simulated GPU finds what it claims to find, and lets right kernels pass."""

from __future__ import annotations

import re

import metal_sim
import mlx.core as mx
import numpy as np
import pytest
from metal_sim import CompileError, LaunchError, SourceError, cuda_check, nvrtc

REASON = metal_sim.why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
CUDA_REASON = nvrtc.why_not()
needs_nvrtc = pytest.mark.skipif(CUDA_REASON is not None, reason=str(CUDA_REASON))

N = 64
A = np.random.default_rng(0).standard_normal(N).astype(np.float32)
START = "const uint i = thread_position_in_grid.x;\n#define lane thread_index_in_simdgroup\n"
APART = (
    "inline float mul_rn(float a, float b) { return a * b; }\ninline float add_rn(float a, float b) { return a + b; }\n"
)


def run(body, *, header="", a=A, n=N, threadgroup=N, dtype=mx.float32, template=(), **how):
    """Runs `body`, whose first line is the third, over n threads: a is the input, o the output of n numbers."""
    kernel = metal_sim.metal_kernel("sample", ["a"], ["o"], START + body, header)
    return kernel(
        inputs=[mx.array(a)],
        template=list(template),
        grid=(n, 1, 1),
        threadgroup=(threadgroup, 1, 1),
        output_shapes=[(n,)],
        output_dtypes=[dtype],
        **how,
    )


def values(body, **how):
    return np.array(run(body, **how)[0])


FAULTS = {
    "load past an input": ("o[i] = a[i + 1];", r"out of bounds: load of 4 bytes at a\[byte 256 of 256\].*lane 31"),
    "load before an input": ("o[i] = (a - 1)[i];", r"out of bounds: load of 4 bytes at a\[byte -4 of 256\]"),
    "store past an output": ("o[i + 1] = a[i];", r"out of bounds: store of 4 bytes at o\[byte 256 of 256\]"),
    "load far away": ("o[i] = a[long(i) - (1l << 42)];", r"out of bounds: load of 4 bytes where no argument is"),
    "wide load over the end": (
        "o[i] = (*(const device float4*)(a + (i / 4 * 4 + 4) % 68)).x;",
        r"out of bounds: load of 16 bytes at a\[byte 256 of 256\]",
    ),
    "threadgroup memory past its end": (
        "threadgroup float s[64];\nthreadgroup float* p = s + i;\ns[i] = 0;\np[1] = a[i];\no[i] = s[i];",
        r"body:6: out of bounds: store of 4 bytes at s\[byte 256 of 256\]",
    ),
    "store to an input": (
        "o[i] = a[i];\n((device float*)(ulong)a)[i] = 0;",
        r"body:4: read-only: store of 4 bytes to a",
    ),
    "misaligned vector": (
        "o[i] = i < 60 ? (*(const device float4*)(a + i)).x : 0.0f;",
        r"misaligned: load of 16 bytes at a\[byte 4 of 256\]",
    ),
    "output read before it is written": ("o[i] += a[i];", r"uninitialised: load of o\[byte 0 of 256\]"),
    "threadgroup memory read before it is written": (
        "threadgroup float s[64];\nif (i != 32) s[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "o[i] = s[i];",
        r"body:6: uninitialised: load of s\[byte 128 of 256\]",
    ),
    "load without a barrier": (
        "threadgroup float s[64];\ns[i] = a[i];\no[i] = s[63 - i];",
        r"body:5: (race|uninitialised)",
    ),
    "store without a barrier": (
        "threadgroup float s[64];\ns[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "const float x = s[i ^ 32];\ns[i] = x;\no[i] = s[i];",
        r"body:7: race: store of s\[.*another thread loaded",
    ),
    "lane after lane without a barrier": (
        "threadgroup float s[64];\ns[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "const float x = s[i ^ 1];\ns[i] = x;\no[i] = x;",
        r"body:7: race: store of s",
    ),
    "SIMD-group barrier between SIMD-groups": (
        "threadgroup float s[64];\ns[i] = a[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[i ^ 32];",
        r"body:6: (race|uninitialised)",
    ),
    "barrier that orders other memory": (
        "o[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nconst float x = o[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\no[i] = x;",
        r"body:5: race: load of o",
    ),
    "two threads store one number": ("o[i / 2] = a[i];", r"race: store of o\[.*another thread stored"),
    "signed overflow": ("int x = 2147483647 - 40 + int(i);\no[i] = x;", r"body:3: undefined: add_overflow"),
    "float out of an integer's range": ("o[i] = int(a[i] * 0x1p40f);", r"undefined: float_cast_overflow"),
    "local array past its end": (
        "float r[4] = {1, 2, 3, 4};\no[i] = r[i % 5];",
        r"body:4: undefined: out_of_bounds",
    ),
    "division by zero": ("o[i] = 7 / int(i);", r"undefined: divrem_overflow"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported(name):
    body, pattern = FAULTS[name]
    reports = run(body, diag=True).reports
    assert any(re.search(pattern, report) for report in reports), reports


def test_fault_between_threadgroups_is_reported():
    reports = run("o[i % 32] = a[i];", threadgroup=32, diag=True).reports
    assert any("race: store of o" in report for report in reports)


def test_fault_inside_a_function_is_told_with_its_caller():
    header = "\ninline float next(const device float* p) {\n  return p[1];\n}\n"
    (report,) = run("o[i] = next(a + i);", header=header, diag=True).reports
    assert report.startswith("header:3 in body:3: out of bounds")


STOPS = {
    "SIMD operation in a branch": (
        "float x = a[i];\nif (lane < 16) x = simd_shuffle_xor(x, 1);\no[i] = x;",
        r"body:4: diverged: lane 0 is at a SIMD operation and lane 16 has ended",
    ),
    "the same operation in both branches": (
        "float x = a[i];\nif (lane < 16) x = simd_shuffle_xor(x, 1);\nelse x = simd_shuffle_xor(x, 1);\no[i] = x;",
        r"diverged: lane 0 is at a SIMD operation and lane 16 is at a SIMD operation",
    ),
    "barrier in a branch": (
        "if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = a[i];",
        r"body:3: diverged: SIMD-group 0 waits at a barrier and SIMD-group 1 has ended",
    ),
    "barrier after an early return": (
        "o[i] = 0;\nif (i == 5) return;\nthreadgroup_barrier(mem_flags::mem_threadgroup);",
        r"diverged: lane 0 waits at a barrier and lane 5 has ended",
    ),
    "loops of different lengths": (
        "float x = a[i];\nfor (uint j = 0; j <= lane / 31; ++j) x = simd_shuffle_xor(x, 1);\no[i] = x;",
        r"diverged",
    ),
    "memory far away": ("o[i] = a[long(i) - (1l << 42)];", r"body:3: access to memory that no argument has"),
    "division by zero": ("o[i] = 7 / int(i);", r"body:3: integer division by zero"),
}


@pytest.mark.parametrize("name", STOPS)
def test_launch_is_stopped(name):
    body, pattern = STOPS[name]
    with pytest.raises(LaunchError, match=pattern):
        run(body)
    assert values("o[i] = a[i];").tolist() == A.tolist()


def test_operation_with_a_lane_that_is_not_there_is_stopped():
    with pytest.raises(LaunchError, match="reads lane 40 of a SIMD-group of 32"):
        run("o[i] = simd_shuffle(float(a[i]), 40);")
    with pytest.raises(LaunchError, match="of a SIMD-group of 8"):
        run("o[i] = simd_shuffle_xor(float(a[i % 40]), 8);", n=40, threadgroup=40)


def test_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr("metal_sim.launch.SECONDS", 0.2)
    with pytest.raises(LaunchError, match="still running after"):
        run("volatile thread int x = 1;\nwhile (x > 0) { x = 2; }\no[i] = x;")


def test_threadgroup_memory_is_counted_and_limited():
    body = (
        "threadgroup float4 s[{}];\ns[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[63 - i].x;"
    )
    assert run(body.format(2048)).run.threadgroup_bytes == 32_768
    with pytest.raises(LaunchError, match="32784 bytes of threadgroup memory"):
        run(body.format(2049))


REFUSED_BY_LINT = {
    "unqualified pointer": ("float x = a[i];\nfloat* p = &x;\no[i] = *p;", r"body:4: unqualified pointer"),
    "unqualified reference": ("float x = a[i];\nfloat& p = x;\no[i] = p;", r"body:4: unqualified reference"),
    "unqualified cast": ("o[i] = *(const float4*)a;", r"body:3: unqualified pointer"),
    "static local": ("static constant float t[1] = {1};\no[i] = t[0];", r"body:3: static local"),
    "goto": ("goto end;\nend: o[i] = a[i];", r"body:3: refused by Metal \(goto\)"),
    "simd_sum": ("o[i] = simd_sum(a[i]);", r"body:3: simd_sum"),
    "fast function": ("o[i] = fast::exp(a[i]);", r"body:3: fast maths"),
    "function that is fast by default": ("o[i] = exp(a[i]);", r"body:3: not spelled precise::"),
    "product into sum": ("o[i] = a[i] * a[i ^ 1] + 1.0f;", r"body:3: a product flows into a sum"),
    "product into difference": ("float p = a[i] * a[0];\no[i] = 1.0f - p;", r"body:4: a product flows"),
    "product into sum, later": (
        "float p = 0.0f;\nfor (uint j = 0; j < i; ++j) p = p + a[j] * a[j];\no[i] = p;",
        r"body:4: a product flows into a sum",
    ),
    "product of vectors into sum": (
        "float4 v = a[i] * float4(1, 2, 3, a[0]);\no[i] = v.x + v.y;",
        r"body:4: a product",
    ),
}


@pytest.mark.parametrize("name", REFUSED_BY_LINT)
def test_lint_refuses(name):
    body, pattern = REFUSED_BY_LINT[name]
    with pytest.raises(SourceError, match=pattern):
        run(body)


@pytest.mark.parametrize(
    ("header", "pattern"),
    [
        ("inline int f(int x) { return x > 0 ? f(x - 1) : 0; }\n", "recursion of f"),
        ("int g(int x);\nint f(int x) { return g(x); }\nint g(int x) { return x ? f(x) : 1; }\n", "recursion of f"),
        (
            "inline float f(float x) { return x; }\ninline float g(thread float* p, float* q) { return *q; }\n",
            "header:2",
        ),
        ("#pragma METAL fp contract(fast)\n", "header:1: fast maths"),
        ("inline float product(float a, float b) { return a * b; }\n", "body:3: a product flows into a sum"),
    ],
)
def test_lint_refuses_a_header(header, pattern):
    call = "product(a[i], a[0])" if "product" in header else "a[i]"
    with pytest.raises(SourceError, match=pattern):
        run(f"o[i] = {call} + 1.0f;", header=header)


def test_math_mode_other_than_safe_is_refused():
    for mode in ("relaxed", "fast"):
        with pytest.raises(SourceError, match=f"math mode {mode}"):
            metal_sim.metal_kernel("sample", ["a"], ["o"], "o[0] = 1;", compile_options={"math_mode": mode})
    metal_sim.metal_kernel("sample", ["a"], ["o"], "o[0] = 1;", compile_options={"math_mode": "safe"})


REFUSED_BY_CLANG = {
    "double": ("double x = a[i];\no[i] = x;", "double"),
    "pointer into another address space": ("thread const float* p = a;\no[i] = *p;", "__private.*__global"),
    "function pointer": ("float (*f)(float) = 0;\no[i] = a[i];", "function"),
    "variable never set": ("float x;\no[i] = x;", "uninitialized"),
    "store to a constant input": ("a[i] = 0;\no[i] = 0;", "read-only"),
    "implicit change of vector": ("int4 v = float4(1);\no[i] = v.x;", "float4"),
}


@pytest.mark.parametrize("name", REFUSED_BY_CLANG)
def test_clang_refuses(name):
    body, pattern = REFUSED_BY_CLANG[name]
    with pytest.raises(CompileError, match=pattern):
        run(body, lint=False)


BUTTERFLY = "float x = a[i];\nfor (int m = 1; m < 32; m *= 2) x = x + simd_shuffle_xor(x, m);\no[i] = x;"
RIGHT = {
    "copy": ("o[i] = a[i];", A),
    "butterfly": (BUTTERFLY, np.repeat(A.reshape(2, 32).sum(1), 32)),
    "exchange through threadgroup memory": (
        "threadgroup float s[64];\ns[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\ns[63 - i] = 0;",
        A[::-1],
    ),
    "exchange within SIMD-groups": (
        "threadgroup float s[64];\ns[i] = a[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\no[i] = s[i ^ 31];",
        A.reshape(2, 32)[:, ::-1].ravel(),
    ),
    "exchange through an output": (
        "o[i] = a[i];\nthreadgroup_barrier(mem_flags::mem_device);\nconst float x = o[63 - i];\n"
        "threadgroup_barrier(mem_flags::mem_device);\no[i] = x;",
        A[::-1],
    ),
    "vector load": ("o[i] = (*(const device float4*)(a + i / 4 * 4))[i % 4];", A),
    "products kept apart": (
        "o[i] = add_rn(mul_rn(a[i], 3.0f), 1.0f) + mul_rn(a[i], 0.0f);",
        A * np.float32(3) + np.float32(1),
    ),
    "bits": ("o[i] = as_type<float>(as_type<uint>(a[i]) ^ 0x80000000u);", -A),
    "bfloat rounds to nearest": (
        "o[i] = float(bfloat16_t(a[i]));",
        np.array(mx.array(A).astype(mx.bfloat16).astype(mx.float32)),
    ),
    "half": ("o[i] = float(half(a[i]) * 0.5h);", A.astype(np.float16).astype(np.float32) / 2),
    "broadcast and shift": (
        "o[i] = simd_broadcast(float(a[i]), 3) + simd_shuffle_up(float(a[i]), 1) - simd_shuffle_down(float(a[i]), 1);",
        None,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernel_passes(name):
    body, expected = RIGHT[name]
    out = run(body, header=APART, diag=True)
    assert out.reports == []
    fast = values(body, header=APART)
    assert np.array_equal(np.array(out[0]), fast)
    for order, seed in (("reverse", 0), ("shuffle", 1), ("shuffle", 2)):
        assert np.array_equal(values(body, header=APART, order=order, seed=seed), fast)
    if expected is None:
        rows = A.reshape(2, 32)
        up = np.concatenate([rows[:, :1], rows[:, :-1]], 1)
        down = np.concatenate([rows[:, 1:], rows[:, -1:]], 1)
        expected = (rows[:, 3:4] + up - down).ravel()
    np.testing.assert_allclose(fast, expected, rtol=1e-6, atol=1e-6)


def test_order_of_threads_can_be_changed():
    body = (
        "threadgroup int n[1];\nif (i == 0) n[0] = 0;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[i] = n[0]++;"
    )
    forward = values(body, dtype=mx.int32).tolist()
    assert forward == list(range(N))
    assert values(body, dtype=mx.int32, order="reverse").tolist() == forward[::-1]
    shuffled = [values(body, dtype=mx.int32, order="shuffle", seed=seed).tolist() for seed in (1, 1, 2)]
    assert shuffled[0] == shuffled[1]
    assert shuffled[0] != shuffled[2]
    assert sorted(shuffled[0]) == forward


def test_grid_need_not_be_a_multiple_of_the_threadgroup():
    body = "o[i] = threadgroup_position_in_grid.x * 1000 + threads_per_threadgroup.x;"
    assert values(body, n=40, threadgroup=32).tolist() == [32] * 32 + [1008] * 8


def test_shapes_scalars_and_template_values_arrive_as_in_mlx():
    kernel = metal_sim.metal_kernel(
        "sample",
        ["a", "b", "c"],
        ["o"],
        "o[0] = T(a_shape[1] * 100 + a_ndim * 10 + a_strides[0]) + b + c[2] + (Y ? K : 0);",
    )
    out = kernel(
        inputs=[mx.zeros((3, 5)), mx.array(0.5), mx.array([1, 2, 4000])],
        template=[("T", mx.float32), ("K", 20000), ("Y", True)],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )
    assert out[0].item() == 500 + 20 + 5 + 0.5 + 4000 + 20000


def test_init_value_fills_outputs_and_what_is_never_written_is_not_a_number():
    assert values("if (i < 2) o[i] = a[i];", init_value=7)[2:].tolist() == [7.0] * (N - 2)
    assert run("o[i] += a[i];", init_value=1, diag=True).reports == []
    assert np.isnan(values("if (i < 2) o[i] = a[i];")[2:]).all()


def test_monkeypatched_mlx_runs_here(monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_sim.metal_kernel)
    kernel = mx.fast.metal_kernel(name="sample", input_names=["a"], output_names=["o"], source="o[0] = a[1];")
    with metal_sim.options(diag=True) as runs:
        out = kernel(
            inputs=[mx.arange(8)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )
    assert out[0].item() == 1
    assert [site.buffer for site in runs[0].findings.sites] == ["a", "o"]


def test_denormal_product_is_zero_on_the_gpu_and_not_on_the_cpu():
    tiny = np.full(N, 1e-30, np.float32)
    assert (tiny * np.float32(1e-10) > 0).all()
    assert (np.array(mx.array(tiny) * 1e-10) > 0).all()
    assert values("o[i] = a[i] * 1e-10f;", a=tiny).tolist() == [0.0] * N
    assert values("o[i] = a[i] * 1e10f;", a=np.full(N, 1e-40, np.float32)).tolist() == [0.0] * N
    assert (tiny * np.float32(1e-10) > 0).all()


def test_half_keeps_its_denormals():
    assert (values("o[i] = float(half(a[i]));", a=np.full(N, 6e-8, np.float32)) > 0).all()


def sites(body, **how):
    return {(site.buffer, site.store): site for site in run(body, diag=True, **how).run.findings.sites}


def test_lines_of_neighbouring_loads():
    site = sites("o[i] = a[i];")["a", False]
    assert (site.instructions, site.asked, site.lines, site.worst) == (2, 256, 2, 1)
    assert (site.line_use, site.coverage) == (1.0, 1.0)
    assert site.place == "body:3"


def test_lines_of_scattered_loads():
    site = sites("o[i] = a[i * 32 % 2048];", a=np.zeros(2048, np.float32))["a", False]
    assert (site.instructions, site.lines, site.worst) == (2, 64, 32)
    assert site.line_use == site.coverage == 4 / 128


def test_lines_of_loads_that_a_launch_uses_in_the_end():
    site = sites(
        "float x = 0;\nfor (int j = 0; j < 32; ++j) x += a[i * 32 + j];\no[i] = x;", a=np.zeros(2048, np.float32)
    )
    assert site["a", False].line_use == 4 / 128
    assert site["a", False].coverage == 1.0


def test_lines_end_where_the_buffer_does():
    site = sites("o[i] = a[i % 40];", a=A[:40])["a", False]
    assert (site.reachable, site.coverage) == (160, 1.0)


def test_lines_of_one_number_for_all():
    site = sites("o[i] = a[3];")["a", False]
    assert (site.asked, site.used, site.lines) == (256, 8, 2)


def cuda(body, header=""):
    kernel = cuda_check.cuda_kernel("sample", ["a"], ["o"], body, header)
    with cuda_check.builds() as builds:
        kernel(
            inputs=[mx.zeros((4, 16))],
            template=[("T", mx.bfloat16), ("K", 3), ("Y", False)],
            grid=(N, 1, 1),
            threadgroup=(N, 1, 1),
            output_shapes=[(N,)],
            output_dtypes=[mx.float32],
        )
    return builds[0]


@needs_nvrtc
@pytest.mark.oracle
def test_cuda_counts_what_the_compiler_fuses():
    index = "const int i = threadIdx.x; "
    fused = cuda(index + "o[i] = a[i] * a[0] + a[1];")
    assert (fused.fused, fused.fused_in_source) == (1, 0)
    spelled = cuda(index + "o[i] = fma(a[i], a[0], a[1]);")
    assert (spelled.fused, spelled.fused_in_source) == (1, 1)
    apart = cuda(index + "o[i] = __fadd_rn(__fmul_rn(a[i], a[0]), a[1]);")
    assert (apart.fused, apart.fused_in_source) == (0, 0)


@needs_nvrtc
@pytest.mark.oracle
def test_cuda_text_has_mlx_names():
    build = cuda("o[0] = float(T(a_shape[1] + a_ndim + a_strides[0])) + (Y ? 0 : K) + inf;")
    assert "custom_kernel_sample" in build.ptx
    with pytest.raises(CompileError, match="nonsense"):
        cuda("o[0] = nonsense;")
