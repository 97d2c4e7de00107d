"""Harbor's Terminus 2 on the current folder, without a container; runs where harbor is installed, and needs tmux."""

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from harbor.agents.terminus_2 import Terminus2  # pyright: ignore[reportMissingImports]
from harbor.environments.base import ExecResult  # pyright: ignore[reportMissingImports]
from harbor.models.agent.context import AgentContext  # pyright: ignore[reportMissingImports]


async def execute(command: str, cwd: str | None = None, env: dict | None = None, **_: object) -> ExecResult:
    """What Harbor's environments do in their containers."""
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", command, cwd=cwd, env=os.environ | (env or {}), stdout=-1, stderr=-1
    )
    out, err = await process.communicate()
    return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode or 0)


async def main(folder: Path) -> None:
    agent = Terminus2(
        logs_dir=folder,
        model_name="openai/policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        model_info={
            "max_input_tokens": int(os.environ["CONTEXT_TOKENS"]),
            "max_output_tokens": int(os.environ["REPLY_TOKENS"]),
        },
        record_terminal_session=False,
    )
    here = SimpleNamespace(
        exec=execute, default_user=None, trial_paths=SimpleNamespace(agent_dir=folder), session_id="1"
    )
    await agent.setup(here)
    await agent.run(sys.argv[1], here, AgentContext())


with tempfile.TemporaryDirectory() as scratch:
    asyncio.run(main(Path(scratch)))
