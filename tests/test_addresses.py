"""Addresses at sizes whose tensors no machine here could hold: the helper's, and those that every kernel forms."""

import itertools
import math

import accesses
import pytest
import torch
from layout_tuner.kernels import probe

from layout_tuner import ops
from layout_tuner.device import driver, interpreter
from layout_tuner.launch import launcher
from layout_tuner.launch.launcher import LaunchRecord
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import layouts, operands, registry
from layout_tuner.spec.declaration import Candidate, OpSpec, Problem
from layout_tuner.spec.keys import Key
from layout_tuner.spec.layouts import Layout, relayout
from layout_tuner.spec.operands import Call
from layout_tuner.tuning.inputs import given

assert ops, "importing the ops registers them"

# (batch row, first token over the whole storage, head, tokens of a row): each product passes 2 ** 31.
FAR = [(64, 64 * 2**20, 31, 2**20), (70_000, 70_000 * 1024, 5, 1024), (0, 2**30, 63, 2**30 + 5)]
HV = 64
# The layouts that kernels read and write.
READ = (Layout.STRIDE_HV, Layout.T_CONTIG)

# Elements of a time-axis tensor lie between 2 ** 31 and 2 ** 32, where a product of 32 bits is negative: through many
# tokens of a row, and through many rows. The third has so many tokens in all, which only gates alone can have.
LONG = {"B": 1, "T": 3 << 24, "H": 2, "HV": 64, "K": 16, "V": 16}
MANY = {"B": 3 << 14, "T": 1024, "H": 2, "HV": 64, "K": 16, "V": 16}
MORE = {"B": 3 << 21, "T": 512, "H": 1, "HV": 2, "K": 16, "V": 16}
SPECS = [registry.lookup(name) for name in registry.names()]
FAR_CASES = [
    pytest.param(spec, sizes, id=f"{spec.name}-{name}")
    for spec in SPECS
    for name, sizes in (("long", LONG), ("many", MANY), ("more", MORE))
    if sizes is not MORE or all(operand.dims in ("B T HV", "HV") for operand in spec.operands)
]


@pytest.mark.parametrize(("i_b", "bos", "i_h", "T"), FAR)
@pytest.mark.parametrize("channels", [1, 24])
@pytest.mark.parametrize("t_contig", [False, True], ids=["stride-HV", "T-contiguous"])
def test_offsets_beyond_32_bits(
    i_b: int, bos: int, i_h: int, T: int, channels: int, t_contig: bool, device: torch.device
) -> None:
    found = torch.zeros(2, dtype=torch.int64, device=device)
    probe.offset_probe[(1,)](found, i_b, bos, i_h, T, HV=HV, T_CONTIG=t_contig, C=channels)
    wanted = (i_b * HV + i_h) * T + (bos - i_b * T) if t_contig else bos * HV + i_h
    assert wanted > 2**31
    assert found.tolist() == [wanted * channels, channels if t_contig else HV * channels]


@pytest.mark.parametrize("block", [8, 16], ids=["whole tiles", "a tile wider than the channels"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("arrives", "leaves"), [*itertools.product(READ, repeat=2)])
def test_a_gate_with_channels_is_read_and_written_in_either_layout(
    arrives: Layout, leaves: Layout, packed: bool, block: int, device: torch.device
) -> None:
    B, T, heads, C, BT = (1 if packed else 2), 37, 3, 24, 16
    x = torch.randn(B, T, heads, C, device=device)
    out = layouts.empty((B, T, heads, C), leaves, torch.float32, x.device).fill_(math.nan)
    wanted = x.clone()
    NT, starts, chunks = -(-T // BT), None, None
    if packed:
        starts = torch.tensor([2, 2, 19, 30], dtype=torch.int32, device=device)
        chunks = torch.tensor([[1, 0], [1, 1], [2, 0]], dtype=torch.int32, device=device)
        wanted[:, :2] = wanted[:, 30:] = 0.0
        NT = len(chunks)
    tasks = B * NT * heads
    probe.channel_probe[(2,)](
        relayout(x, arrives), out, starts, chunks, T, NT, 3, tasks,
        HV=heads, C=C, BT=BT, BC=block,
        X_T_CONTIG=arrives is Layout.T_CONTIG, OUT_T_CONTIG=leaves is Layout.T_CONTIG, IS_VARLEN=packed,
    )  # fmt: skip
    assert layouts.arrival(out) is leaves
    assert torch.equal(out, wanted)


def without_memory(spec: OpSpec, key: Key) -> Call:
    """Arguments of a key, of which there are shapes and strides alone."""
    form = key.form
    BT = form.integer("BT", 64)
    sizes = {name: getattr(key, name) for name in operands.SIZES}
    sizes |= {"BT": BT, "NT": -(-key.T // BT), "N": key.B}
    tensors: list[torch.Tensor | None] = []
    for operand in spec.operands:
        if not given(operand, form):
            tensors.append(None)
            continue
        dims = operand.shape_symbols(spec.v_first(form))
        dtype = getattr(torch, form.dtype(operand.name) or key.dtype)
        tensor = torch.empty([sizes[symbol] for symbol in dims], dtype=dtype, device="meta")
        arrives = form.arrival(operand.name) if operand.time_axis else None
        tensors.append(relayout(tensor, Layout.T_CONTIG) if arrives is Layout.T_CONTIG else tensor)
    return Call(tensors=tuple(tensors), options=(), scalars=(None,) * len(spec.scalars))


def launches(spec: OpSpec, key: Key, candidate: Candidate) -> list[LaunchRecord]:
    """What a candidate launches."""
    call = without_memory(spec, key)
    problem = Problem(key=key, chip=driver.chip(torch.device("cpu")))
    prepared = Prepared(spec, problem, candidate, call)
    with launcher.recording() as records:
        prepared(call.tensors, call.scalars, None, None)
    return records


@pytest.mark.skipif(torch.cuda.is_available(), reason="watches the interpreter's loads and stores")
@pytest.mark.parametrize(("spec", "sizes"), FAR_CASES)
def test_every_kernel_reaches_the_ends_of_tensors_of_4_billion_elements(
    spec: OpSpec, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first and the last task touch the first and the last element of all that they read and write."""
    key = spec.key_for(
        sizes, dtype="float32", form=max(spec.standard_forms.values(), key=lambda form: len(form.text)), varlen=False
    )
    far = 0
    seen: set[str] = set()
    for candidate in spec.candidates(key):
        for record in launches(spec, key, candidate):
            # A kernel of the chain differs from that of another candidate in its constants alone.
            same = f"{record.kernel.__name__} {sorted(record.constants.items())}"
            if same in seen:
                continue
            seen.add(same)
            for name, (first, last, size) in accesses.reached(record, monkeypatch).items():
                where = f"{candidate.id}: {record.kernel.__name__}: {name}"
                assert first >= 0 and last <= size, f"{where}: bytes {first} to {last} of {size}"
                if size > 2**33:  # 2 ** 31 elements of fp32 and more
                    far += 1
                    assert (first, last) == (0, size), f"{where}: bytes {first} to {last} of {size}"
    assert far


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU computes for itself")
def test_this_interpreter_computes_bfloat16_right_once_mended() -> None:
    """Fails on a Triton whose interpreter `mend_interpreter` no longer helps; bf16 is refused there."""
    assert interpreter.interpreting()
    assert interpreter.interpreter_is_right()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32], ids=str)
def test_casts_to_bfloat16_round_to_the_nearest(dtype: torch.dtype, device: torch.device) -> None:
    """Ties to even, infinities and NaN kept; what lies between the least number and zero too."""
    interpreter.require_running("probe", "bfloat16", device)
    values = [
        1.0,
        1.00390625,
        1.01171875,
        -1.00390625,
        257.0,
        259.0,
        3.0e38,
        -3.39e38,
        3.4e38,
        1e-40,
        -1e-45,
        0.0,
        -0.0,
    ]
    if dtype.is_floating_point:
        x = torch.tensor([*values, math.inf, -math.inf, math.nan], dtype=torch.float64).to(dtype)
    else:
        x = torch.tensor(
            [0, 1, -1, 257, 259, -257, 65537, 65539, -(2**30), 2**30 + 2**23, 2, 3, 4, 5, 6, 7], dtype=dtype
        )
    stored = torch.zeros(16, dtype=torch.bfloat16, device=device)
    probe.cast_probe[(1,)](x.to(device), stored, N=16)
    wanted = x.to(torch.bfloat16)
    assert torch.equal(stored.cpu().isnan(), wanted.isnan())
    assert torch.equal(stored.cpu().nan_to_num(), wanted.nan_to_num())
