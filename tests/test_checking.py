"""What is compared of a candidate's results: with the oracle, within a bound of memory, and bit by bit."""

from dataclasses import replace

import pytest
import torch
from dv_local import CANDIDATES, SPEC, key
from timers import set_times

import layout_tuner.ops  # noqa: F401  registers every op
from layout_tuner.config import Measure, Tuning
from layout_tuner.launch.prepared import Prepared
from layout_tuner.spec import declaration, registry
from layout_tuner.spec.keys import Form, Key
from layout_tuner.tuning import inputs, memory, numerics
from layout_tuner.tuning.checking import Checker, Part, part_of, spread
from layout_tuner.tuning.experiment import Experiment
from layout_tuner.tuning.inputs import synthesize
from layout_tuner.tuning.tuner import Outcome, tune

SIZES = {"B": 3, "T": 21, "H": 3, "HV": 6, "K": 16, "V": 24}
WIDE = key(B=3, H=3, HV=6)
OPS = registry.names()


def small_forms(spec: declaration.OpSpec) -> list[Form]:
    """Its forms with chunks of 16, so that there are several."""
    forms = (form.changed(BT="16") if "BT" in form else form for form in spec.every_form)
    return list(dict.fromkeys(forms))[:4]


def key_of(spec: declaration.OpSpec, form: Form, varlen: bool) -> Key:
    sizes = SIZES | {"B": 1} if varlen else SIZES
    return spec.key_for(sizes, dtype="float32", form=form, varlen=varlen)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("op", OPS)
def test_a_part_of_the_arguments_gives_that_part_of_the_results(op: str, varlen: bool, device: torch.device) -> None:
    spec = registry.lookup(op)
    for form in small_forms(spec):
        at = key_of(spec, form, varlen)
        call = synthesize(spec, at, device)
        whole, part = Checker(spec, at, call, 1 << 40), Checker(spec, at, call, 1)
        assert whole.part.whole
        assert not part.part.whole
        v_first = form.flag("state_v_first")
        for output, all_of_it, some in zip(spec.outputs, whole.wanted, part.wanted, strict=True):
            assert (all_of_it is None) == (some is None)
            if all_of_it is None or some is None:
                continue
            symbols = spec.shape_of(output)
            assert output in memory.returned(spec, at)
            sizes = memory.sizes_of(at) | {"N": at.B}
            if "NT" in symbols:
                sizes["NT"] = all_of_it.shape[1]
            if varlen:
                sizes["N"] = len(call.cu_seqlens) - 1
            shape = [1 if symbol == "B" and varlen else sizes[symbol] for symbol in symbols]
            assert sorted(all_of_it.shape) == sorted(shape), (output.name, v_first)
            torch.testing.assert_close(part.part.of(all_of_it, symbols, varlen), some, msg=f"{form} {output.name}")


@pytest.mark.parametrize(
    ("n", "some", "chosen"), [(5, 5, None), (5, 9, None), (5, 1, (4,)), (5, 2, (0, 4)), (9, 3, (0, 4, 8))]
)
def test_first_and_last_are_among_what_is_seen(n: int, some: int, chosen: tuple[int, ...] | None) -> None:
    assert spread(n, some) == chosen


def test_the_part_grows_with_the_limit_up_to_the_whole() -> None:
    unit = memory.oracle_bytes(SPEC, WIDE) // 9
    assert part_of(SPEC, WIDE, 1) == Part(rows=(2,), groups=(2,), per_group=2)
    assert part_of(SPEC, WIDE, 4 * unit) == Part(rows=(0, 2), groups=(0, 2), per_group=2)
    assert part_of(SPEC, WIDE, 9 * unit + 9).whole
    for units in range(1, 10):
        part = part_of(SPEC, WIDE, units * unit)
        assert len(part.rows or range(3)) * len(part.groups or range(3)) <= units


def test_what_is_summed_over_the_batch_is_seen_of_every_row() -> None:
    spec = registry.lookup("gdn_gate_bwd")
    part = part_of(spec, key_of(spec, spec.every_form[0], False), 1)
    assert part.rows is None
    assert part.groups == (5,)


# -- a wrong candidate, wherever it is wrong -----------------------------------------------------------------------


def found(
    device: torch.device, at: Key, limit: int, monkeypatch: pytest.MonkeyPatch, spoil, **settings: object
) -> Outcome:
    """What tuning finds where the results of `sub/g=T_CONTIG` are changed after every run."""
    original = Prepared.__call__

    def changed(self: Prepared, *arguments: object):
        results = original(self, *arguments)
        if self.candidate.id == "sub/g=T_CONTIG":
            spoil(results[0])
        return results

    monkeypatch.setattr(Prepared, "__call__", changed)
    experiment = Experiment(SPEC, at, device, oracle_limit=limit)
    times = {name: 1.0 if name == "sub/g=T_CONTIG" else 10.0 for name in CANDIDATES}
    measure = Measure(warmup_rounds=1, min_rounds=10, max_rounds=10)
    return tune(experiment.trials(), experiment.default.id, set_times(times), measure, Tuning(**settings))


def test_a_right_candidate_is_right_in_part_and_as_a_whole(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (1, 1 << 40):
        outcome = found(device, WIDE, limit, monkeypatch, lambda dv: None)
        assert {m.state for m in outcome.measurements} == {"ok"}
        assert outcome.winner == "sub/g=T_CONTIG"


@pytest.mark.parametrize("limit", [1, 1 << 40], ids=["in part", "whole"])
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda dv: dv[2, 3, 5].add_(1.0), "dv: error"),
        (lambda dv: dv[1, 19, 2].add_(3.0), "dv"),
        (lambda dv: dv[1, 0, 0, 0].fill_(float("nan")), "dv: error inf"),
        (lambda dv: dv[0, 7, 1, 3].mul_(1 + 2**-20), "dv: not the bits of sub/g=STRIDE_HV"),
    ],
    ids=["where the oracle looks", "where it does not look", "one NaN", "one bit"],
)
def test_a_wrong_candidate_is_found_wherever_it_is_wrong(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, limit: int, spoil, said: str
) -> None:
    outcome = found(device, WIDE, limit, monkeypatch, spoil)
    wrong = outcome.measurement("sub/g=T_CONTIG")
    assert (wrong.state, wrong.failure) == ("wrong", "wrong")
    assert said in wrong.reason
    assert outcome.winner == CANDIDATES[0]


def test_beyond_the_oracle_it_says_so(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = found(device, WIDE, 1, monkeypatch, lambda dv: dv[1, 19, 2].add_(3.0))
    assert "dv beyond the oracle: error" in outcome.measurement("sub/g=T_CONTIG").reason


@pytest.mark.parametrize("limit", [1, 1 << 40], ids=["in part", "whole"])
def test_whether_bits_are_the_defaults_is_known_of_every_candidate(device: torch.device, limit: int) -> None:
    first, _, second, _ = SPEC.candidates(WIDE)
    experiment = Experiment(SPEC, WIDE, device, oracle_limit=limit)
    results = experiment.run_poisoned(experiment.prepare(first).end_to_end.func)
    for factor, exact in ((1.0, True), (1 + 2**-20, False)):
        checker = Checker(SPEC, WIDE, experiment.call, limit)
        assert checker.compare(first, results, default=True).right
        check = checker.compare(second, (results[0] * factor,), default=False)
        assert (check.right, check.exact) == (True, exact)


# -- numbers -----------------------------------------------------------------------------------------------------


def test_comparing_in_pieces_is_comparing(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(numerics, "PIECE", 7)
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(3, 5, 4, generator=generator).to(device)
    got = right + 0.01 * torch.randn(3, 5, 4, generator=generator).to(device)
    assert numerics.disagreement(got, right) == pytest.approx(numerics.error(got, right), rel=1e-5)
    assert numerics.disagreement(got, right, 100.0) == pytest.approx(numerics.error(got, right, 100.0), rel=1e-5)
    assert numerics.disagreement(torch.zeros(3), torch.zeros(3)) == 0.0
    assert numerics.disagreement(torch.ones(3), torch.zeros(3)) == float("inf")
    assert numerics.disagreement(right[0], right) == float("inf")
    bad = right.clone()
    bad[2, 4, 3] = float("nan")
    assert numerics.finite(right)
    assert not numerics.finite(bad)
    assert numerics.disagreement(bad, right) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_identical_is_bit_by_bit(dtype: torch.dtype) -> None:
    one = torch.tensor([0.0, 1.0, -2.0], dtype=dtype)
    assert numerics.identical(one, one.clone())
    assert not numerics.identical(one, torch.tensor([-0.0, 1.0, -2.0], dtype=dtype))
    assert not numerics.identical(one, one.double())
    assert not numerics.identical(one, one[:2])


def test_arguments_are_those_of_the_inputs(device: torch.device) -> None:
    """The estimate counts what `synthesize` makes."""
    for op in OPS:
        spec = registry.lookup(op)
        for form in spec.every_form:
            at = replace(key_of(spec, form, False), T=64)
            call = inputs.synthesize(spec, at, device)
            assert memory.counts(spec, at)[0] == sum(t.numel() for t in call.tensors if t is not None)


@pytest.mark.gpu
def test_the_oracle_multiplies_exactly_where_tf32_is_allowed(device: torch.device) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        experiment = Experiment(SPEC, key(T=200, K=128, V=128, HV=2), device)
        check = experiment.prepare(experiment.default).check()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert check.right, check
