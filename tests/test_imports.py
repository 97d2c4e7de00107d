"""Who may know whom, read from the source; and what the gateway and the command line must not wait for."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("agents", "memory", "recipe")

# From the ground up: a module imports from its own room and from floors below it, never sideways or up. A room is a
# folder or a module of recipe/. `baselines` knows its papers by name alone; their folders stand higher.
FLOORS = (
    {"json_text"},
    {"errors", "interruption", "marked_lines", "printed", "messages", "preemption", "redaction"},
    {"baselines", "rollout_log", "run_folder", "tip_block", "waiting"},
    {"config"},
    {"network", "protocol", "scopes"},
    {"failures", "gateway_client"},
    {"engine"},
    {"gateway", "trainer", "controller"},
    {"a paper of baselines"},
    {"files"},
    {"retrofit"},
    {"preflight"},
    {"launcher"},
    {"evaluation"},
    {"cli"},
    {"__init__"},  # the package's front door leads to the trainer
)

# The same within the gateway: what calls and episodes need stands below the stages of a request.
GATEWAY_FLOORS = (
    {"connections", "continued", "garbage", "logs", "request", "server_client", "told_apart", "trace_names"},
    {"span_sender", "upstream"},
    {"dialects", "gate", "memory", "metrics", "normal_form", "tips"},
    {"tokens", "traces"},
    {"services"},
    {"episodes"},
    {"stages", "routes"},
    {"pipeline"},
    {"app"},
)

# All that may name verl, agentlightning.verl or vLLM. The rest, the gateway's side, must start without them.
TRAINER_SIDE = {
    "trainer": {"entrypoint", "manager", "objective", "passes", "play", "replay", "rollout_calls", "rows"}
    | {"shown_rollouts", "step", "step_results", "tracking", "trainer", "updates"},
    "trainer/compat": {"agentlightning", "imports", "trained_logits", "verl"},
    "engine": {"cpu_worker", "prompt_ids"},
}


def modules(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Absolute names of all that a module imports, within its functions too; ``a.b`` for ``from a import b``."""
    package = ["empo2", *path.relative_to(ROOT).with_suffix("").parts][:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


FOREIGN = {
    "agents": ("empo2.memory", "empo2.recipe", "empo2.small_model", "agentlightning", "verl", "torch", "vllm"),
    "memory": ("empo2.recipe", "empo2.agents", "empo2.small_model", "agentlightning", "verl", "vllm", "ray"),
}


@pytest.mark.parametrize("room", FOREIGN)
def test_agents_and_memory_know_neither_recipe_nor_trainer(room: str) -> None:
    for path in modules(room):
        assert not [name for name in imports(path) if within(name, *FOREIGN[room])], path


def room_of(parts: Sequence[str]) -> str:
    """Return the room of a module of recipe/, given by its path below it."""
    if parts[0] == "baselines" and len(parts) > 1 and (ROOT / "recipe/baselines" / parts[1]).is_dir():
        return "a paper of baselines"
    return parts[0]


@pytest.mark.parametrize(("folder", "floors"), [("recipe", FLOORS), ("recipe/gateway", GATEWAY_FLOORS)])
def test_rooms_import_downwards(folder: str, floors: Sequence[set[str]]) -> None:
    package = f"empo2.{folder.replace('/', '.')}."
    floor = {room: number for number, rooms in enumerate(floors) for room in rooms}
    wrong, rooms = [], set()
    for path in modules(folder):
        room = room_of(path.relative_to(ROOT / folder).with_suffix("").parts)
        if folder == "recipe/gateway" and room == "__init__":
            continue
        rooms.add(room)
        inside = {room_of(name.removeprefix(package).split(".")) for name in imports(path) if name.startswith(package)}
        others = inside - {room, "__version__"}
        wrong += [f"{path.relative_to(ROOT)} -> {other}" for other in others if floor[other] >= floor[room]]
    assert not wrong
    assert rooms == floor.keys(), "a room has no floor, or a floor has no room"


def test_the_small_model_is_known_to_the_command_line_alone() -> None:
    for path in modules("recipe"):
        knows = [name for name in imports(path) if within(name, "empo2.small_model")]
        assert not knows or path.is_relative_to(ROOT / "recipe/cli"), path


def test_a_paper_is_imported_by_its_own_folder_alone() -> None:
    """All others reach it through recipe/baselines/__init__.py, which knows it by name."""
    hooks = "empo2.recipe.baselines"
    papers = {path.parent.name for path in (ROOT / "recipe/baselines").glob("*/__init__.py")}
    assert papers
    for path in modules("recipe"):
        own = path.parent.name if path.parent.parent.name == "baselines" else ""
        reached = {name.removeprefix(f"{hooks}.").partition(".")[0] for name in imports(path) if within(name, hooks)}
        assert papers & reached <= {own}, path
    registry = ROOT / "recipe/baselines/__init__.py"
    assert [name for name in imports(registry) if within(name, "empo2")] == ["empo2.recipe.errors.ConfigError"]


def test_who_imports_verl() -> None:
    knowing = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in modules(room)
        if any(within(name, "verl", "agentlightning.verl", "vllm") for name in imports(path))
    }
    assert knowing == {f"recipe/{room}/{name}.py" for room, names in TRAINER_SIDE.items() for name in names}


@pytest.mark.parametrize("folder", ["bench", "experiments", "gpu_proof"])
def test_what_measures_and_proves_does_without_the_tests(folder: str) -> None:
    tests = {"tests", *(path.stem for path in modules("tests"))}
    for path in modules(folder):
        assert not tests & {name.partition(".")[0] for name in imports(path)}, path


def test_light_modules_stay_light() -> None:
    """verl takes 20 seconds to import, torch six: the gateway and the command line do without. Traces are off here."""
    code = """
import sys
heavies = ("verl", "vllm", "torch", "ray", "transformers", "opentelemetry.sdk")
papers = ("go_explore.starts", "memp.procedures", "memrl.retrieval", "reflexion.retrieval", "rememberer.records")
papers += ("retrospex.reranking", "rnd.novelty", "self_rag.relevance")
names = ("empo2.recipe", "empo2.recipe.cli.verbs", "empo2.recipe.gateway.app", "empo2.recipe.launcher.launch")
for name in (*names, *(f"empo2.recipe.baselines.{paper}" for paper in papers)):
    __import__(name)
    print(name, [heavy for heavy in heavies if heavy in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert {line.split(" ", 1)[1] for line in done.stdout.splitlines()} == {"[]"}, done.stdout
