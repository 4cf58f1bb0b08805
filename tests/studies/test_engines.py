"""The same trials on this machine, Dask and Slurm: the same rows; what is lost there loses only its trial."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from normwise import studies
from normwise.errors import StudyError
from normwise.studies import engines
from normwise.studies._execute import Answer, Order, execute
from normwise.studies.engines import dask, slurm
from tests.studies import toy
from tests.studies.running import alive, eventually

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make the toy a study, of the workers as well, and an empty folder the current one."""
    monkeypatch.setitem(studies._STUDIES, "toy", toy)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    from distributed import LocalCluster

    running: Any = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with running:
        yield running.scheduler_address.replace("tcp", "dask")


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("cluster") if request.param == "dask" else "slurm://local"


on_both = pytest.mark.parametrize("engine", ["dask", "slurm"], indirect=True)
mostly_on_dask = pytest.mark.parametrize(
    "engine", ["dask", pytest.param("slurm", marks=pytest.mark.slow)], indirect=True
)


def ask(monkeypatch: pytest.MonkeyPatch, *params: dict[str, Any]) -> None:
    monkeypatch.setattr(toy, "trials", lambda quick: [{"at": at, **each} for at, each in enumerate(params)])


def rows(engine: str) -> list[tuple[str, str]]:
    evidence = studies.study("toy", quick=True, ledger=f"{engine.partition(':')[0]}.sqlite", engine=engine)
    assert evidence.finished
    return [(repr(row.params), repr(row.metrics)) for row in evidence.rows]


def pids(log: Path, at: int) -> list[int]:
    """The processes that have begun a trial."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [int(line.split()[0]) for line in lines if line.endswith(f" {at}")]


# -- the same everywhere ---------------------------------------------------------------------------


@on_both
def test_the_rows_are_those_of_this_machine(engine: str, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    ask(monkeypatch, {"does": "odd numbers"}, {"does": "number"})
    assert rows(engine) == rows("local")
    assert list(place.glob("slurm-*")) == []


@pytest.mark.slow
@on_both
def test_a_training_comes_out_the_same_to_the_last_bit(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.studies import tiny_training

    monkeypatch.setitem(studies._STUDIES, "toy", tiny_training)
    here = rows("local")
    assert rows(engine) == here
    assert "loss" in here[0][1]


# -- what is lost ----------------------------------------------------------------------------------


@mostly_on_dask
def test_a_killed_worker_loses_only_its_trial(engine: str, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    log = place / "log"
    ask(monkeypatch, *({"does": "sleep", "seconds": 1.5 * (at == 1), "log": str(log)} for at in range(2)))

    def kill() -> None:
        assert eventually(lambda: pids(log, 1))
        parent = int(Path(f"/proc/{pids(log, 1)[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    evidence = studies.study("toy", quick=True, ledger="toy.sqlite", engine=engine)
    killer.join()
    assert [row.metrics["value"] for row in evidence.rows] == [0.0, 10.0]
    assert [len(pids(log, at)) for at in range(2)] == [1, 2]
    assert evidence.rows[1].attempts == (1 if engine.startswith("dask") else 2)  # Dask tries again by itself


@mostly_on_dask
def test_leaving_ends_what_runs(engine: str, place: Path) -> None:
    log = place / "log"
    order = Order(study=toy.__name__, version=1, params={"does": "sleep", "seconds": 300, "at": 0, "log": str(log)})
    with engines.start(engine, 1, place) as session:
        future = session.submit(execute, order)
        assert eventually(lambda: pids(log, 0))
    assert future.result().outcome == "killed"
    assert eventually(lambda: not alive(pids(log, 0)[0]))


@pytest.mark.slow
def test_the_trial_of_a_killed_runner_ends_on_dask(cluster: str, place: Path) -> None:
    log = place / "log"
    code = f"""
from pathlib import Path
from normwise.studies import engines
from normwise.studies._execute import Order, execute
params = {{"does": "sleep", "seconds": 300, "at": 0, "log": {str(log)!r}}}
with engines.start({cluster!r}, 1, Path()) as session:
    session.submit(execute, Order(study={toy.__name__!r}, version=1, params=params)).result()
"""
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code]) as runner:
        assert eventually(lambda: pids(log, 0))
        runner.kill()
    assert eventually(lambda: not alive(pids(log, 0)[0]))


# -- what cannot be reached ------------------------------------------------------------------------


def refused(text: str, workers: int | None = 1, folder: Path = Path()) -> str:
    with pytest.raises(StudyError) as failure, engines.start(text, workers, folder):
        pass
    return str(failure.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lokal", r"no engine is called 'lokal': did you mean local\? choose from dask://HOST:PORT, local, slurm"),
        ("slrum", "did you mean slurm?"),
        ("dusk://a:1", "did you mean dask://HOST:PORT?"),
        ("kubernetes", "choose from dask://HOST:PORT, local, slurm"),
        ("local:4", "did you mean local?"),
        ("dask", "dask is no address of a Dask scheduler: give one such as dask://localhost:8786"),
        ("dask://", "is no address"),
        ("dask://host", "is no address"),
        ("dask://host:0", "is no address"),
        ("dask://host:65536", "is no address"),
        ("dask://host:8786/x", "is no address"),
        ("slurm://gpu", "slurm://gpu is no form of Slurm: give slurm"),
    ],
)
def test_a_text_that_means_no_engine_is_refused_with_the_nearest(text: str, says: str) -> None:
    assert says.replace("\\", "") in refused(text)


@pytest.mark.parametrize("engine", ["loca", "dask://host", "slurm://gpu"])
def test_an_engine_that_cannot_be_leaves_no_ledger(engine: str, place: Path) -> None:
    with pytest.raises(StudyError, match=r"did you mean local|no address|no form of Slurm"):
        studies.study("toy", quick=True, engine=engine)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("given", ["dask://[::1]:8786", "dask://tls://host.example:8786", "dask://10.0.0.1:1/"])
def test_addresses_of_schedulers_are_read(given: str) -> None:
    assert dask._address(given).startswith(("tcp://", "tls://"))


@pytest.mark.parametrize(
    ("package", "text", "line"),
    [
        ("distributed", "dask://localhost:8786", "pip install 'normwise[dask]'"),
        ("submitit", "slurm", "pip install 'normwise[slurm]'"),
    ],
)
def test_a_missing_package_gives_the_line_that_installs_it(
    package: str, text: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert refused(text).endswith(f"is not installed: {line}")


def test_a_scheduler_is_waited_for_ten_seconds_at_most() -> None:
    assert dask._PATIENCE <= 10
    assert slurm._PATIENCE <= 10


@pytest.mark.parametrize("listens", [False, True], ids=["nobody", "somebody silent"])
def test_an_address_without_a_scheduler_is_named(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask, "_PATIENCE", 0.5)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        if listens:
            other.listen()
        started = time.monotonic()
        assert f"no Dask scheduler answers at tcp://127.0.0.1:{port} (" in refused(f"dask://127.0.0.1:{port}")
        assert time.monotonic() - started < 10


def a_client(versions: dict[str, Any], threads: dict[str, int]) -> Any:
    return SimpleNamespace(run=lambda *_, **__: versions, nthreads=lambda: threads)


def test_a_cluster_without_workers_says_how_to_start_one() -> None:
    with pytest.raises(StudyError, match="has no workers: start one with `dask worker tcp://h:1`"):
        dask._workers(a_client({}, {}), "tcp://h:1", needed=True)
    assert dask._workers(a_client({}, {}), "tcp://h:1", needed=False) == 0  # it starts them when trials are queued


@pytest.mark.parametrize(
    ("there", "has"), [("0.0.1", "has normwise 0.0.1"), (ModuleNotFoundError("normwise"), "has no normwise")]
)
def test_workers_with_another_normwise_are_named(there: Any, has: str) -> None:
    with pytest.raises(StudyError, match=f"tcp://w:2, a worker of .* {has}: install {version('normwise')} there"):
        dask._workers(a_client({"tcp://w:2": there}, {"tcp://w:2": 1}), "tcp://h:1", needed=True)


# -- Slurm itself, whose commands are played here --------------------------------------------------

COMMANDS = {
    "sinfo": "exit 0",
    "sbatch": """
id=$$
SLURM_JOB_ID=$id SLURM_PROCID=0 setsid sh "$1" >/dev/null 2>&1 &
echo $! > "$JOBS/$id"
echo "Submitted batch job $id"
""",
    "srun": 'while [ "${1#--}" != "$1" ]; do case "$1" in --unbuffered) shift;; *) shift 2;; esac; done; exec "$@"',
    "sacct": """
echo "JobID|State|NodeList"
for job in "$JOBS"/*; do
    kill -0 "$(cat "$job")" 2>/dev/null && state=RUNNING || state=$ENDS_AS
    echo "$(basename "$job")|$state|here"
done
""",
    "scancel": 'kill -9 -"$(cat "$JOBS/$1")"',
}


@pytest.fixture
def commands(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = place / "bin"
    (place / "jobs").mkdir()
    folder.mkdir()
    for name, script in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JOBS", str(place / "jobs"))
    monkeypatch.setenv("ENDS_AS", "NODE_FAIL")
    return folder


def test_jobs_of_slurm_bring_their_rows_and_leave_no_files(
    commands: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, {"does": "number"})
    assert rows("slurm") == rows("local")
    assert list(place.glob("slurm-*")) == []


def test_a_job_is_cancelled_when_the_run_ends(commands: Path, place: Path) -> None:
    log = place / "log"
    order = Order(study=toy.__name__, version=1, params={"does": "sleep", "seconds": 300, "at": 0, "log": str(log)})
    with engines.start("slurm", 1, place) as session:
        future = session.submit(execute, order)
        assert eventually(lambda: pids(log, 0))
    assert future.result().outcome == "killed"
    assert eventually(lambda: not alive(pids(log, 0)[0]))


@pytest.mark.parametrize(
    ("ends", "outcome"), [("NODE_FAIL", "killed"), ("TIMEOUT", "timeout"), ("OUT_OF_MEMORY", "memory")]
)
def test_a_job_that_slurm_ended_is_told_apart(ends: str, outcome: str, tmp_path: Path) -> None:
    job = SimpleNamespace(
        paths=SimpleNamespace(result_pickle=tmp_path / "none"), job_id="7", state=ends, stderr=lambda: "slurmstepd: so"
    )
    wanted = Answer(outcome=outcome, error=f"job 7 ended as {ends} and without an answer\nslurmstepd: so")
    assert slurm._answer(job, local=True) == wanted


def test_a_job_asks_for_one_core_and_for_its_limits() -> None:
    order = Order(study="s", version=1, params={}, time_limit=90.0, memory_limit=2 * 2**30)
    asked = slurm._settings(order, local=False)
    assert (asked["time"], asked["mem"], asked["cpus_per_task"]) == (2 + 5, "3072MB", 1)
    assert "mem" not in slurm._settings(Order(study="s", version=1, params={}), local=False)


def test_a_refusal_of_sbatch_is_told(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, {"does": "number"})
    (commands / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid account or partition' >&2; exit 1\n")
    with pytest.raises(StudyError, match=r"(?s)Slurm takes no job: .*invalid account or partition"):
        studies.study("toy", quick=True, ledger="toy.sqlite", engine="slurm")


@pytest.mark.parametrize(
    ("sinfo", "says"),
    [
        ("echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1", "Unable to contact slurm"),
        ("exec sleep 60", "sinfo said nothing for 0.2 s"),
    ],
    ids=["no answer", "silence"],
)
def test_a_controller_that_does_not_answer_is_told(
    sinfo: str, says: str, commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_PATIENCE", 0.2)
    (commands / "sinfo").write_text(f"#!/bin/sh\n{sinfo}\n")
    assert f"Slurm does not answer: {says}" in refused("slurm").replace("slurm_load_partitions: ", "")


def test_without_slurm_the_missing_command_is_named(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setenv("PATH", str(place))
    assert refused("slurm") == "no Slurm here, sbatch is not found: run this on a login node of the cluster"


def test_a_folder_that_cannot_be_written_to_is_named(place: Path) -> None:
    (place / "file").write_text("")
    assert f"{place / 'file'}: " in refused("slurm://local", folder=place / "file")
