"""`chunk_bwd_dv_local` as callers call it: odd strides, packed batches, and what is refused."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cases import experiment_for, faults
from dv_local import BT, SPEC, arguments, assert_right, dv_local

from layout_tuner import ops, reference
from layout_tuner.errors import UnsupportedProblemError
from layout_tuner.spec import layouts
from layout_tuner.spec.layouts import Layout, arrival, relayout


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Layout]:
    """The layouts of the copies made of time-axis operands."""
    made: list[Layout] = []

    def counted(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
        made.append(layout)
        return relayout(tensor, layout)

    monkeypatch.setattr(layouts, "relayout", counted)
    return made


def packed(device: torch.device, *starts: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(starts, dtype=dtype, device=device)


# -- strides -----------------------------------------------------------------------------------------------------


def test_stride_zero_gradient_of_a_sum(device: torch.device) -> None:
    given = arguments(device)
    given["do"] = torch.ones((), device=device).expand_as(given["do"])
    assert given["do"].stride() == (0, 0, 0, 0)
    assert torch.equal(dv_local(given), dv_local(given | {"do": given["do"].contiguous()}))
    assert_right(dv_local(given), given)


def test_slices_of_one_projection(device: torch.device) -> None:
    given = arguments(device, B=2, H=1)
    projection = torch.cat([given["q"], given["k"], given["do"]], dim=2)
    sliced = given | {"q": projection[:, :, :1], "k": projection[:, :, 1:2], "do": projection[:, :, 2:]}
    assert not any(sliced[name].is_contiguous() for name in ("q", "k", "do"))
    assert torch.equal(dv_local(sliced), dv_local(given))
    assert_right(dv_local(sliced), given)


def test_transposed_heads(device: torch.device) -> None:
    given = arguments(device, H=2)
    heads_first = given | {name: given[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "do")}
    assert torch.equal(dv_local(heads_first), dv_local(given))


@pytest.mark.parametrize(
    "odd",
    [
        lambda g: torch.stack([g, g + 1], dim=-1)[..., 0],
        lambda g: torch.cat([g, g + 1], dim=1)[:, : g.shape[1]],
        lambda g: g.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["every second", "slice of rows", "time first"],
)
def test_a_gate_in_neither_layout_is_copied_once(device: torch.device, copies: list[Layout], odd) -> None:
    given = arguments(device, B=2)
    other = given | {"g": odd(given["g"])}
    assert arrival(other["g"]) is Layout.OTHER
    dv = dv_local(other)
    assert len(copies) == 1
    assert torch.equal(dv, dv_local(given))


def test_a_stride_zero_gate(device: torch.device) -> None:
    given = arguments(device)
    given["g"] = torch.zeros(1, 1, 1, device=device).expand(1, 20, 2)
    assert_right(dv_local(given), given)


def test_a_t_contiguous_gate_is_used_as_it_is(device: torch.device, copies: list[Layout]) -> None:
    given = arguments(device, B=2)
    there = given | {"g": relayout(given["g"], Layout.T_CONTIG)}
    dv = dv_local(there)
    assert copies == []
    assert torch.equal(dv, dv_local(given))
    assert dv.is_contiguous()


def test_one_head_or_one_token_copies_nothing(device: torch.device, copies: list[Layout]) -> None:
    for sizes in ({"B": 2, "HV": 1}, {"B": 2, "T": 1}):
        given = arguments(device, **sizes)
        for g in (given["g"], relayout(given["g"], Layout.T_CONTIG)):
            assert_right(dv_local(given | {"g": g}), given)
    assert copies == []


# -- gates, A and scale ------------------------------------------------------------------------------------------


def test_scale_is_k_to_the_minus_one_half(device: torch.device) -> None:
    given = arguments(device)
    assert torch.equal(dv_local(given), dv_local(given, scale=0.25))
    assert_right(dv_local(given, scale=-2.0), given, scale=-2.0)


def test_a_gate_by_the_token(device: torch.device) -> None:
    given = arguments(device) | {"g": None}
    gamma = torch.tensor([-0.1, -0.3], device=device)
    dv = dv_local(given, g_gamma=gamma)
    assert_right(dv, given, g_gamma=gamma)
    positions = torch.arange(20, device=device) % BT + 1
    same = given | {"g": (positions[:, None] * gamma)[None].contiguous()}
    torch.testing.assert_close(dv, dv_local(same), rtol=1e-5, atol=1e-5)


def test_a_matrix_in_place_of_product_and_gate(device: torch.device) -> None:
    given = arguments(device, T=37)
    g, q, k = given["g"], given["q"], given["k"]
    A = torch.zeros(1, 37, 2, BT, device=device)
    for t in range(37):
        for s in range(t // BT * BT, min(37, t // BT * BT + BT)):
            A[0, t, :, s % BT] = (q[0, t, 0] @ k[0, s, 0]) * 16**-0.5 * torch.exp2(g[0, t] - g[0, s])
    dv = dv_local({"q": q, "k": k, "do": given["do"]}, A=A)
    torch.testing.assert_close(dv, dv_local(given), rtol=1e-4, atol=1e-4)
    assert torch.equal(dv_local(given, A=A, g_gamma=None), dv)


# -- packed batches ----------------------------------------------------------------------------------------------


def test_starts_of_either_width_give_the_same_numbers(device: torch.device) -> None:
    given = arguments(device, T=50)
    starts = (0, 17, 17, 50)
    results = [dv_local(given, cu_seqlens=packed(device, *starts, dtype=dtype)) for dtype in (torch.int32, torch.int64)]
    assert torch.equal(*results)
    assert_right(results[0], given, cu_seqlens=packed(device, *starts))


def test_a_packed_sequence_is_a_batch_of_its_own(device: torch.device) -> None:
    given = arguments(device, T=50)
    dv = dv_local(given, cu_seqlens=packed(device, 0, 17, 50))
    for first, last in ((0, 17), (17, 50)):
        alone = {name: tensor[:, first:last].contiguous() for name, tensor in given.items()}
        assert torch.equal(dv[:, first:last], dv_local(alone))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunks_given_or_not_are_the_same(device: torch.device, dtype: torch.dtype) -> None:
    given = arguments(device, T=50)
    cu_seqlens = packed(device, 0, 17, 17, 50)
    chunk_indices = ops.prepare_chunk_indices(cu_seqlens, BT).to(dtype)
    assert chunk_indices.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2]]
    dv = dv_local(given, cu_seqlens=cu_seqlens, chunk_indices=chunk_indices)
    assert torch.equal(dv, dv_local(given, cu_seqlens=cu_seqlens))


@pytest.mark.parametrize("starts", [(5, 20), (0, 15), (3, 3, 9, 9), (20, 20)], ids=str)
@pytest.mark.parametrize("layout", [Layout.STRIDE_HV, Layout.T_CONTIG])
def test_tokens_outside_every_sequence_are_zero(
    device: torch.device, starts: tuple[int, ...], layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(device)
    given["g"] = relayout(given["g"], layout)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, float("nan")))
    dv = dv_local(given, cu_seqlens=packed(device, *starts))
    assert bool((dv[:, : starts[0]] == 0).all())
    assert bool((dv[:, starts[-1] :] == 0).all())
    assert_right(dv, given, cu_seqlens=packed(device, *starts))


# -- what is refused ---------------------------------------------------------------------------------------------


def test_two_gates_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"g, g_gamma: wanted at most one of them, got both"):
        dv_local(arguments(device), g_gamma=torch.zeros(2, device=device))


def test_every_mistaken_shape_is_named(device: torch.device) -> None:
    given = arguments(device) | {"k": torch.zeros(1, 20, 1, 8, device=device)}
    given |= {"do": torch.zeros(1, 19, 2, 16, device=device), "g": torch.zeros(1, 20, 2, 1, device=device)}
    with pytest.raises(ValueError, match=r"^chunk_bwd_dv_local: ") as caught:
        dv_local(given)
    for part in ("k: wanted K=16 as in q", "do: wanted T=20 as in q", "g: wanted [B, T, HV], got [1, 20, 2, 1]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("sizes", [{"K": 257}, {"V": 257}])
def test_too_wide_is_unsupported(device: torch.device, sizes: dict[str, int]) -> None:
    with pytest.raises(UnsupportedProblemError, match=r"=257, but the kernels take at most 256"):
        dv_local(arguments(device, **sizes))


def test_another_chunk_size_is_unsupported(device: torch.device) -> None:
    with pytest.raises(UnsupportedProblemError, match=r"chunk_size=48, but the kernels take 16, 32, 64"):
        ops.chunk_bwd_dv_local(**arguments(device), chunk_size=48)


def test_mixed_devices_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"do: wanted device .* got meta"):
        dv_local(arguments(device) | {"do": torch.zeros(1, 20, 2, 16, device="meta")})


def test_a_cpu_without_the_interpreter_names_the_variable() -> None:
    code = """
import torch
from layout_tuner import errors, ops
q = torch.zeros(1, 4, 1, 16)
try:
    ops.chunk_bwd_dv_local(q, q, q)
except errors.UnsupportedProblemError as error:
    print(error)
"""
    bare = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=bare)
    assert "set TRITON_INTERPRET=1 before Triton is imported" in done.stdout, done.stderr


# -- the size users have -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "varlen"), [("full", False), ("sub", False), ("full", True)], ids=["full", "sub", "full-packed"]
)
def test_two_thousand_tokens(device: torch.device, variant: str, varlen: bool) -> None:
    sizes = {"B": 1 if varlen else 2, "T": 2048, "H": 4, "HV": 8, "K": 64, "V": 64}
    key = SPEC.key_for(sizes, dtype="bfloat16", form=SPEC.standard_forms["training"], varlen=varlen)
    one_variant = replace(SPEC, variants=(variant,))
    assert not faults(experiment_for(one_variant, key, device, (0, 1, 700, 2048)))


def test_the_oracle_is_not_the_kernel(device: torch.device) -> None:
    """The oracle follows the formula token by token, so agreement means something."""
    given = arguments(device, T=5, HV=1)
    q, k, do, g = (given[name][0] for name in ("q", "k", "do", "g"))
    by_hand = torch.zeros_like(do)
    for t in range(5):
        for s in range(t, 5):
            by_hand[t, 0] += 0.25 * (k[t, 0] @ q[s, 0]) * torch.exp2(g[s, 0] - g[t, 0]) * do[s, 0]
    torch.testing.assert_close(reference.chunk_bwd_dv_local(**given, chunk_size=BT)[0], by_hand)
