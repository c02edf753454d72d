"""Declarations of ops: what a call may look like, which candidates a key has, which of them is the default."""

from dataclasses import replace
from pathlib import Path

import dv_local
import pytest
import torch
from dv_local import CANDIDATES, SPEC

from layout_tuner import kernels as kernel_modules
from layout_tuner.device.driver import Chip
from layout_tuner.errors import ConfigError, UnsupportedProblemError
from layout_tuner.spec import declaration, layouts, operands, registry, revision
from layout_tuner.spec.layouts import relayout
from layout_tuner.spec.operands import Call
from layout_tuner.tuning.inputs import synthesize

CPU = torch.device("cpu")
CHIPS = {kind: Chip(kind=kind, name=kind, cube_programs=4, vector_programs=8) for kind in ("npu", "cuda", "cpu")}


def call(form: str = dv_local.FORM, **named: object) -> Call:
    """A call of the op on the CPU, with some of its arguments replaced."""
    made = synthesize(SPEC, dv_local.key(form), CPU)
    tensors = dict(zip((operand.name for operand in SPEC.operands), made.tensors, strict=True))
    other = {name: named.pop(name) for name in ("cu_seqlens", "chunk_indices") if name in named}
    return replace(made, tensors=tuple((tensors | named).values()), **other)


def complaint(**named: object) -> str:
    with pytest.raises(ValueError, match=r"^chunk_bwd_dv_local: ") as caught:
        SPEC.key(call(**named))
    return str(caught.value)


@pytest.mark.parametrize("name", registry.names())
def test_synthetic_calls_have_the_key_they_were_made_from(name: str) -> None:
    spec = registry.lookup(name)
    for form in spec.every_form:
        for varlen in (False, True):
            sizes = {"B": 1 if varlen else 2, "T": 70, "H": 2, "HV": 4, "K": 8, "V": 12}
            key = spec.key_for(sizes, dtype="float16", form=form, varlen=varlen and "T" in spec.sizes)
            assert spec.key(synthesize(spec, key, CPU)) == key


def test_every_mistake_is_named_at_once() -> None:
    message = complaint(
        k=torch.zeros(1, 21, 1, 16),
        do=torch.zeros(2, 20, 2, 16),
        g=torch.zeros(1, 20, 3, dtype=torch.float64),
        cu_seqlens=torch.zeros(3),
    )
    for part in (
        "k: wanted T=20",
        "do: wanted B=1",
        "g: wanted HV=2",
        "g: wanted one of float32",
        "cu_seqlens: wanted",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"q": None}, "q: wanted [B, T, H, K], got None"),
        ({"do": None}, r"do: wanted [B, T, HV, V], got None"),
        ({"k": torch.zeros(1, 20, 16)}, "k: wanted [B, T, H, K], got [1, 20, 16]"),
        ({"k": torch.zeros(1, 20, 1, 16, dtype=torch.float16)}, "k: wanted float32 as q, got float16"),
        ({"do": torch.zeros(1, 20, 2, 16, device="meta")}, "do: wanted device cpu as q, got meta"),
        ({"g": torch.zeros(1, 20, 2, dtype=torch.int32)}, "g: wanted one of float32, bfloat16, float16, got int32"),
        ({"cu_seqlens": torch.tensor([0, 20], dtype=torch.int16)}, "cu_seqlens: wanted int32 or int64, got int16"),
        ({"cu_seqlens": torch.tensor([0])}, "cu_seqlens: wanted [N + 1], got [1]"),
        ({"cu_seqlens": torch.tensor([0, 1, 2, 3])[::2]}, "cu_seqlens: wanted a contiguous tensor"),
        ({"cu_seqlens": torch.tensor([0, 20], device="meta")}, "cu_seqlens: wanted device cpu, got meta"),
        ({"chunk_indices": torch.zeros(3, 3, dtype=torch.int32)}, "chunk_indices: wanted [NT, 2], got [3, 3]"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_of_a_call(named: dict[str, object], said: str) -> None:
    assert said in complaint(**named)


def test_heads_have_to_divide() -> None:
    tensors = {name: torch.zeros(1, 20, 2, 16) for name in ("q", "k")}
    message = complaint(**tensors, do=torch.zeros(1, 20, 3, 16), g=torch.zeros(1, 20, 3))
    assert "HV: wanted a multiple of H=2, got 3" in message


def test_empty_sizes_are_refused() -> None:
    empty = {"q": torch.zeros(1, 0, 1, 16), "k": torch.zeros(1, 0, 1, 16), "do": torch.zeros(1, 0, 2, 16)}
    assert "T: wanted at least 1, got 0" in complaint(**empty, g=torch.zeros(1, 0, 2))


def test_packed_batch_has_one_row() -> None:
    two = {name: torch.zeros(2, 20, 1, 16) for name in ("q", "k")}
    message = complaint(**two, do=torch.zeros(2, 20, 2, 16), g=torch.zeros(2, 20, 2), cu_seqlens=torch.tensor([0, 20]))
    assert "cu_seqlens: wanted B=1 for a packed batch, got B=2" in message


def test_operand_that_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"chunk_bwd_dv_local: g: wanted a tensor, got list"):
        SPEC.key(call(g=[1.0]))


def test_every_reason_for_an_unsupported_problem() -> None:
    with pytest.raises(UnsupportedProblemError) as caught:
        SPEC.require(dv_local.key("BT=48", K=257, V=300))
    assert len(caught.value.reasons) == 3
    for part in ("K=257", "V=300", "chunk_size=48"):
        assert part in str(caught.value)


def test_the_key_holds_what_changes_the_work() -> None:
    base = SPEC.key(call())
    assert base == dv_local.key()
    g = torch.zeros(1, 20, 2)
    assert SPEC.key(call(g=relayout(g, layouts.Layout.T_CONTIG))).form.text == "BT=16,g=float32@T_CONTIG"
    assert SPEC.key(call(g=torch.zeros(1, 20, 4)[..., ::2])).form.text == "BT=16,g=float32@OTHER"
    assert SPEC.key(call(g=g.half())).form.text == "BT=16,g=float16@STRIDE_HV"
    assert SPEC.key(call(g=None)).form.text == "BT=16"
    assert SPEC.key(call(g=None, g_gamma=torch.zeros(2))).form.text == "BT=16,g_gamma=1"
    assert SPEC.key(call(g=None, g_gamma=torch.zeros(2).half())).form.text == "BT=16,g_gamma=float16"
    assert SPEC.key(call(cu_seqlens=torch.tensor([0, 20]))) == replace(base, varlen=True)


def ids(form: str, **sizes: int) -> tuple[str, ...]:
    return tuple(candidate.id for candidate in SPEC.candidates(dv_local.key(form, **sizes)))


def test_candidates_are_variants_times_plans() -> None:
    assert ids("BT=16,g=float32@STRIDE_HV") == CANDIDATES
    assert ids("BT=16,g=float32@OTHER") == CANDIDATES


def test_what_arrives_t_contig_has_no_other_plan() -> None:
    assert ids("BT=16,g=float32@T_CONTIG") == ("full/g=T_CONTIG", "sub/g=T_CONTIG")
    for chip in CHIPS.values():
        assert SPEC.default(dv_local.key("BT=16,g=float32@T_CONTIG"), chip).id == "full/g=T_CONTIG"


def test_without_a_gate_no_layout_is_a_choice() -> None:
    assert ids("BT=16") == ("full", "sub")


@pytest.mark.parametrize("sizes", [{"HV": 1}, {"T": 1}])
def test_one_head_or_one_token_is_nothing_to_choose(sizes: dict[str, int]) -> None:
    assert ids(dv_local.FORM, **sizes) == ("full/g=STRIDE_HV", "sub/g=STRIDE_HV")
    assert SPEC.nothing_to_choose(dv_local.key(**sizes))
    assert not SPEC.nothing_to_choose(dv_local.key())


def test_groups_share_a_layout() -> None:
    paired = replace(
        SPEC,
        operands=(*SPEC.operands, operands.Operand(name="beta", dims="B T HV", time_axis=True)),
        outputs=(*SPEC.outputs, operands.Output(name="dg", time_axis=True, needs="g")),
        layout_groups=(("g", "beta"), ("dg",)),
    )
    form = "BT=16,beta=float32@STRIDE_HV,g=float32@STRIDE_HV"
    assert [str(plan) for plan in paired.plans(dv_local.key(form))] == [
        "g=STRIDE_HV,beta=STRIDE_HV,dg=STRIDE_HV",
        "g=STRIDE_HV,beta=STRIDE_HV,dg=T_CONTIG",
        "g=T_CONTIG,beta=T_CONTIG,dg=STRIDE_HV",
        "g=T_CONTIG,beta=T_CONTIG,dg=T_CONTIG",
    ]
    assert [str(plan) for plan in paired.plans(dv_local.key("BT=16,beta=float32@T_CONTIG"))] == ["beta=T_CONTIG"]


@pytest.mark.parametrize(("kind", "layout"), [("npu", "T_CONTIG"), ("cuda", "STRIDE_HV"), ("cpu", "STRIDE_HV")])
def test_default_of_a_chip(kind: str, layout: str) -> None:
    assert SPEC.default(dv_local.key(), CHIPS[kind]).id == f"full/g={layout}"


def test_default_is_always_a_candidate() -> None:
    for name in registry.names():
        spec = registry.lookup(name)
        for form in spec.every_form:
            for sizes in ({}, {"HV": 1}, {"T": 1}):
                key = replace(dv_local.key(form, **sizes), op=name)
                for chip in CHIPS.values():
                    assert spec.default(key, chip) in spec.candidates(key)


def test_default_variant_of_a_chip() -> None:
    spec = replace(SPEC, default_variant=lambda key, chip: "sub" if chip.kind == "npu" else "full")
    assert spec.default(dv_local.key(), CHIPS["npu"]).id == "sub/g=T_CONTIG"
    assert spec.default(dv_local.key(), CHIPS["cuda"]).id == "full/g=STRIDE_HV"


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"'chunk_bwd_dv_local' is registered already"):
        registry.register(SPEC)


def test_a_declaration_that_cannot_be_used_is_refused_with_every_reason() -> None:
    wrong = replace(
        SPEC,
        name="wrong",
        operands=(
            *SPEC.operands,
            operands.Operand(name="late", dims="B HV T", time_axis=True),
            operands.Operand(name="deep", dims="B T HV K V", time_axis=True),
            operands.Operand(name="odd", dims="B T X"),
        ),
        outputs=(*SPEC.outputs, operands.Output(name="nothing")),
        layout_groups=(("g", "late", "q"),),
    )
    with pytest.raises(ValueError, match=r"^wrong: ") as caught:
        registry.register(wrong)
    for part in (
        "late: a time axis is 'B T HV' and at most one size of channels, got 'B HV T'",
        "deep: a time axis is 'B T HV' and at most one size of channels, got 'B T HV K V'",
        "odd: dims 'B T X': no such size X (of B T H HV K V BT NT N)",
        "nothing: wanted dims, or to be named d and an operand",
        "q: in layout_groups, but no time-axis tensor",
        "deep: a time-axis tensor in no layout group",
    ):
        assert part in str(caught.value)
    assert "wrong" not in registry.names()


def channels() -> declaration.OpSpec:
    """The op with a gate for each channel of K beside its own."""
    return replace(
        SPEC,
        operands=(
            *SPEC.operands,
            operands.Operand(name="gk", dims="B T HV K", time_axis=True, fill="cumulative_decay"),
        ),
        layout_groups=(("g",), ("gk",)),
    )


@pytest.mark.parametrize("layout", ["STRIDE_HV", "T_CONTIG", "OTHER"])
def test_arguments_of_a_gate_for_each_channel_have_the_key_they_were_made_for(layout: str) -> None:
    spec = channels()
    key = dv_local.key(f"BT=16,g=float32@STRIDE_HV,gk=float32@{layout}", B=2)
    made = synthesize(spec, key, CPU)
    assert made.tensors[-1] is not None
    assert made.tensors[-1].shape == (2, 20, 2, 16)
    assert spec.key(made) == key
    wanted = {"T_CONTIG": ["T_CONTIG"]}.get(layout, ["STRIDE_HV", "T_CONTIG"])
    assert [str(plan) for plan in spec.plans(key)] == [
        f"g={g},gk={gk}" for g in ("STRIDE_HV", "T_CONTIG") for gk in wanted
    ]


def test_unknown_op_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no op 'nothing' \(there are .*chunk_bwd_dv_local"):
        registry.lookup("nothing")


def test_revision_is_of_kernels_tiles_and_launches() -> None:
    kernels = {f"layout_tuner.kernels.{name}" for name in ("dv_local", "tiling", "time_axis")}
    assert {"layout_tuner.ops.dv_local", "layout_tuner.ops.sizes", *kernels} <= revision.sources(
        SPEC.bind.__module__
    ).keys()
    assert "layout_tuner.kernels.fwd_o" not in revision.sources(SPEC.bind.__module__)
    chain = revision.sources(registry.lookup("chunk_gated_delta_rule").bind.__module__)
    every = {f"layout_tuner.kernels.{file.stem}" for file in Path(kernel_modules.__path__[0]).glob("[a-z]*.py")}
    others = {name for name in every if name.startswith("layout_tuner.kernels.kda_")}
    assert others
    assert every - chain.keys() == {"layout_tuner.kernels.probe", *others}


@pytest.mark.parametrize(
    "changed", ["kernels.tiling", "kernels.time_axis", "kernels.dv_local", "ops.sizes", "ops.dv_local"]
)
def test_another_tile_helper_or_launch_is_another_revision(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision that was timed with others does not hold, nor does an overflow that others mend."""
    hashed, module, file = revision.source_revision.__wrapped__, SPEC.bind.__module__, revision._file
    before = hashed(module)
    other = tmp_path / "other.py"
    other.write_text(f"{file(f'layout_tuner.{changed}').read_text()}\nTILE = 1\n")
    monkeypatch.setattr(revision, "_file", lambda name: other if name == f"layout_tuner.{changed}" else file(name))
    assert hashed(module) != before


def test_text_that_moves_to_the_next_module_is_another_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = revision.source_revision.__wrapped__
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    monkeypatch.setattr(revision, "sources", lambda module: {"one": one, "other": other})
    seen = set()
    for texts in [("BT = 1\nBK = 2\n", ""), ("BT = 1\n", "BK = 2\n"), ("", "BT = 1\nBK = 2\n")]:
        one.write_text(texts[0])
        other.write_text(texts[1])
        seen.add(hashed("one"))
    assert len(seen) == 3


def test_candidates_of_a_key_are_of_one_revision() -> None:
    assert len({candidate.revision for candidate in SPEC.candidates(dv_local.key())}) == 1
