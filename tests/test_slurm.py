"""examples/cluster/train.sbatch on a real Slurm: jobs that are warned, preempted, requeued, cancelled, or that fail."""

import re
from collections.abc import Iterator

import pytest

from .processes import until
from .slurm import ROOT, Node, slurm
from .stack import metrics_of

pytestmark = [pytest.mark.stack, pytest.mark.rare, pytest.mark.timeout(3600)]

SCRIPT = str(ROOT / "examples" / "cluster" / "train.sbatch")
STEPS = 2
SETTINGS = [
    "hardware.kv_cache=1",
    "run.validate_first=false",
    f"run.steps={STEPS}",
    "agent.concurrency=4",
    "agent.env={GAME_NUMBER: input.number, GAME_TROUBLE: never}",
    "memory.min_similarity=-1",
    "algorithm.success_return=40",
    "model.max_prompt_tokens=768",
    "model.max_episode_tokens=768",
]
PROFILE = ["--profile", "cpu"]
GONE = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "tasks.jsonl").write_text("".join(f'{{"number": "{number}"}}\n' for number in range(1, 9)))
    (folder / "settings.yaml").write_text(
        f"agent: {{class: 'stack_agent:GuessingAgent'}}\ntasks: {{source: {folder / 'tasks.jsonl'}}}\n"
    )
    with slurm(folder, 2) as nodes:
        yield nodes


class Job:
    """A job of the script, on nodes with a GPU of it each."""

    def __init__(self, nodes: list[Node], name: str, count: int, *words: str, options: tuple[str, ...] = ()) -> None:
        self.nodes, self.count = nodes, count
        self.folder = nodes[0].folder.parent
        self.run = self.folder / "runs" / name
        self.out = self.folder / f"{name}.out"
        asked = [f"--nodes={count}", "--gpus-per-node=1", "--cpus-per-task=3", f"--output={self.out}", *options]
        given = [str(self.folder / "settings.yaml"), str(self.run), *PROFILE, *SETTINGS, *words]
        self.id = nodes[0].run("sbatch", "--parsable", *asked, SCRIPT, *given).strip()

    def field(self, name: str) -> str:
        return self.shown()[name]

    def shown(self) -> dict[str, str]:
        said = self.nodes[0].run("scontrol", "--oneliner", "show", "job", self.id)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def wait(self, *states: str) -> dict[str, str]:
        until(lambda: self.field("JobState") in (*states, *GONE), 1500)
        shown = self.shown()
        assert shown["JobState"] in states, self.said()[-3000:]
        return shown

    def time_is_over(self) -> dict[str, str]:
        """Leave the job less than the 1,800 s of its --signal, until it is requeued."""
        self.nodes[0].run("scontrol", "update", f"JobId={self.id}", "TimeLimit=20")
        shown = self.wait("PENDING")
        self.nodes[0].run("scontrol", "update", f"JobId={self.id}", "TimeLimit=200")
        assert shown["Restarts"] == "1"
        return shown

    def until_said(self, text: str, times: int = 1) -> None:
        def there() -> bool:
            assert self.field("JobState") not in GONE, self.said()[-3000:]
            return self.said().count(text) >= times

        until(there, 1500)

    def left(self) -> list[str]:
        """Return files of the nodes' /tmp, and processes that are no daemons of the cluster."""
        files = [f"{node.label} {file.name}" for node in self.nodes for file in node.tmp.iterdir()]
        titles = [f"{node.label} {title}" for node in self.nodes for title in node.titles()]
        ours = re.compile(r"pytest-of-|munged|slurmctld|slurmscriptd|slurmd\b|slurmstepd|torchinductor_")
        return [each for each in files + titles if not ours.search(each)]


def clean(text: str) -> bool:
    """Return True for output without colours, other control characters, and stack dumps of Ray."""
    return not re.search(r"[\x00-\x08\x0b-\x1f\x7f]|SIGTERM received|Stack trace|Traceback|@ +0x", text)


def test_two_nodes_save_before_the_time_is_over_and_go_on(nodes: list[Node]) -> None:
    job = Job(nodes, "two", 2, "algorithm.memory_probability=1", "algorithm.off_policy_probability=0")
    job.until_said("first rollout")
    shown = job.time_is_over()
    saved = len(metrics_of(job.run))
    assert "SIGUSR1: the step is finished and a checkpoint saved" in job.said()
    assert job.wait("COMPLETED")["ExitCode"] == "0:0"
    assert f"resume after step {saved}" in job.said()
    steps = {line["step"]: line for line in metrics_of(job.run)}
    assert list(steps) == list(range(1, STEPS + 1))
    assert all(step["rollout_corr/log_ppl_abs_diff"] < 0.05 for step in steps.values())
    assert {path.name for path in (job.run / "nodes").iterdir()} >= {f"{job.id}.out"} | {
        f"{job.id}-n{n}.log" for n in (1, 2)
    }
    assert (job.run / "nodes" / f"{job.id}.out").resolve() == job.out
    assert (shown["JobName"], shown["Comment"]) == ("two", str(job.run))
    assert clean(job.said())
    assert not job.left()


def test_a_job_whose_start_fails_or_whose_node_dies_releases_its_allocation(nodes: list[Node]) -> None:
    """The first one has a setting that is refused; the second one waits for a GPU that there is not. Both at once."""
    refused = Job(nodes, "refused", 1, "agent.class=nowhere:Nothing")
    waiting = Job(nodes, "waiting", 2, "hardware.gpus_per_node=2")
    shown = refused.wait("FAILED")
    assert shown["ExitCode"] == "2:0" and "agent.class='nowhere:Nothing'" in refused.said()
    of_slurm = re.compile(r"waiting for nodes: 0 of 2 with 2 free GPUs \(free/all: 10.77.0.\d 1/1, 10.77.0.\d 1/1\)")
    until(lambda: of_slurm.search(waiting.said()), 300)
    waiting.time_is_over()  # before a step
    before = len(of_slurm.findall(waiting.said()))
    until(lambda: len(of_slurm.findall(waiting.said())) > before, 300)
    (raylet,) = [each for title, each in nodes[1].titles().items() if "/raylet/raylet " in title]
    raylet.kill()
    shown = waiting.wait("FAILED")
    assert shown["ExitCode"] == "1:0" and "Ray has ended on a node" in waiting.said()
    until(lambda: not waiting.left())
    assert nodes[0].run("squeue", "-h") == "" and clean(refused.said() + waiting.said())
    logs = {path.name for path in (waiting.run / "nodes" / f"{waiting.id}-n2-2").iterdir()}
    assert {"raylet.out", "raylet.err"} <= logs


def test_a_preempted_job_goes_on_and_scancel_leaves_nothing(nodes: list[Node]) -> None:
    job = Job(nodes, "preempted", 1)
    job.until_said("first rollout")
    urgent = "--partition=urgent --nodes=1 --gpus-per-node=2 --wrap=true --output=/dev/null"
    nodes[0].run("sbatch", *urgent.split(), f"--nodelist={job.field('NodeList')}")
    assert job.wait("PENDING")["Restarts"] == "1"
    saved = len(metrics_of(job.run))
    assert "SIGUSR1: the step is finished and a checkpoint saved" in job.said()
    job.until_said(f"resume after step {saved}")
    job.until_said("loading policy", times=2)
    nodes[0].run("scancel", job.id)
    assert job.wait("CANCELLED") and clean(job.said())
    until(lambda: not job.left())


def test_an_array_plays_seeds_beside_each_other_on_a_node(nodes: list[Node]) -> None:
    """Until both have their own Ray: two trainings have no room on a small machine."""
    outputs = [nodes[0].folder.parent / f"seed{number}.out" for number in (1, 2)]
    output = str(outputs[0]).replace("seed1", "seed%a")
    array = Job(nodes, "many", 1, options=("--array=1-2", "--nodelist=n1", f"--output={output}"))
    until(lambda: all(file.exists() and "loading verl" in file.read_text() for file in outputs), 600)
    assert sum("/raylet/raylet " in title for title in nodes[0].titles()) == 2
    nodes[0].run("scancel", array.id)
    until(lambda: not nodes[0].run("squeue", "-h"))
    for number, file in enumerate(outputs, 1):
        run = array.run.with_name(f"many-seed{number}")
        assert f"  seed: {number}\n" in (run / "config.yaml").read_text() and clean(file.read_text())
    until(lambda: not array.left())
