"""agent-lightning's example calc_x: autogen with a calculator from an MCP server."""

import asyncio
import os
import re

import httpx
from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.mcp import McpWorkbench, StdioServerParams


class Agent:
    async def run(self) -> None:
        calculator = StdioServerParams(command="python", args=["-m", "mcp_server_calculator"], read_timeout_seconds=120)
        async with McpWorkbench(calculator) as workbench:
            client = OpenAIChatCompletionClient(
                model="auto",
                base_url=os.environ["AGL_OPENAI_BASE_URL"],
                api_key=os.environ["AGL_KEY"],
                model_info={
                    "vision": False,
                    "function_calling": True,
                    "json_output": False,
                    "family": ModelFamily.UNKNOWN,
                    "structured_output": False,
                },
                max_retries=6,
            )
            agent = AssistantAgent("calc", client, workbench=workbench, reflect_on_tool_use=True)
            task = f"{os.environ['QUESTION']} End with the answer between sharps: ### ANSWER: 42 ###"
            result = await asyncio.wait_for(agent.run(task=task), timeout=300.0)
        said = str(result.messages[-1].content)  # pyright: ignore[reportAttributeAccessIssue]
        found = re.search(r"###\s*ANSWER:\s*(.+?)\s*###", said)
        right = (found[1] if found else said.strip()) == os.environ["RESULT"]
        httpx.post(
            os.environ["AGL_EVENT_URL"],
            json={"event_type": "reward", "data": {"value": float(right)}},
            headers={"Authorization": f"Bearer {os.environ['AGL_KEY']}"},
            timeout=10.0,
        ).raise_for_status()


if __name__ == "__main__":
    asyncio.run(Agent().run())
