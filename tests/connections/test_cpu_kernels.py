"""The compiled CPU kernels against the float64 reference, against plain PyTorch, and against themselves."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
import torch
from cases import error, rms_error
from hypothesis import example, given, settings
from hypothesis import strategies as st
from site_cases import Case

from laneway.connections.kernels import plain
from laneway.connections.kernels.cpu import LARGEST, backend, build
from laneway.native import capabilities

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
]


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    backend.load()


@example(74, 1, 1, 1, 0.0, 0.0, 1, False, 4.0)  # every gate is near one
@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from([0, 1, 2, 3, 31, 33, 127]),
    st.sampled_from([1, 2, 3, 4, 5, 8]),
    st.sampled_from([1, 7, 16, 24, 72, 130, 257]),
    st.sampled_from([0.0, 1e-6]),
    st.sampled_from([0.0, 8.0]),
    st.sampled_from([1, 3, 20, 41]),
    st.booleans(),
    st.sampled_from([0.1, 1.0, 4.0]),
)
def test_equals_the_reference_in_fp32(seed, tokens, n, c, eps, cap, iterations, carried, spread):
    torch.manual_seed(seed)
    case = Case(tokens, n, c, torch.float32, eps=eps, cap=cap, iterations=iterations, carried=carried, spread=spread)
    got, want = case.through(backend), case.expected()
    for name in want:
        assert got[name].shape == want[name].shape, name
        assert error(got[name], want[name]) < 1e-4, name


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("carried", [False, True])
def test_bf16_errs_no_more_than_twice_plain_pytorch(n, carried):
    """Both against float64; plain PyTorch with the same rounding points is what kernels/plain.py does."""
    ours, theirs = {}, {}
    for _ in range(12):  # pooled: the gradient of scale has three numbers only
        case = Case(70, n, 45, torch.bfloat16, carried=carried)
        other = case.through(plain)
        own = case.through(backend)  # last: ``expected`` goes on from its streams between the sites
        want = case.expected()
        for name in want:
            assert own[name].dtype == other[name].dtype, name
            ours[name] = ours.get(name, 0.0) + rms_error(own[name], want[name]) ** 2
            theirs[name] = theirs.get(name, 0.0) + rms_error(other[name], want[name]) ** 2
    for name in ours:
        assert ours[name] ** 0.5 <= 2 * theirs[name] ** 0.5 + 1e-5, name


@pytest.mark.parametrize("spread", [30.0, 200.0])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_large_logits_stay_finite(spread, eps):
    case = Case(40, 4, 16, torch.float32, eps=eps, cap=0.0, spread=spread)
    for name, t in case.through(backend).items():
        assert torch.isfinite(t).all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_how_many_there_are(dtype):
    """Results and gradients of the first rows, bit for bit, from 1 to 4096 tokens and with another number of threads."""
    whole = Case(4096, 4, 40, dtype)
    options, back = whole.options, whole.options[1:]

    def run(count):
        x, f, gy, gh = whole.x[:count], whole.f[:count], whole.gy[:count], whole.gh[:count]
        h, maps, z, r = backend.pre(x, None, *whole.first, *options)
        y, *_ = backend.cross(x, f, maps, None, *whole.second, *options)
        gf, gmaps = backend.post_backward(gy, x, f, maps)
        gx, *_ = backend.pre_backward(gy, gh, gmaps, x, None, *whole.first, maps, z, r, *back)
        return h, maps, z, r, y, gf, gmaps, gx

    want, threads = run(4096), torch.get_num_threads()
    for count in (1, 2, 3, 31, 33, 127, 1000):
        for a, b in zip(run(count), want, strict=True):
            assert torch.equal(a, b[:count])
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        for a, b in zip(run(4096), want, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_is_post_and_pre_bit_for_bit(dtype):
    case = Case(70, 4, 72, dtype)
    options, back = case.options, case.options[1:]
    _, maps, *_ = backend.pre(case.x, None, *case.first, *options)
    y, h, maps2, z, r = backend.cross(case.x, case.f, maps, None, *case.second, *options)
    apart = backend.post(case.x, case.f, maps)
    assert torch.equal(y, apart)
    for a, b in zip((h, maps2, z, r), backend.pre(apart, None, *case.second, *options), strict=True):
        assert torch.equal(a, b)
    gmaps = torch.randn_like(maps)
    given = (case.gh, gmaps)
    g, gf, gbefore, *grads, _ = backend.cross_backward(
        case.gy, None, *given, case.x, case.f, maps, y, None, *case.second, maps2, z, r, *back
    )
    g_apart, *grads_apart, _ = backend.pre_backward(case.gy, *given, y, None, *case.second, maps2, z, r, *back)
    apart = backend.post_backward(g_apart, case.x, case.f, maps)
    for a, b in zip((g, gf, gbefore, *grads), (g_apart, *apart, *grads_apart), strict=True):
        assert torch.equal(a, b)


def test_missing_gradients_are_zeros():
    case = Case(33, 4, 24, torch.float32)
    back = case.options[1:]
    _, maps, z, r = backend.pre(case.x, None, *case.first, *case.options)
    rest = (case.x, None, *case.first, maps, z, r, *back)
    zeros = torch.zeros_like(case.x), torch.zeros_like(case.gh), torch.zeros_like(maps)
    gmaps = torch.randn_like(maps)
    for some in (
        (case.gy, None, None),
        (None, case.gh, None),
        (None, None, gmaps),
        (case.gy, case.gh, None),
        (None, None, None),
    ):
        full = tuple(zero if t is None else t for t, zero in zip(some, zeros, strict=True))
        for a, b in zip(backend.pre_backward(*some, *rest)[:4], backend.pre_backward(*full, *rest)[:4], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    extra = torch.randn_like(case.x)
    own = (case.x, case.f, maps, case.x, None, *case.first, maps, z, r, *back)
    with_extra = backend.cross_backward(case.gy, extra, case.gh, gmaps, *own)[0]
    torch.testing.assert_close(with_extra, backend.cross_backward(case.gy, None, case.gh, gmaps, *own)[0] + extra)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_stays_in_its_token(dtype):
    case = Case(40, 4, 24, dtype)
    clean = case.through(backend)
    case.x[17, 2, 5] = float("nan")
    case.gy[23, 1, 3] = float("nan")
    spoilt = case.through(backend)
    others = [i for i in range(40) if i not in (17, 23)]
    for name in ("h", "maps", "y", "h2", "maps2", "out", "gx", "gf"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name
    for name in ("h", "maps", "y", "gx"):
        assert spoilt[name][17].isnan().any(), name
    assert spoilt["gfn"].isnan().any()


def test_the_same_twice_is_the_same_bits():
    case = Case(1000, 4, 72, torch.float32)
    for a, b in zip(case.through(backend).values(), case.through(backend).values(), strict=True):
        assert torch.equal(a, b)


def test_large_streams_do_not_overflow():
    case = Case(9, 4, 24, torch.bfloat16)
    case.x *= 1e4
    for name, t in case.through(backend).items():
        assert torch.isfinite(t).all(), name


LESSER = {"avx2": ("-mavx2", "-mfma"), "baseline": ("-march=x86-64",)}


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86-64")
@pytest.mark.parametrize("name", LESSER)
def test_lesser_cpus_compute_the_same_to_rounding(name, tmp_path, monkeypatch):
    """Code for AVX2 and for any x86-64 runs on this CPU too (where it has AVX2)."""
    if name == "avx2" and "avx2" not in capabilities():
        pytest.skip("this CPU has no AVX2")
    monkeypatch.setenv("LANEWAY_CACHE", str(tmp_path))
    build.library.cache_clear()
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-O1"))  # the last -O counts; a shorter compilation
    case, wide = Case(70, 4, 72, torch.float32), Case(33, 5, 33, torch.bfloat16)
    native = [c.through(backend) for c in (case, wide)]
    try:
        backend.load(str(build.build(LESSER[name]).path))
        assert backend.vector_width() == {"avx2": 8, "baseline": 4}[name]
        lesser = [c.through(backend) for c in (case, wide)]
    finally:
        monkeypatch.undo()
        build.library.cache_clear()
        backend.load(str(build.build().path))
    for a, b, bound in zip(native, lesser, (1e-5, 2e-2), strict=True):
        for key in a:
            assert error(a[key], b[key].double()) < bound, key


OPENMP = """
import torch, laneway
torch.randn(512, 512) @ torch.randn(512, 512)
h, merge = laneway.HyperConnection(8, 4)(torch.randn(64, 4, 8))
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps}
print(sum("/cpu-" in name for name in files), sum("omp" in name.rsplit("/", 1)[-1] and ".so" in name for name in files))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc alone")
def test_the_library_shares_torchs_openmp():
    """A second OpenMP runtime in the process would start a second set of threads."""
    done = subprocess.run([sys.executable, "-c", OPENMP], capture_output=True, text=True, check=True)
    assert done.stdout == "1 1\n", "one library of kernels, one OpenMP runtime"


def test_the_limit_on_streams_is_the_librarys():
    library = ctypes.CDLL(str(build.build().path))
    assert library.laneway_largest() == LARGEST


OUT_OF_MEMORY = """
import resource, torch
from laneway.connections.kernels.cpu import backend
backend.load()
torch.set_num_threads(1)
n, c = 16, 8192
x, m = torch.randn(2, n, c), n * (n + 2)
fn, base, scale = torch.zeros(m, n * c), torch.zeros(m), torch.ones(3)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    backend.pre(x, None, fn, base, scale, 1e-6, 0.0, 8.0, 20)
except MemoryError as error:
    print(error)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS and /proc alone")
def test_without_memory_for_its_work_it_raises():
    """The projection's packed weights (144 MiB here) do not fit into what the process may still have."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, check=False)
    assert done.stdout == "laneway_forward: the kernels' working memory could not be allocated\n", done.stderr
