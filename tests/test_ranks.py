"""Many ranks, one decision: keys are dealt, all follow the same, and no fault of one rank keeps the others."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import rank_scenarios as scenarios
from command import Result, finish, rows, run_here, shape, shapes_file
from hardware import INTERPRETED
from layout_tuner.cache.sharing.share import export_file
from layout_tuner.cache.sqlite.file import Store
from ranks import Crew

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="its ranks run in Triton's interpreter")


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.end()


def test_keys_are_dealt_longest_first_and_every_rank_holds_the_same(crew: Crew, tmp_path: Path) -> None:
    lengths = [[16, 18, 20, 22, 24, 26]] * 4
    files = ["a", "a", "b", "b"]
    done = crew.run(tmp_path, 4, scenarios.warm, lengths=lengths, files=files)
    first = done[0]
    assert set(first["status"].values()) == {"tuned"}
    assert len(first["status"]) == 6
    for rank, each in enumerate(done):
        for what in ("status", "candidate", "rank"):
            assert each[what] == first[what]
        assert each["held"] == first["candidate"] == each["file"]
        assert each["tuned"] == sorted(each["tuned"], reverse=True)
        assert each["tuned"] == [T for T in each["tuned"] if first["rank"][T] == rank]
        assert each["agreed"], each["agreement"]
        # One rank for each file writes, and each key once.
        assert sorted(each["writes"]) == (sorted(lengths[0]) if rank in (0, 2) else [])
    assert sorted(T for each in done for T in each["tuned"]) == lengths[0]
    assert len(set(first["rank"].values())) > 1
    # By the clocks of their ranks the candidates differ from key to key, and yet all hold the same for each.
    assert all(first["candidate"][T] == scenarios.winner(rank) for T, rank in first["rank"].items())
    again = crew.run(tmp_path, 4, scenarios.warm, lengths=lengths, files=files)
    assert all(set(each["status"].values()) == {"stored"} and not each["tuned"] for each in again)


def test_what_one_rank_has_stored_the_others_take(crew: Crew, tmp_path: Path) -> None:
    alone = crew.run(tmp_path, 1, scenarios.warm, lengths=[[20, 22]], files=["a"])
    assert set(alone[0]["status"].values()) == {"tuned"}
    done = crew.run(tmp_path, 2, scenarios.warm, lengths=[[20, 22], [20, 24]], files=["a", "b"])
    for each in done:
        # As with pipeline parallelism: what only another rank asks for is tuned and held here too.
        assert each["status"] == {20: "stored", 22: "stored", 24: "tuned"}
        assert each["file"] == each["candidate"] == done[0]["candidate"]
        assert each["agreed"]
    assert sorted(T for each in done for T in each["tuned"]) == [24]


def test_two_files_that_decide_differently_are_made_the_same(crew: Crew, tmp_path: Path) -> None:
    for rank in (0, 1):
        crew.run(tmp_path, 2, scenarios.warm, lengths=[[20], [20]], files=["a", "b"], group_of=[rank])
    done = crew.run(tmp_path, 2, scenarios.warm, lengths=[[20], [20]], files=["a", "b"])
    assert done[0]["candidate"] == done[1]["candidate"] == done[0]["held"] == done[1]["held"]
    assert done[0]["status"] == {20: "stored"}
    again = crew.run(tmp_path, 2, scenarios.warm, lengths=[[20], [20]], files=["a", "b"])
    assert again[0]["candidate"] == again[1]["candidate"] == done[0]["candidate"]


def test_a_rank_that_is_killed_is_given_up_after_the_timeout(crew: Crew, tmp_path: Path) -> None:
    lengths = [[16, 18, 20, 22]] * 4
    files = ["a", "a", "a", "a"]
    done = crew.run(tmp_path, 4, scenarios.warm, timeout_s=8.0, lengths=lengths, files=files, fault="dies", at=1)
    assert done[1] is None
    for each in (done[0], done[2], done[3]):
        assert each["status"] == done[0]["status"]
        lost = [T for T, status in each["status"].items() if status == "left"]
        assert len(lost) == 1
        assert each["reason"][lost[0]] == "rank 1 said nothing for 8 s"
        assert "rank 1 said nothing for 8 s" in each["notes"]
        assert each["held"][lost[0]] == "full/g=STRIDE_HV"
        assert len(each["file"]) == 3
        assert each["seconds"] < 60


def test_the_rank_that_writes_may_be_the_one_that_is_killed(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(
        tmp_path, 2, scenarios.warm, timeout_s=8.0, lengths=[[16, 18]] * 2, files=["a", "a"],
        fault="dies", at=0,
    )  # fmt: skip
    assert done[0] is None
    # Rank 0 kept the store of the group, where there is no file through which they meet.
    assert sorted(done[1]["status"].values()) == ["left", "tuned"]
    assert len(done[1]["file"]) == 1


def test_a_rank_that_hangs_is_given_up_with_the_budget(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(
        tmp_path, 2, scenarios.warm, lengths=[[16, 18, 20]] * 2, files=["a", "b"],
        fault="hangs", late_s=20.0, budget_s=8.0, slack_s=2.0,
    )  # fmt: skip
    assert done[0]["seconds"] < 20 < done[1]["seconds"]
    assert done[0]["status"] == done[1]["status"]
    assert sorted(done[0]["status"].values()) == ["left", "tuned", "tuned"]
    assert done[0]["held"] == done[1]["held"]
    assert any("rank 1 said nothing for" in note for note in done[0]["notes"])


def test_what_fails_in_one_rank_is_tried_in_another(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(
        tmp_path, 2, scenarios.warm, lengths=[[16, 18, 20]] * 2, files=["a", "b"],
        fault="cannot compile",
    )  # fmt: skip
    for each in done:
        assert set(each["status"].values()) == {"tuned"}
        assert set(each["rank"].values()) == {0}
        assert each["agreed"]
    assert done[1]["tuned"], "rank 1 took no key"
    alone = crew.run(tmp_path, 1, scenarios.warm, lengths=[[22]], files=["c"], fault="cannot compile", at=0)
    assert alone[0]["status"] == {22: "failed"}
    assert alone[0]["reason"][22] == "rank 0: ld: cannot find -lcuda"


def test_a_rank_with_another_triton_is_a_group_of_its_own(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(tmp_path, 2, scenarios.warm, lengths=[[16, 18]] * 2, files=["a", "a"], fault="another Triton")
    for rank, each in enumerate(done):
        assert set(each["status"].values()) == {"tuned"}
        assert set(each["rank"].values()) == {rank}
        assert any(f"rank {1 - rank}" in note and "a group of their own" in note for note in each["notes"])
        assert each["agreed"], "ranks of different environments may run different candidates"
        assert set(each["candidate"].values()) == {scenarios.winner(rank)}


def test_a_rank_whose_cache_file_cannot_be_written_follows_all_the_same(crew: Crew, tmp_path: Path) -> None:
    sealed = tmp_path / "sealed.sqlite"
    crew.run(tmp_path, 1, scenarios.warm, lengths=[[16]], files=["a"])
    export_file(Store(tmp_path / "a.sqlite"), sealed)
    before = sealed.read_bytes()
    done = crew.run(tmp_path, 2, scenarios.warm, lengths=[[16, 18, 20]] * 2, files=["a", "sealed"])
    assert done[0]["held"].items() >= {T: done[0]["candidate"][T] for T in (18, 20)}.items()
    assert done[0]["candidate"] == done[1]["candidate"]
    assert (done[0]["kept"], done[1]["kept"]) == (True, False)
    assert sealed.read_bytes() == before


def test_a_late_rank_is_waited_for_and_one_that_is_too_late_takes_what_there_is(crew: Crew, tmp_path: Path) -> None:
    late = {"fault": "late", "late_s": 3.0, "lengths": [[16, 18]] * 2}
    done = crew.run(tmp_path, 2, scenarios.warm, files=["a", "b"], **late)
    assert done[0]["candidate"] == done[1]["candidate"] and len(done[0]["candidate"]) == 2
    assert done[0]["agreed"] and not done[0]["notes"]
    done = crew.run(tmp_path, 2, scenarios.warm, timeout_s=4.0, files=["c", "d"], **late | {"late_s": 12.0})
    assert "rank 1 did not come in time" in done[0]["notes"]
    assert done[0]["held"] == done[1]["held"] == done[0]["candidate"]
    assert not done[1]["tuned"]


def test_a_rank_that_raises_before_keeps_nobody(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(tmp_path, 2, scenarios.warm, lengths=[[16, 18]] * 2, files=["a", "b"], fault="bad shapes")
    assert "T: Input should be greater than or equal to 1" in done[1]["error"]
    assert set(done[0]["status"].values()) == {"tuned"}
    assert done[0]["seconds"] < 30
    assert any(note.startswith("rank 1: shapes cannot be used") for note in done[0]["notes"])


def test_a_rank_that_is_interrupted_gives_its_key_back(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(tmp_path, 2, scenarios.warm, lengths=[[16, 18]] * 2, files=["a", "b"], fault="raises")
    assert set(done[0]["status"].values()) == {"tuned"}
    assert set(done[0]["rank"].values()) == {0}
    assert any(note == "rank 1: it was interrupted" for note in done[0]["notes"])


def test_a_group_of_some_ranks_is_enough(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(tmp_path, 4, scenarios.warm, lengths=[[16, 18]] * 4, files=["a"] * 4, group_of=[1, 3])
    assert done[0] == done[2] == {}
    assert done[1]["status"] == done[3]["status"] == {16: "tuned", 18: "tuned"}
    assert set(done[1]["rank"].values()) <= {0, 1}, "ranks are the group's"


def test_misses_of_all_ranks_are_tuned_and_all_switch(crew: Crew, tmp_path: Path) -> None:
    """Rank 3 misses nothing, ranks 0 and 1 the same, rank 2 something else."""
    lengths = [[20], [20], [24], []]
    done = crew.run(tmp_path, 4, scenarios.train, lengths=lengths, files=["a", "a", "b", "c"])
    for rank, each in enumerate(done):
        assert each["before"] == dict.fromkeys(lengths[rank], "full/g=STRIDE_HV")
        assert each["status"] == {20: "tuned", 24: "tuned"}
        assert each["held"] == each["candidate"] == done[0]["candidate"] == each["file"]
        assert each["again"] == []
        assert each["all agree"], each["checked"]


def test_a_difference_names_ranks_keys_and_files(crew: Crew, tmp_path: Path) -> None:
    done = crew.run(tmp_path, 2, scenarios.differ, at=1)
    assert done[0] == done[1]
    assert not done[0]["agreed"]
    for part in ("chunk_bwd_dv_local B=1 T=20", "on rank 0 (", "on rank 1 (", "full/g=T_CONTIG", "one.sqlite"):
        assert part in done[0]["text"]


@pytest.mark.parametrize("scopes", ["decorator", "with"])
def test_scopes_tune_together_every_so_many_entries(crew: Crew, tmp_path: Path, scopes: str) -> None:
    done = crew.run(tmp_path, 2, scenarios.sync, steps=5, every=2, scopes=scopes)
    assert done[0]["all agree"] and done[1]["all agree"]
    # The first entry finds nothing missed, the third tunes what the first two missed.
    assert done[0]["ran"][1] == ["20 default"]
    assert done[1]["ran"][1] == ["20 default", "24 default"]
    for each in done:
        for ran in each["ran"][2:]:
            assert "20 measured" in ran and not [one for one in ran if "default" in one]


def started(folder: Path, *arguments: object, size: int = 2, files: bool = False) -> list[Result]:
    """The command in as many ranks, with the variables that torchrun sets; without its agent, rank 0 has the store."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(size):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "localhost"}
        cache = folder / (f"{rank}.sqlite" if files else "one.sqlite")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "layout_tuner.cli", "warmup", "--cache", str(cache), *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {name: str(value) for name, value in variables.items()} | {"MASTER_PORT": str(port)},
            )
        )
    return [finish(process) for process in processes]


def test_the_command_shares_keys_with_the_ranks_that_torchrun_started(tmp_path: Path) -> None:
    file = shapes_file(tmp_path, shape(T=[16, 18, 20]))
    done = started(tmp_path, "--shapes", file, "--json")
    assert [each.status for each in done] == [0, 0], done
    told = json.loads(done[0].out)
    assert not done[1].out, "one rank prints"
    assert [row["status"] for row in told["keys"]] == ["tuned"] * 3
    assert told["agreed"] is True
    assert rows(tmp_path / "one.sqlite") == 3


def test_every_rank_of_the_command_ends_with_the_worst_status(tmp_path: Path) -> None:
    file = shapes_file(tmp_path, shape(T=[16]))
    (tmp_path / "1.sqlite").mkdir()
    done = started(tmp_path, "--shapes", file, "--distributed", files=True)
    assert [each.status for each in done] == [2, 2], done
    assert "rank 1: " in done[0].out and "1.sqlite" in done[0].out
    assert rows(tmp_path / "0.sqlite") == 1


def test_ranks_are_asked_for_where_nothing_started_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_here(["warmup", "--shapes", tmp_path / "none.json", "--distributed"], monkeypatch, capsys)
    assert done.status == 2
    assert "torchrun --nproc-per-node N -m layout_tuner.cli warmup --distributed" in " ".join(done.err.split())
