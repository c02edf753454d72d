"""The simulated device itself: what it must do so that code which passes on it has a chance on a real NPU."""

import io
import os
import signal
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20


@triton.jit
def scale_rows(
    x,
    y,
    n,
    stride: tl.constexpr,
    BLOCK: tl.constexpr,
    FACTOR: tl.constexpr,
):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < n
    tl.store(y + o_x * stride, tl.load(x + o_x * stride, mask=m_x) * FACTOR, mask=m_x)


@triton.jit
def overrun(x, y, BLOCK: tl.constexpr):
    o_x = tl.arange(0, BLOCK)
    tl.store(y + o_x, tl.load(x + o_x))


@triton.jit
def matmul_tile(a, b, c, BLOCK: tl.constexpr):
    o_x = tl.arange(0, BLOCK)
    p = o_x[:, None] * BLOCK + o_x[None, :]
    tl.store(c + p, tl.dot(tl.load(a + p), tl.load(b + p), input_precision="ieee"))


@triton.jit
def count_up(x, BLOCK: tl.constexpr):
    tl.atomic_add(x + tl.arange(0, BLOCK), 1)


def scaled(x: torch.Tensor, *, factor: int = 2, y: torch.Tensor | None = None) -> torch.Tensor:
    y = torch.empty_like(x) if y is None else y
    n = x.numel()
    scale_rows[(triton.cdiv(n, 16),)](x, y, n, x.stride(-1), BLOCK=16, FACTOR=factor)
    return y


# ---- Tensors


@pytest.mark.parametrize("make", [torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand])
def test_factories_make_npu_tensors(make):
    x = make(3, 4, device="npu")
    assert (x.device, x.device.type, x.is_npu) == (torch.device("npu", 0), "npu", True)


def test_copies_keep_values_and_dtypes():
    x = torch.randn(5, 7)
    for y in (x.to("npu"), x.npu(), x.to("npu", non_blocking=True), torch.tensor(x.tolist(), device="npu")):
        assert torch.equal(y.cpu(), x)
    assert torch.equal(x.npu().to(torch.bfloat16).cpu(), x.to(torch.bfloat16))
    z = torch.zeros(5, 7, device="npu")
    z[1:3, ::2].copy_(torch.ones(2, 4))
    assert z.cpu()[1:3, ::2].eq(1).all() and z.cpu().sum() == 8


def test_views_share_memory_and_keep_strides():
    x = torch.arange(12.0, device="npu").view(3, 4)
    t = x.transpose(0, 1)
    assert t.stride() == (1, 4) and t.data_ptr() == x.data_ptr()
    packed = t.contiguous()
    assert packed.is_contiguous() and packed.data_ptr() != x.data_ptr()
    x[0, 1] = 100
    assert t[1, 0].item() == 100 and packed[1, 0].item() == 1
    assert x.narrow(1, 1, 2).unsqueeze(0).expand(2, 3, 2).stride() == (0, 4, 1)
    assert torch.empty_strided((2, 3, 4), (12, 1, 3), device="npu").stride() == (12, 1, 3)
    assert x.view(torch.int32).shape == (3, 4)


@pytest.mark.parametrize(
    "op",
    [
        lambda x, y: x @ y,
        lambda x, y: torch.softmax(x @ y, -1),
        lambda x, y: torch.where(x > 0, x, 0 * x),
        lambda x, y: x[:, [0, 2]],
        lambda x, y: x[torch.tensor([0, 2])],
        lambda x, y: torch.cat([x, x]),
        lambda x, y: torch.einsum("ij,jk->ki", x, y),
        lambda x, y: torch.cumsum(x, 0),
        lambda x, y: torch.nn.functional.layer_norm(x, (8,)),
        lambda x, y: x.tril() + 1.5,
    ],
)
def test_operators_match_the_cpu(op):
    a, b = torch.randn(6, 8), torch.randn(8, 5)
    got = op(a.npu(), b.npu())
    assert got.is_npu
    torch.testing.assert_close(got.cpu(), op(a, b))


def test_autograd_module_and_checkpoint():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to("npu")
    x = torch.randn(16, 4, device="npu")
    checkpoint(model, x, use_reentrant=False).pow(2).mean().backward()
    assert all(p.grad is not None and p.grad.is_npu for p in model.parameters())
    y = torch.randn(3, 3, dtype=torch.double, device="npu", requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: torch.tanh(t @ t), (y,))


def test_backward_runs_in_a_thread_of_its_own():
    """As beside a real device: thread-local state of the forward is not there in the backward."""
    seen = []
    y = torch.ones(2, device="npu", requires_grad=True)
    z = y * 2
    z.register_hook(lambda grad: seen.append(threading.get_ident()))
    z.sum().backward()
    assert seen and seen[0] != threading.get_ident()


def test_autocast():
    x = torch.ones(2, 2, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16 and (x + x).dtype == torch.float32

    @torch.amp.custom_fwd(device_type="npu", cast_inputs=torch.float16)
    def forward(t):
        return t.dtype, torch.is_autocast_enabled("npu")

    with torch.autocast("npu", dtype=torch.bfloat16):
        assert forward(x) == (torch.float16, False)


def test_random_numbers():
    torch.manual_seed(7)
    a = torch.randn(4, device="npu")
    torch.npu.manual_seed(7)
    assert torch.npu.initial_seed() == 7
    assert torch.equal(a, torch.randn(4, device="npu")) and not torch.equal(a, torch.randn(4, device="npu"))
    drawn = [torch.randn(4, device="npu", generator=torch.Generator("npu").manual_seed(3)) for _ in range(2)]
    assert torch.equal(*drawn)
    state = torch.npu.get_rng_state()
    b = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(b, torch.rand(3, device="npu"))


def test_save_and_load():
    x = torch.randn(3, device="npu")
    file = io.BytesIO()
    torch.save(x, file)
    for where, is_npu in ((None, True), ("cpu", False)):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded.is_npu == is_npu and torch.equal(loaded.cpu(), x.cpu())


# ---- What a real device refuses too


def test_host_code_cannot_dereference_device_memory(python):
    died = python(
        "from npu_sim import sim; sim.install(); import torch, ctypes\n"
        "ctypes.string_at(torch.ones(4, device='npu').data_ptr(), 16)"
    )
    assert died.returncode == -signal.SIGSEGV, died.stderr
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(2, device="npu").numpy()


@pytest.mark.parametrize(
    "op",
    [
        lambda x, y: x + y,
        lambda x, y: y + x,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.dot(x, y),
        lambda x, y: torch.where(x > 0, x, y),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_mixed_devices_are_refused(op, other):
    with pytest.raises(RuntimeError, match=r"same device|\(when checking argument"):
        op(torch.ones(2, device="npu"), torch.ones(2, device=other))


def test_scalars_from_the_cpu_are_fine():
    assert (torch.ones(2, device="npu") + torch.tensor(1.0)).tolist() == [2, 2]


def test_fresh_memory_is_poisoned():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(70, dtype=dtype, device="npu").isnan().all()
    assert torch.empty(5, dtype=torch.int32, device="npu").eq(-1).all()
    assert torch.empty_like(torch.zeros(9, device="npu")).isnan().all()


# ---- The runtime


def test_device_queries(sim):
    assert torch.npu.is_available() and torch.npu.device_count() == 2 and torch.npu.current_device() == 0
    assert torch.npu.get_device_name() == torch.npu.get_device_name("npu:1") == "Ascend910B3"
    found = torch.npu.get_device_properties(0)
    assert (found.cube_core_num, found.vector_core_num) == (20, 40)
    assert torch.get_device_module("npu") is torch.npu and torch.npu.is_simulated
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.npu.utils.get_cann_version("CANN")
    with pytest.raises(AssertionError):
        torch.npu.get_device_name(5)
    with pytest.raises(RuntimeError, match="no device npu:3"):
        torch.empty(1, device="npu:3")
    sim.set_properties(name="Ascend910_9391", cube_core_num=24, vector_core_num=48)
    assert torch.npu.get_device_name() == "Ascend910_9391"
    assert triton.runtime.driver.active.utils.get_device_properties(0) == {"num_aicore": 24, "num_vectorcore": 48}


def test_several_devices():
    a = torch.ones(2, device="npu:1")
    assert a.device.index == 1 and (a * 2).device.index == 1
    with torch.npu.device(1):
        assert torch.npu.current_device() == 1 == torch.empty(1, device="npu").device.index
    assert torch.npu.current_device() == 0
    assert torch.equal(a.to("npu:0"), torch.ones(2, device="npu:0"))


def test_memory_is_counted():
    base = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    x = torch.empty(MIB, device="npu")
    y = torch.empty(MIB, dtype=torch.int8, device="npu:1")
    assert torch.npu.memory_allocated() - base == 4 * MIB
    assert torch.npu.memory_allocated(1) >= y.nbytes
    del x
    assert torch.npu.memory_allocated() == base and torch.npu.max_memory_allocated() == base + 4 * MIB


def test_memory_runs_out(sim):
    sim.set_properties(total_memory=torch.npu.memory_allocated() + 3 * MIB)
    free, total = torch.npu.mem_get_info()
    assert free == 3 * MIB and total == torch.npu.get_device_properties().total_memory
    kept = torch.empty(2 * MIB, dtype=torch.int8, device="npu")
    with pytest.raises(RuntimeError, match=r"NPU out of memory\. Tried to allocate 2 MiB") as caught:
        torch.empty(2 * MIB, dtype=torch.int8, device="npu")
    assert type(caught.value) is RuntimeError, "torch_npu 7 has no class for it"
    del kept
    assert torch.empty(2 * MIB, dtype=torch.int8, device="npu").numel() == 2 * MIB


def test_streams():
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        assert torch.npu.current_stream() == side != torch.npu.default_stream()
        torch.ones(2, device="npu").record_stream(side)
    assert torch.npu.current_stream() == torch.npu.default_stream()
    side.wait_stream(torch.npu.current_stream())
    side.record_event().synchronize()
    assert side.query()


@pytest.mark.parametrize("make", [lambda **kw: torch.npu.Event(**kw), lambda **kw: torch.Event("npu", **kw)])
def test_events_measure_the_set_clock(sim, make):
    sim.use_wall_clock(False)
    begin, end = make(enable_timing=True), make(enable_timing=True)
    begin.record()
    sim.advance(12.5)
    end.record()
    with pytest.raises(RuntimeError, match="must be completed"):
        begin.elapsed_time(end)
    torch.npu.synchronize()
    assert begin.elapsed_time(end) == 12.5
    untimed = make()
    untimed.record()
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(untimed)


def test_events_measure_the_wall_clock():
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    begin.record()
    scaled(torch.ones(64, device="npu"))
    end.record()
    end.synchronize()
    begin.synchronize()
    assert 0 < begin.elapsed_time(end) < 60_000


def test_only_a_wait_that_covers_it_completes_an_event():
    event = torch.npu.Event()
    event.record()
    torch.npu.synchronize(1)
    torch.npu.Stream().synchronize()
    assert not event.query()
    event.record()
    torch.npu.current_stream().synchronize()
    assert event.query()


def test_host_waits_are_counted(sim):
    x = torch.ones(4, device="npu")
    before = sim.sync_count()
    y = (x + 1).t().contiguous()
    scaled(y)
    x.to("cpu", non_blocking=True)
    assert sim.sync_count() == before
    for wait in (lambda: torch.npu.synchronize(), lambda: x.cpu(), lambda: x.sum().item(), lambda: torch.equal(x, y)):
        wait()
        before += 1
        assert sim.sync_count() == before


def test_capture_forbids_waiting(sim):
    x = torch.ones(2, device="npu")
    assert not torch.npu.is_current_stream_capturing()
    with sim.capture():
        assert torch.npu.is_current_stream_capturing()
        x + 1
        for wait in (torch.npu.synchronize, x.cpu, x[0].item):
            with pytest.raises(RuntimeError, match="while a stream is capturing"):
                wait()
    assert not torch.npu.is_current_stream_capturing() and x.tolist() == [1, 1]


# ---- Triton kernels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_kernels_read_and_write_device_memory(dtype):
    x = torch.arange(37, device="npu").to(dtype)
    y = scaled(x)
    assert y.is_npu and torch.equal(y.cpu(), x.cpu() * 2)


def test_kernels_see_strides_and_offsets():
    wide = torch.arange(80.0, device="npu").view(20, 4)
    out = torch.zeros(20, 4, device="npu")
    scaled(wide[:, 1], y=out[:, 1])
    assert torch.equal(out[:, 1].cpu(), wide[:, 1].cpu() * 2) and out[:, [0, 2, 3]].abs().sum().item() == 0


def test_kernels_leave_memory_they_do_not_write_poisoned():
    y = torch.empty(64, device="npu")
    scaled(torch.ones(20, device="npu"), y=y)
    assert not y[:20].isnan().any() and y[20:].isnan().all()


def test_dots_and_atomics():
    a, b = torch.randn(16, 16, device="npu"), torch.randn(16, 16, device="npu")
    c = torch.empty_like(a)
    matmul_tile[(1,)](a, b, c, BLOCK=16)
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5)
    counts = torch.zeros(16, dtype=torch.int32, device="npu")
    count_up[(3,)](counts, BLOCK=16)
    assert counts.eq(3).all()


def test_kernels_on_cpu_tensors_still_run():
    assert scaled(torch.ones(20)).eq(2).all()


def test_kernel_overruns_are_found():
    exact, short = torch.ones(16, device="npu"), torch.ones(15, device="npu")
    with pytest.raises(Exception, match=r"touches 4 bytes at offset 60 of the .* below, which has 60 bytes"):
        overrun[(1,)](short, exact, BLOCK=16)
    with pytest.raises(Exception, match="touches 4 bytes at offset 60"):
        overrun[(1,)](exact, short, BLOCK=16)
    overrun[(1,)](exact, exact, BLOCK=16)


def test_kernels_refuse_host_memory_and_other_devices():
    x, host, other = torch.ones(16, device="npu"), torch.ones(16), torch.ones(16, device="npu:1")
    with pytest.raises(ValueError, match="cannot be accessed from Triton: it lies on cpu"):
        scaled(x, y=host)
    with pytest.raises(RuntimeError, match="was given memory of npu:1"):
        scaled(other)
    with torch.npu.device(1):
        assert scaled(other).eq(2).all()


def test_costs_decide_how_long_a_launch_takes(sim):
    sim.use_wall_clock(False)
    sim.launch_cost("scale_*", 3.0)
    sim.launch_cost("scale_rows", 1.0, FACTOR=2)
    sim.launch_cost("scale_rows", lambda launch: 10.0 * launch.grid[0], FACTOR=5)
    sim.copy_cost(0.25)
    x = torch.ones(40, device="npu")

    def took(fn) -> float:
        before = sim.now_ms()
        fn()
        return sim.now_ms() - before

    assert took(lambda: scaled(x, factor=2)) == 1.0
    assert took(lambda: scaled(x, factor=3)) == 3.0
    assert took(lambda: scaled(x, factor=5)) == 30.0
    assert took(lambda: overrun[(1,)](x, x, BLOCK=16)) == 0.0
    assert took(lambda: x.view(5, 8).t().contiguous()) == 0.25
    assert took(lambda: (x + 1).sum().item()) == 0.0
    assert [launch.constexprs["FACTOR"] for launch in sim.launches()[:3]] == [2, 3, 5]
    assert sim.launches()[2].grid == (3,) and sim.launches()[3].kernel == "overrun"


def test_launches_without_execution_only_take_time(sim):
    sim.use_wall_clock(False)
    sim.launch_cost("scale_rows", 2.0)
    x, before = torch.ones(4, device="npu"), sim.now_ms()
    with sim.without_execution():
        assert scaled(x).isnan().all()
    assert sim.now_ms() - before == 2.0
    assert scaled(x).eq(2).all()


def test_costs_may_fail_a_launch(sim):
    def fail(launch):
        raise RuntimeError("ub overflow")

    sim.launch_cost("scale_rows", fail, FACTOR=3)
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="ub overflow"):
        scaled(x, factor=3)
    assert scaled(x, factor=2).eq(2).all()


def test_tritons_own_benchmark_runs_on_the_set_clock(sim):
    sim.use_wall_clock(False)
    assert triton.testing.do_bench(lambda: sim.advance(4.0), warmup=5, rep=20) == pytest.approx(4.0)


# ---- What only a real device does


AICORE = r"(?s)compiler_depend\.ts.*error code is 507015.*The aicore execution is abnormal"


def later_calls(x: torch.Tensor) -> dict[str, object]:
    event = torch.npu.Event()
    return {
        "launch": lambda: scaled(x),
        "operator": lambda: x + 1,
        "copy": lambda: x.clone(),
        "read": x.cpu,
        "record": event.record,
        "synchronize": torch.npu.synchronize,
    }


@pytest.mark.parametrize("later", ["launch", "operator", "copy", "read", "record", "synchronize"])
def test_a_failed_launch_is_told_once_by_a_later_call_and_then_all_is_silence(sim, later):
    x, y = torch.ones(16, device="npu"), torch.zeros(16, device="npu")
    before, never = torch.npu.Event(), torch.npu.Event()
    before.record()
    torch.npu.synchronize()
    sim.launch_fault("scale_rows", FACTOR=3)
    scaled(x, factor=3, y=y)
    with pytest.raises(RuntimeError, match=AICORE):
        later_calls(x)[later]()
    for call in later_calls(x).values():
        call()
    scaled(x, y=y)
    y += 1
    x.copy_(torch.full((16,), 5.0))
    never.record()
    assert (x.tolist(), y.tolist()) == ([1.0] * 16, [0.0] * 16), "a write after the failure arrived"
    torch.npu.synchronize()
    assert before.query() and not never.query() and not never.query()
    sim.reset()
    assert scaled(x).tolist() == [2.0] * 16


def test_one_device_fails_alone(sim):
    sim.stop_queue(1)
    assert scaled(torch.ones(4, device="npu")).tolist() == [2.0] * 4


def test_a_hang_holds_waits_up_and_then_stops_the_queue(sim):
    x, event = torch.ones(16, device="npu"), torch.npu.Event()
    sim.launch_hang("scale_rows", 0.2)
    scaled(x)
    event.record()
    assert not event.query() and not event.query()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="error code is 507014"):
        torch.npu.synchronize()
    assert time.monotonic() - start > 0.1
    assert not event.query()


def test_a_hang_holds_the_end_of_the_process_up(python):
    code = (
        "from npu_sim import sim; sim.install(); import time, torch, atexit\n"
        "torch.ones(2, device='npu'); torch.ops.npu_sim.occupy(0, 1.0, 'late'); print(time.monotonic(), flush=True)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - float(done.stdout) >= 1.0


def test_recycled_memory_holds_what_it_held(sim):
    base = torch.npu.memory_reserved()
    with sim.recycled_memory():
        x = torch.full((300,), 7.0, device="npu")
        del x
        assert torch.npu.memory_reserved() >= base + 1200
        assert torch.npu.memory_allocated() <= base
        y = torch.empty(290, device="npu")
        assert y.cpu().eq(7).all(), "the same block"
        del y
        torch.npu.empty_cache()
        assert torch.npu.memory_reserved() == torch.npu.memory_allocated()
        assert torch.empty(300, device="npu").isnan().all()


def test_want_of_memory_takes_recycled_blocks_first(sim):
    with sim.recycled_memory():
        sim.set_properties(total_memory=torch.npu.memory_allocated() + 3 * MIB)
        first = torch.empty(2 * MIB, dtype=torch.int8, device="npu")
        del first
        assert torch.npu.mem_get_info()[0] == MIB
        assert torch.empty(3 * MIB, dtype=torch.int8, device="npu").numel() == 3 * MIB


FORKED = """
import os, sys
from npu_sim import sim
sim.install()
import torch
assert not torch.npu.is_initialized()
if sys.argv[-1] == "used":
    torch.ones(2, device="npu")
    assert torch.npu.is_initialized()
pid = os.fork()
if pid == 0:
    try:
        print(torch.ones(2, device="npu").sum().item(), torch.npu._is_in_bad_fork(), flush=True)
    except RuntimeError as error:
        print(error, torch.npu._is_in_bad_fork(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_after_the_first_use_cannot_use_the_device(python):
    assert python(FORKED).stdout.split() == ["2.0", "False"]
    refused = python(FORKED.replace('sys.argv[-1] == "used"', "True")).stdout
    assert refused.startswith("Cannot re-initialize NPU in forked subprocess.") and refused.strip().endswith("True")


def test_properties_and_versions_may_be_missing(sim):
    sim.hide_properties("cube_core_num", "L2_cache_size")
    found = torch.npu.get_device_properties()
    assert not hasattr(found, "cube_core_num") and not hasattr(found, "L2_cache_size") and found.vector_core_num == 40
    with sim.without_versions(), pytest.raises(RuntimeError, match="not found"):
        torch.npu.utils.get_cann_version("CANN")


# ---- Installation


def test_reset_restores_everything(sim):
    sim.use_wall_clock(False)
    sim.launch_cost("*", 5.0)
    sim.copy_cost(1.0)
    sim.set_properties(name="Ascend950", total_memory=1)
    torch.npu.set_device(1)
    sim.reset()
    assert torch.npu.get_device_name() == "Ascend910B3" and torch.npu.mem_get_info()[1] == 64 << 30
    assert torch.npu.current_device() == 0 and not sim.launches()
    before = sim.now_ms()
    scaled(torch.ones(4, device="npu"))
    assert 0 < sim.now_ms() - before < 5000


def test_installing_again(sim):
    sim.install(devices=2)
    sim.attach_triton()
    with pytest.raises(RuntimeError, match="cannot change"):
        sim.install(devices=3)


def test_installation_changes_no_environment_variable(python):
    code = (
        "import os; before = dict(os.environ)\n"
        "from npu_sim import sim; sim.install(); sim.attach_triton(); sim.reset()\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr


def test_triton_must_interpret(python):
    assert (
        "without TRITON_INTERPRET=1"
        in python("from npu_sim import sim; sim.install(); sim.attach_triton()", TRITON_INTERPRET="0").stderr
    )


def test_refusals_say_why(sim, monkeypatch):
    monkeypatch.setattr(sim, "_installed", False)
    with pytest.raises(RuntimeError, match="already has the PrivateUse1 backend 'npu'"):
        sim.install()
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "nothing")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler"):
        sim.install()
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    with pytest.raises(RuntimeError, match=r"against torch 2.13's C\+\+ interfaces; this is torch 2.10.0"):
        sim.install()


def test_a_failed_build_leaves_nothing(sim, tmp_path, monkeypatch):
    compiler, cache = tmp_path / "cxx", tmp_path / "cache"
    compiler.write_text("#!/bin/sh\necho no such luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(RuntimeError, match=r"(?s)compiling npu_sim.cpp failed.*no such luck"):
        sim.build.library(cache)
    assert list(cache.iterdir()) == []


def test_a_killed_build_does_not_hold_up_the_next(sim, tmp_path):
    finished = sim.build.library()
    (tmp_path / "build-killed").mkdir()
    (tmp_path / "build-killed" / finished.name).write_bytes(b"half a library")
    (tmp_path / finished.name).write_bytes(finished.read_bytes())
    assert sim.build.library(tmp_path) == tmp_path / finished.name
