"""`cluster/slurm.sbatch` under a real Slurm, whose nodes are hosts with addresses of their own."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests import hosts
from tests.conftest import ROOT, Digits
from tests.end_to_end.runs import checkpoint_steps, constant_recipe, same_weights, weights_of
from tests.hosts import Host
from vit_ray import trust_modules
from vit_ray.config import Recipe

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scancel", "squeue", "sinfo", "munged")
ABSENT = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(ABSENT), reason=f"Slurm is not installed: no {', '.join(ABSENT)}"),
]


def script_of(recipe: Recipe) -> str:
    """The shipped script with the recipe, for two nodes with a worker each."""
    recipe = recipe.with_absolute_paths().with_changes(workers={"num_workers": 2})
    text = (ROOT / "cluster" / "slurm.sbatch").read_text()
    text = text.replace("--job-name=vit-b16-i21k", f"--job-name={recipe.name}")
    text = text.replace("--gpus-per-node=8", "--gpus-per-node=1")
    before, begin, rest = text.partition("<<'RECIPE'\n")
    after = rest.partition("RECIPE\n")[2]
    own = yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False)
    return f"{before}{begin}{own}RECIPE\n{after}"


NODES = ("node1", "node2", "node3")
CONF = """
ClusterName=tests
SlurmctldHost=node1({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=30
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdTimeout=30
MinJobAge=3600
PartitionName=all Nodes=node[1-3] Default=YES State=UP
"""
NODE = (
    "NodeName={} NodeAddr={} Sockets=1 CoresPerSocket=2 ThreadsPerCore=1 RealMemory=2000 Gres=gpu:1"
)
STEPS = 120


@dataclass
class Slurm:
    """Three nodes; `node1` is also the controller's."""

    nodes: dict[str, Host]
    folder: Path
    environment: dict[str, str]

    def run(self, *command: str) -> str:
        """Output of a command of Slurm's on the controller's host."""
        code, output = self.nodes["node1"].run(*command, environment=self.environment)
        assert code == 0, output
        return output

    def submit(self, recipe: Recipe, *options: str) -> str:
        """The job's number."""
        script = self.folder / f"{recipe.name}.sbatch"
        script.write_text(script_of(recipe))
        options = (f"--output={self.log(recipe)}", *options)
        told = self.run("sbatch", "--parsable", *options, str(script), "workers.use_gpu=false")
        return told.split()[-1]

    def log(self, recipe: Recipe) -> Path:
        return self.folder / f"{recipe.name}.log"

    def wait(self, job: str, until: Callable[[str], bool], timeout_s: float = 600) -> str:
        """The job's state and number of restarts, such as `RUNNING 0`, once it is as wanted."""
        deadline = time.monotonic() + timeout_s
        while True:
            told = self.run("scontrol", "show", "job", job)
            state = re.search(r"JobState=(\w+)", told)[1]  # type: ignore[index]
            restarts = re.search(r"Restarts=(\d+)", told)[1]  # type: ignore[index]
            if until(f"{state} {restarts}"):
                return f"{state} {restarts}"
            logs = "\n".join(p.read_text()[-3000:] for p in sorted(self.folder.glob("*.log")))
            goes_on = not is_over(state) and time.monotonic() < deadline
            assert goes_on, f"{told}\n{logs}"
            time.sleep(1)

    def exit_code(self, job: str) -> int:
        shown = self.run("scontrol", "show", "job", job)
        return int(re.search(r" ExitCode=(\d+):", shown)[1])  # type: ignore[index]

    def folders(self, job: str = "*") -> list[str]:
        """Of jobs, or of one, on all hosts."""
        found = [host.folder.glob(f"tmp-ray/ray-{job}-*") for host in self.nodes.values()]
        return [str(path) for paths in found for path in paths]

    def wait_until_nothing_is_left(self) -> None:
        """Until no host has a process of Ray or a driver, or a file of a job."""
        deadline = time.monotonic() + 120
        while True:
            running = "\n".join(p for host in self.nodes.values() for p in host.processes())
            left = re.findall(".*(?:ray::|raylet|gcs_server|vit_ray pretrain).*", running)
            if not left and not self.folders():
                return
            assert time.monotonic() < deadline, (left, self.folders())
            time.sleep(1)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    hosts.require()
    with hosts.network() as net:
        nodes = {name: net.join(name) for name in NODES}
        folder = nodes["node1"].folder.parent
        conf = CONF.format(head=nodes["node1"].address, folder=folder)
        conf += "\n".join(NODE.format(name, host.address) for name, host in nodes.items())
        (folder / "slurm.conf").write_text(f"{conf}\n")
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        for place in ("state", *(f"spool-{name}" for name in NODES)):
            (folder / place).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        environment = {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": "/tmp/ray",  # which each host has alone
        }
        own = [f"--{what}={folder}/munge.{what}" for what in ("socket", "pid-file", "log-file")]
        own += [f"--seed-file={folder}/munge.seed", f"--key-file={key}"]
        nodes["node1"].serve("munged.log", "munged", "--foreground", "--force", *own)
        nodes["node1"].serve("slurmctld.log", "slurmctld", "-D", environment=environment)
        for name, host in nodes.items():
            host.serve("slurmd.log", "slurmd", "-D", "-N", name, environment=environment)
        deadline, told = time.monotonic() + 300, ""
        while "idle 3" not in told:
            logs = "\n".join(p.read_text()[-2000:] for p in sorted(folder.rglob("*.log")))
            assert time.monotonic() < deadline, f"{told}\n{logs}"
            time.sleep(1)
            _, told = nodes["node1"].run("sinfo", "-h", "-o", "%T %D", environment=environment)
        yield Slurm(nodes, folder, environment)


@pytest.fixture(scope="module")
def straight(slurm: Slurm, digits: Digits) -> Recipe:
    recipe = constant_recipe("straight", digits, slurm.folder, optim={"steps": STEPS})
    job = slurm.submit(recipe)
    assert slurm.wait(job, is_over) == "COMPLETED 0", slurm.log(recipe).read_text()
    slurm.wait_until_nothing_is_left()
    return recipe


def slowed(name: str, digits: Digits, folder: Path, every: int = 1000) -> Recipe:
    """Each fourth step takes 5 s longer, until Slurm has started the job again."""
    trust_modules("tests.parts")
    train = {"callbacks": ["tests.parts.wait_before_restart"]}
    optim, checkpoint = {"steps": STEPS}, {"every_steps": every}
    return constant_recipe(name, digits, folder, optim=optim, train=train, checkpoint=checkpoint)


def has_said(text: str, recipe: Recipe, slurm: Slurm) -> Callable[[str], bool]:
    return lambda _: slurm.log(recipe).exists() and text in slurm.log(recipe).read_text()


def has_begun(recipe: Recipe, slurm: Slurm) -> Callable[[str], bool]:
    return has_said("first step:", recipe, slurm)


def is_over(state: str) -> bool:
    return not state.startswith(("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUE"))


def test_at_the_time_limit_a_run_is_saved_and_queued_again_and_ends_with_the_same_weights(
    slurm, digits, straight, tmp_path
):
    limited = slowed("limited", digits, tmp_path)
    submitted_s = time.monotonic()
    job = slurm.submit(limited, "--signal=B:USR1@60")
    slurm.wait(job, has_begun(limited, slurm))
    minutes = int(time.monotonic() - submitted_s) // 60
    slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    slurm.wait(job, lambda state: state.endswith(" 1"))
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    (saved,) = checkpoint_steps(limited)
    assert 0 < saved < STEPS
    assert slurm.wait(job, is_over) == "COMPLETED 1", slurm.log(limited).read_text()
    slurm.wait_until_nothing_is_left()
    assert same_weights(weights_of(limited), weights_of(straight))


def test_a_signal_while_ray_starts_queues_a_job_again_or_ends_it(slurm, digits, tmp_path):
    recipe = constant_recipe("early", digits, tmp_path, optim={"steps": 8})
    job = slurm.submit(recipe)
    slurm.wait(job, has_said("Local node IP", recipe, slurm))
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job, lambda state: state == "RUNNING 1")
    assert not has_begun(recipe, slurm)("")
    slurm.run("scancel", job)
    assert slurm.wait(job, is_over) == "CANCELLED 1"
    slurm.wait_until_nothing_is_left()
    # Before there is a step of Ray, and again and again while it ends.
    job = slurm.submit(recipe)
    slurm.wait(job, lambda _: slurm.folders(job) != [])  # made after the traps are set
    signal = ("scancel", "--batch", "--signal=TERM", job)
    deadline = time.monotonic() + 120
    while slurm.nodes["node1"].run(*signal, environment=slurm.environment)[0] == 0:
        assert time.monotonic() < deadline, slurm.log(recipe).read_text()
        time.sleep(0.5)  # until it is over
    assert (slurm.wait(job, is_over), slurm.exit_code(job)) == ("FAILED 0", 3)
    slurm.wait_until_nothing_is_left()


def test_a_ray_that_cannot_start_ends_the_job_at_once(slurm, digits, tmp_path):
    recipe = constant_recipe("taken", digits, tmp_path, optim={"steps": 8})
    listen = "import socket, time; s = socket.create_server(('', 6379)); time.sleep(3600)"
    slurm.nodes["node1"].start(sys.executable, "-c", listen)
    try:
        job = slurm.submit(recipe)
        assert (slurm.wait(job, is_over), slurm.exit_code(job)) == ("FAILED 0", 1)
    finally:
        slurm.nodes["node1"].run("pkill", "-f", "create_server")
    assert "error: Ray could not be started" in slurm.log(recipe).read_text()
    slurm.wait_until_nothing_is_left()


def test_a_run_that_is_stopped_is_saved_and_not_queued_again(slurm, digits, tmp_path):
    recipe = slowed("stopped", digits, tmp_path)
    job = slurm.submit(recipe)
    slurm.wait(job, has_begun(recipe, slurm))
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    assert (slurm.wait(job, is_over), slurm.exit_code(job)) == ("FAILED 0", 3)
    (saved,) = checkpoint_steps(recipe)
    assert 0 < saved < STEPS
    slurm.log(recipe).unlink()
    job = slurm.submit(recipe)
    slurm.wait(job, has_begun(recipe, slurm))
    assert f"resumed: from step {saved}" in slurm.log(recipe).read_text()
    slurm.run("scancel", job)
    assert slurm.wait(job, is_over) == "CANCELLED 0"
    slurm.wait_until_nothing_is_left()
    assert checkpoint_steps(recipe) == [saved]


def test_after_a_node_has_gone_down_the_run_continues_on_another(slurm, digits, tmp_path):
    """The last test: node2 stays down."""
    recipe = slowed("lost", digits, tmp_path, every=20)
    job = slurm.submit(recipe)
    slurm.wait(job, lambda _: checkpoint_steps(recipe) != [])
    slurm.nodes["node2"].lose()
    slurm.wait(job, lambda state: state.endswith(" 1"))
    saved = checkpoint_steps(recipe)[-1]
    assert slurm.wait(job, is_over) == "COMPLETED 1", slurm.log(recipe).read_text()
    assert f"resumed: from step {saved}" in slurm.log(recipe).read_text()
    assert checkpoint_steps(recipe)[-1] == STEPS
