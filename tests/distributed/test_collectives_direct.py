"""``--engine direct``: the binding in several processes, against a library with NCCL's ABI."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.bench_ranks import BenchRun, run_bench
from tests.distributed.standin import build_standin
from tests.distributed.test_collectives import ALL, ODD_SIZES


@pytest.fixture(scope="module")
def standin(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_standin(tmp_path_factory.mktemp("standin"))


def direct(
    num_ranks: int, folder: Path, library: str, environ: dict[str, str] | None = None, **config: Any
) -> BenchRun:
    settings = {"engine": "direct", "library_path": library, "iters": 2, "warmup_iters": 1, **config}
    return run_bench(num_ranks, settings, folder, environ=environ)


def test_every_collective_is_right_over_our_own_communicator(tmp_path: Path, standin: str) -> None:
    run = direct(
        3, tmp_path, standin, collectives=[*ALL, "barrier", "p2p"], sizes_bytes=ODD_SIZES[2:5], root=1
    )
    assert run.codes == [0] * 3, run.stderr
    assert {row["collective"] for row in run.rows} == {*ALL, "barrier", "p2p"}
    assert all(row["wrong"] == 0 and row["engine"] == "direct" for row in run.rows)
    assert all(row["torch_us"] > 0 for row in run.rows if row["collective"] in ALL)
    setup = run.first("setup")
    assert (setup["library_version"], setup["library_path"]) == ("2.28.3", standin)
    assert setup["init_s"] > 0


def test_the_ring_runs_over_it_too(tmp_path: Path, standin: str) -> None:
    run = direct(3, tmp_path, standin, algo="ring", sizes_bytes=[*ODD_SIZES[:3], 8_000_004])
    assert run.codes == [0] * 3, run.stderr
    assert [row["wrong"] for row in run.rows] == [0] * 4


def test_each_group_has_its_own_id(tmp_path: Path, standin: str) -> None:
    run = direct(4, tmp_path, standin, groups=[[0, 3], [1, 2]], sizes_bytes=[4096])
    assert run.codes == [0] * 4, run.stderr
    assert [(row["num_ranks"], row["wrong"]) for row in run.rows] == [(2, 0), (2, 0)]


def test_a_failing_call_says_which_and_why(tmp_path: Path, standin: str) -> None:
    run = direct(1, tmp_path, standin, {"STANDIN_FAIL": "ncclAllReduce:6"}, sizes_bytes=[64])
    assert run.codes == [1]
    assert "ncclAllReduce: a peer failed or the network did (code 6)" in run.stderr
    assert "ncclAllReduce was told to fail" in run.stderr


def test_what_failed_outside_of_a_call_fails_the_run(tmp_path: Path, standin: str) -> None:
    run = direct(1, tmp_path, standin, {"STANDIN_FAIL": "async:3"}, sizes_bytes=[64])
    assert run.codes == [1]
    assert "internal error of the library" in run.stderr


def test_the_id_is_in_no_event_and_no_output(tmp_path: Path, standin: str) -> None:
    run = direct(2, tmp_path, standin, sizes_bytes=[64])
    assert run.codes == [0, 0], run.stderr
    assert "/standin-" not in run.stderr + repr(run.events)


def test_without_an_agent_it_says_what_it_needs(standin: str) -> None:
    from gpuctl.agent.worker import RankEnv, Worker
    from gpuctl.collectives.communicator import Library
    from gpuctl.collectives.direct import share_unique_id
    from gpuctl.errors import AgentError

    worker = Worker(RankEnv(1, 1, 2, 2, 0, "127.0.0.1", 1, 0, "none"), None, None)
    with pytest.raises(AgentError, match="communicator id did not come"):
        share_unique_id(Library(standin), worker, members=(0, 1), key=0, timeout_s=0.1)


def test_a_library_that_is_not_there_is_named(tmp_path: Path) -> None:
    run = direct(1, tmp_path, str(tmp_path / "libnccl.so.2"), sizes_bytes=[64])
    assert run.codes == [1]
    assert "libnccl.so.2: no such library" in run.stderr


def test_the_standin_is_built_without_warnings(tmp_path: Path) -> None:
    build_standin(tmp_path, "-Wall", "-Wextra", "-Werror", "-DNO_LAST_ERROR")
    assert subprocess.run(["nm", "-D", tmp_path / "libnccl-standin.so"], capture_output=True).returncode == 0
