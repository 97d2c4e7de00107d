"""The wheel in an environment that has neither verl nor vLLM, as `pip install` makes it beside another set-up."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
UV = str(Path(sys.executable).parent / "uv")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and what it depends on, at the versions of requirements/cpu.txt."""
    folder = tmp_path_factory.mktemp("wheel")
    lists = ["--constraint", "cpu.txt", "--overrides", "overrides.txt", "--excludes", "excludes-cpu.txt"]
    lists = [str(ROOT / "requirements" / name) if name.endswith("txt") else name for name in lists]
    of_python = ["--quiet", "--python"]
    for arguments in (
        ["build", "--wheel", "--no-build-isolation", "--out-dir", str(folder), *of_python, sys.executable, str(ROOT)],
        ["venv", *of_python, sys.executable, str(folder / "venv")],
        ["pip", "install", *of_python, str(folder / "venv"), *lists, "empo2", "--find-links", str(folder)],
    ):
        subprocess.run([UV, *arguments], check=True, env=os.environ | {"UV_LINK_MODE": "hardlink"})
    return folder / "venv" / "bin"


def run(program: Path, *arguments: str, folder: Path) -> tuple[int, str]:
    done = subprocess.run([str(program), *arguments], cwd=folder, capture_output=True, text=True, timeout=250)
    return done.returncode, done.stdout + done.stderr


def test_it_holds_all_files_of_the_packages_and_config_yaml(environment: Path) -> None:
    (wheel,) = environment.parents[1].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names, config = {*archive.namelist()}, archive.read("empo2/recipe/config.yaml")
    assert {name.split("/")[0] for name in names} == {"empo2", f"{wheel.name.rsplit('-', 3)[0]}.dist-info"}
    files = (path for name in ("recipe", "memory", "agents", "small_model") for path in (ROOT / name).rglob("*.*"))
    expected = {f"empo2/{path.relative_to(ROOT)}" for path in files if path.suffix not in (".md", ".pyc")}
    sums = {f"empo2/small_model/{folder}/SHA256SUMS" for folder in ("adapter", "adapter-deep")}
    assert {name for name in names if name.startswith("empo2/")} == {*expected, *sums}
    assert config == (ROOT / "config.yaml").read_bytes()


def test_the_command_line_needs_neither_verl_nor_vllm(environment: Path, tmp_path: Path) -> None:
    absent = "import importlib.util as util; assert not any(map(util.find_spec, ('verl', 'vllm', 'ray')))"
    assert run(environment / "python", "-c", absent, folder=tmp_path)[0] == 0
    empo2 = environment / "empo2"
    for name in ("quiz_agent.py", "questions.jsonl"):
        shutil.copy(ROOT / "examples" / "quiz" / name, tmp_path)
    agent = ["--agent", "quiz_agent:QuizAgent", "--tasks", "questions.jsonl"]
    agent += ["--env", "QUESTION=input.question", "--env", "ANSWER=input.answer"]
    code, said = run(empo2, "init", *agent, folder=tmp_path)
    assert (code, (tmp_path / "empo2.yaml").is_file()) == (0, True), said
    code, said = run(empo2, "train", "--profile", "cpu", folder=tmp_path)
    assert (code, said.count("\n")) == (2, 1), said
    assert "verl is not installed" in said
