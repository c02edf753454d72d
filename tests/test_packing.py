"""The chunk lists of packed batches: what is remembered of them, and locks in a child process."""

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch

from layout_tuner import ops
from layout_tuner.spec import packing

# Another thread holds a lock, and intercepts launches, while this one forks.
FORK = """
import os, signal, threading
import torch
from layout_tuner.launch import launcher
from layout_tuner import ops
from layout_tuner.spec import packing
from layout_tuner.integrations import fla

locks = {"packing": packing._lock, "launcher": launcher._interceptors_lock, "fla": fla._lock}
held, done = threading.Event(), threading.Event()

def hold():
    with launcher.intercepting(lambda record: None), locks[%r]:
        held.set()
        done.wait()

other = threading.Thread(target=hold)
other.start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(20)  # ends a child that waits for ever
    try:
        assert not launcher.intercepted()
        with launcher.recording():
            assert launcher.intercepted()
        assert not launcher.intercepted()
        assert ops.prepare_chunk_indices(torch.tensor([0, 5]), 4).tolist() == [[0, 0], [0, 1]]
        with fla._lock:
            pass
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
status = os.waitpid(pid, 0)[1]
assert launcher.intercepted()
done.set()
other.join()
assert status == 0, status
assert not launcher.intercepted()
"""

OWN = """
import os
from layout_tuner.launch import launcher

with launcher.recording(), launcher.recording():
    pid = os.fork()
    assert launcher._interceptors == 2
assert launcher._interceptors == 0
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


def python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr


@forks
@pytest.mark.parametrize("lock", ["packing", "launcher", "fla"])
def test_a_child_waits_for_no_thread_of_its_parent(lock: str) -> None:
    python(FORK % lock)


@forks
def test_a_child_still_intercepts_what_the_thread_that_forked_did() -> None:
    python(OWN)


def entries(tensor: torch.Tensor) -> int:
    return sum(found.of() is tensor for found in packing._memo.values())


def test_a_reused_buffer_is_remembered_once_for_a_chunk_size() -> None:
    before = len(packing._memo)
    starts = torch.tensor([0, 0, 64])
    for middle in range(65):
        starts.copy_(torch.tensor([0, middle, 64]))
        for chunk_size in (8, 16):
            chunks = ops.prepare_chunk_indices(starts, chunk_size)
            assert chunks is ops.prepare_chunk_indices(starts, chunk_size)
            assert (chunks[:, 0] == 0).sum() == -(-middle // chunk_size)
            assert packing.prepare_chunk_offsets(starts, chunk_size)[1] == -(-middle // chunk_size)
    assert entries(starts) == 2
    assert len(packing._memo) <= before + 2
    slots = {(id(starts), 8), (id(starts), 16)}
    del starts
    gc.collect()
    assert not slots & set(packing._memo)


def test_lists_of_an_older_version_never_replace_newer_ones() -> None:
    starts = torch.tensor([0, 8])
    older = packing._version(starts)
    late = ops.prepare_chunk_indices(starts, 8)
    starts.copy_(torch.tensor([0, 16]))
    newest = ops.prepare_chunk_indices(starts, 8)
    packing._remember(starts, older, 8, starts.clone(), late, late, 8)
    assert ops.prepare_chunk_indices(starts, 8) is newest
    assert newest.tolist() == [[0, 0], [0, 1]]


def test_threads_read_the_lists_of_the_newest_version() -> None:
    starts = torch.tensor([0, 8])

    def chunks(_: int) -> int:
        return len(ops.prepare_chunk_indices(starts, 8))

    with ThreadPoolExecutor(8) as pool:
        for count in range(1, 40):
            starts.copy_(torch.tensor([0, 8 * count]))
            assert set(pool.map(chunks, range(16))) == {count}
    assert entries(starts) == 1


def written_by_numpy(starts: torch.Tensor) -> None:
    starts.numpy()[1] = 16


def written_as_data(starts: torch.Tensor) -> None:
    starts.data[1] = 16


def given_other_memory(starts: torch.Tensor) -> None:
    starts.data = torch.tensor([0, 16, 96])


UNSEEN = [written_by_numpy, written_as_data, given_other_memory]


@pytest.mark.parametrize("write", UNSEEN)
def test_starts_on_the_host_are_those_of_now_whatever_torch_saw(write: Callable[[torch.Tensor], None]) -> None:
    starts = torch.from_numpy(numpy.array([0, 64, 96]))
    before = ops.prepare_chunk_indices(starts, 16)
    assert ops.prepare_chunk_indices(starts, 16) is before
    write(starts)
    assert (ops.prepare_chunk_indices(starts, 16)[:, 0] == 0).sum() == 1
    assert packing.prepare_chunk_offsets(starts, 16).tolist() == [0, 1, 6]
    with pytest.raises(ValueError, match="of other sequences"):
        packing.chunks_of(starts, before, 16, 96)


def test_a_list_that_somebody_wrote_to_is_made_anew() -> None:
    starts = torch.tensor([0, 64, 96])
    ops.prepare_chunk_indices(starts, 16).numpy()[:] = 1000
    assert ops.prepare_chunk_indices(starts, 16).max() == 3


@pytest.mark.parametrize("remembered", [False, True])
def test_two_accounts_of_starts_on_the_host_are_compared(remembered: bool) -> None:
    starts = torch.tensor([0, 16, 96])
    if remembered:
        ops.prepare_chunk_indices(starts, 16)
    with pytest.raises(
        ValueError, match=r"cu_seqlens_cpu: wanted the values of cu_seqlens, \[0, 16, 96\], got \[0, 64, 96\]"
    ):
        ops.prepare_chunk_indices(starts, 16, torch.tensor([0, 64, 96], dtype=torch.int32))
    assert len(ops.prepare_chunk_indices(starts, 16, starts.int())) == 6


def small_call(starts: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 96, 1, 16) for _ in range(3))
    g, beta = -torch.rand(1, 96, 1), torch.rand(1, 96, 1)
    return ops.chunk_gated_delta_rule(q, k, v.requires_grad_(), g, beta, cu_seqlens=starts, **more)[0]


def test_a_call_follows_starts_that_numpy_wrote_and_a_backward_refuses_them(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("starts are on the host where kernels are interpreted")
    memory = numpy.array([0, 64, 96])
    starts = torch.from_numpy(memory)
    first = small_call(starts)
    memory[1] = 16
    assert torch.equal(small_call(starts), small_call(torch.tensor([0, 16, 96])))
    with pytest.raises(RuntimeError, match="hand over a copy"):
        first.sum().backward()
    with pytest.raises(ValueError, match="cu_seqlens_cpu: wanted the values of cu_seqlens"):
        small_call(starts, cu_seqlens_cpu=torch.tensor([0, 64, 96]))
