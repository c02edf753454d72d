"""Decisions that earlier versions stored: read, found and followed.

`data/decisions.sqlite` was written by `tuner warmup` in the interpreter, before modules moved into rooms (only the name
of the host is another).
"""

import contextlib
import platform
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hardware import INTERPRETED
from layout_tuner.cache.records import DecisionRecord
from layout_tuner.cache.sqlite.file import Store

import layout_tuner
import layout_tuner.ops
from layout_tuner.config import Config
from layout_tuner.device import driver
from layout_tuner.device.environment import environment
from layout_tuner.dispatch import router
from layout_tuner.ops.chain import stages
from layout_tuner.spec import registry
from layout_tuner.spec.declaration import Candidate, OpSpec, Problem
from layout_tuner.spec.keys import Form, bucketed
from layout_tuner.tuning.inputs import synthesize
from layout_tuner.tuning.records import key_of

WRITTEN = Path(__file__).parent / "data" / "decisions.sqlite"
CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file, with today's revisions: kernels change, and then a decision of theirs rightly matches no more."""
    path = tmp_path / "decisions.sqlite"
    shutil.copy(WRITTEN, path)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for op in registry.names():
            revision = registry.lookup(op).revision
            connection.execute("UPDATE decisions SET revision = ? WHERE op = ?", (revision, op))
            connection.execute(
                "UPDATE measurements SET revision = ? WHERE decision_id IN (SELECT id FROM decisions WHERE op = ?)",
                (revision, op),
            )
    return path


@pytest.fixture
def records(file: Path) -> list[DecisionRecord]:
    """What stands in it."""
    with contextlib.closing(Store(file)) as store:
        return list(store.decisions())


@pytest.fixture
def its_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The id of the environment of a machine that says of itself what the file's says."""
    with contextlib.closing(Store(file)) as store:
        (recorded,) = store.environments()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__version__", recorded.facts["torch"])
        patched.setattr(driver, "triton_distribution", lambda: ("triton", recorded.facts["triton"]))
        patched.setattr(platform, "machine", lambda: recorded.facts["machine"])
        environment.cache_clear()
        made = environment(CPU)
    assert (made.id, dict(made.facts)) == (recorded.id, dict(recorded.facts))
    yield made.id
    environment.cache_clear()


def test_a_stored_key_is_the_key_of_a_call(records: list[DecisionRecord]) -> None:
    assert {record.key.op for record in records} == {
        "chunk_bwd_dv_local",
        "chunk_local_cumsum",
        "chunk_gated_delta_rule",
    }
    for record in records:
        spec, key = registry.lookup(record.key.op), key_of(record.key)
        assert bucketed(spec.key(synthesize(spec, key, CPU)), Config().keys.bucket) == key
        assert key.form.text == record.key.form
        # There may be more by now.
        assert {each.id for each in spec.candidates(key)} >= {each.candidate for each in record.measurements}
        assert spec.default(key, driver.chip(CPU)).id == record.default_candidate


@pytest.mark.skipif(not INTERPRETED, reason="the file is of Triton's interpreter")
def test_a_stored_decision_is_followed(file: Path, records: list[DecisionRecord], its_environment: str) -> None:
    with layout_tuner.enable(cache=file, on_miss="error", fla=False):
        for record in records:
            assert record.environment == its_environment
            choice = router.current().choose(registry.lookup(record.key.op), key_of(record.key), CPU)
            assert (choice.source, choice.candidate.id) == ("measured", record.candidate)


FORM = (
    "A_log=float32,BT=16,beta=bfloat16@STRIDE_HV,dt_bias=1,g=float32@OTHER,grad=1,initial_state=float32,"
    "output_final_state=1,state_v_first=1,use_gate_in_kernel=1"
)
GATE, BETA = "g=float32@T_CONTIG", "beta=float32@T_CONTIG"
# Of each stage of a call of that form with bfloat16 values: its dtype, its form and its candidate.
STAGES = """\
gdn_gate_chunk_cumsum float32 BT=16,dt_bias=1,g=float32@STRIDE_HV,output_dtype=float32,resets=1 \
    triangle/g=STRIDE_HV,out=T_CONTIG
chunk_gated_delta_rule_fwd_intra bfloat16 BT=16,{beta},{gate} full/g=T_CONTIG,beta=T_CONTIG
chunk_gated_delta_rule_fwd_h bfloat16 BT=16,{gate},initial_state=float32,output_final_state=1,state_v_first=1 \
    wide/g=T_CONTIG,gk=T_CONTIG
chunk_fwd_o bfloat16 BT=16,{gate},state_v_first=1 full/g=T_CONTIG
recompute_w_u_fwd bfloat16 BT=16,{beta},{gate} full/g=T_CONTIG,beta=T_CONTIG
chunk_gated_delta_rule_fwd_h bfloat16 BT=16,{gate},initial_state=float32,state_v_first=1 wide/g=T_CONTIG,gk=T_CONTIG
chunk_bwd_dv_local bfloat16 BT=16,{gate} full/g=T_CONTIG
chunk_gated_delta_rule_bwd_dhu bfloat16 BT=16,{gate},h0=float32,state_v_first=1 wide/g=T_CONTIG,gk=T_CONTIG
chunk_gated_delta_rule_bwd_dhu bfloat16 BT=16,dht=float32,{gate},h0=float32,state_v_first=1 wide/g=T_CONTIG,gk=T_CONTIG
chunk_bwd_dqkwg bfloat16 BT=16,dv=1,{gate},state_v_first=1,w=1 full/g=T_CONTIG,dg=T_CONTIG
prepare_wy_repr_bwd bfloat16 BT=16,{beta},{gate} full/g=T_CONTIG,beta=T_CONTIG,dg=T_CONTIG,dbeta=T_CONTIG
chunk_local_cumsum float32 BT=16,{gate},output_dtype=float32,reverse=1 triangle/g=T_CONTIG,out=T_CONTIG
gdn_gate_bwd float32 dt_bias=1,dyg=float32@T_CONTIG,g=float32@STRIDE_HV,resets=1 \
    tokens/g=STRIDE_HV,dyg=T_CONTIG,dg=STRIDE_HV
"""


def test_a_chain_asks_for_its_stages_under_the_keys_that_they_are_stored_under(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, bound = registry.lookup("chunk_gated_delta_rule"), []

    def bind(stage: OpSpec, problem: Problem, candidate: Candidate) -> None:
        bound.append([stage.name, problem.key.dtype, problem.key.form.text, candidate.id])

    monkeypatch.setattr(stages, "bind_candidate", bind)
    sizes = {"B": 2, "T": 20, "H": 1, "HV": 2, "K": 16, "V": 16}
    key = spec.key_for(sizes, dtype="bfloat16", form=Form.parse(FORM))
    plan = spec.plans(key)[-1]
    spec.bind(Problem(key=key, chip=driver.chip(CPU)), Candidate(variant="chain", plan=plan, revision=""))
    assert bound == [line.split() for line in STAGES.format(gate=GATE, beta=BETA).splitlines()]
