"""No kernel touches memory beside its tensors, whatever the lists of a packed batch hold by the time it runs."""

from collections.abc import Callable
from dataclasses import replace

import accesses
import pytest
import torch
from cases import key_for
from hardware import INTERPRETED

from layout_tuner import ops
from layout_tuner.ascend.candidates import named_arguments
from layout_tuner.device import driver
from layout_tuner.launch import launcher
from layout_tuner.launch.launcher import LaunchRecord
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import OpSpec, Problem
from layout_tuner.tuning import inputs

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="watches the interpreter's loads and stores")

assert ops, "importing the ops registers them"
LISTS = ("cu_seqlens", "chunk_indices", "chunk_offsets")
CHAIN = "chunk_gated_delta_rule"
STARTS = (2, 2, 19, 20, 36)
SIZES = {"T": 40, "H": 1, "HV": 2, "K": 16, "V": 16}
OPS = [name for name in registry.names() if "T" in registry.lookup(name).sizes]

Wild = Callable[[torch.Tensor], torch.Tensor]


def extreme(values: torch.Tensor) -> torch.Tensor:
    """The least and the greatest number there are, by turns."""
    limits = torch.iinfo(values.dtype)
    flat = torch.tensor([limits.min, limits.max], dtype=values.dtype).repeat(values.numel())
    return flat[: values.numel()].view(values.shape)


def drawn(values: torch.Tensor) -> torch.Tensor:
    """Numbers around the right ones, a few too small and a few too large."""
    generator = torch.Generator().manual_seed(values.numel())
    return torch.randint(-8, 60, values.shape, generator=generator, dtype=values.dtype)


WILD: dict[str, Wild] = {
    "negative": lambda values: torch.full_like(values, -7),
    "huge": lambda values: torch.full_like(values, 2**30),
    "extreme": extreme,
    "wide": lambda values: torch.full_like(values, 2**20).index_fill_(0, torch.tensor([0]), -7),
    "drawn": drawn,
}


def recorded(spec: OpSpec, form: str) -> list[LaunchRecord]:
    """The launches of every candidate's variant for a packed batch."""
    key = key_for(spec, form, varlen=True, **SIZES)
    problem = Problem(key=key, chip=driver.chip(torch.device("cpu")))
    call = inputs.synthesize(spec, key, "cpu", cu_seqlens=torch.tensor(STARTS))
    variants = {candidate.variant: candidate for candidate in spec.candidates(key)}
    with launcher.recording() as records:
        for candidate in variants.values():
            prepared = Prepared(spec, problem, candidate, call)
            prepared(call.tensors, call.scalars, call.cu_seqlens, call.chunk_indices)
    return [record for record in records if any(named_arguments(record).get(name) is not None for name in LISTS)]


def with_lists(record: LaunchRecord, wild: Wild, names: tuple[str, ...] = LISTS) -> LaunchRecord:
    """A launch whose lists hold something else, as they may in a graph's replay."""
    changed = [
        wild(value) if name in names and value is not None else value for name, value in named_arguments(record).items()
    ]
    return replace(record, arguments=tuple(changed))


def form_of(spec: OpSpec) -> str:
    """The standard form with most in it: the most kernels, for the chain."""
    return max(spec.forms.values(), key=len)


@pytest.mark.parametrize("wild", WILD)
@pytest.mark.parametrize("op", [op for op in OPS if op != CHAIN])
def test_no_kernel_leaves_its_tensors_whatever_the_lists_hold(op: str, wild: str) -> None:
    spec = registry.lookup(op)
    records = recorded(spec, form_of(spec))
    assert bool(records) == (op not in ("gdn_gate_bwd", "kda_gate_bwd", "kda_gate_fwd"))  # they know no sequences
    found = [text for record in records for text in accesses.outside(with_lists(record, WILD[wild]))]
    assert not found, "\n".join(sorted(set(found)))


@pytest.mark.parametrize("changed", [LISTS[:1], LISTS[1:]], ids=["starts", "chunks"])
@pytest.mark.parametrize("wild", ["huge", "drawn"])
@pytest.mark.parametrize("op", ["chunk_gated_delta_rule_fwd_h", "chunk_bwd_dqkwg", "chunk_local_cumsum"])
def test_nor_where_one_list_of_two_has_changed(op: str, wild: str, changed: tuple[str, ...]) -> None:
    spec = registry.lookup(op)
    found = [
        text
        for record in recorded(spec, form_of(spec))
        for text in accesses.outside(with_lists(record, WILD[wild], changed))
    ]
    assert not found, "\n".join(sorted(set(found)))


# What is computed from the wrong rows is worth nothing, and may overflow.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("wild", ["wide", "drawn"])
def test_nor_those_kernels_that_the_chain_alone_has(wild: str) -> None:
    spec = registry.lookup(CHAIN)
    known = {
        record.kernel.__name__
        for op in OPS
        if op != CHAIN
        for record in recorded(registry.lookup(op), form_of(registry.lookup(op)))
    }
    records = [record for record in recorded(spec, spec.forms["layer"]) if record.kernel.__name__ not in known]
    assert {record.kernel.__name__ for record in records} >= {"l2norm_fwd", "l2norm_bwd"}
    assert not [text for record in records for text in accesses.outside(with_lists(record, WILD[wild]))]


def test_right_lists_leave_nothing_out() -> None:
    spec = registry.lookup("chunk_bwd_dv_local")
    assert not [text for record in recorded(spec, form_of(spec)) for text in accesses.outside(record)]


def test_a_touch_beside_a_tensor_is_seen_and_not_done() -> None:
    """A batch that says more tokens than its tensors have."""
    spec = registry.lookup("chunk_local_cumsum")
    (record,) = recorded(spec, form_of(spec))
    named = named_arguments(record) | {"T": SIZES["T"] + 30}
    beyond = with_lists(replace(record, arguments=tuple(named.values())), lambda values: values + 30, LISTS[:1])
    found = accesses.outside(beyond)
    assert any("load" in text for text in found) and any("store" in text for text in found)
