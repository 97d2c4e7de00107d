"""Anthropic's Agent SDK on the current folder; runs where claude-agent-sdk is installed."""

import asyncio
import os
import sys

from claude_agent_sdk import ClaudeAgentOptions, query  # pyright: ignore[reportMissingImports]


async def main() -> None:
    options = ClaudeAgentOptions(permission_mode="bypassPermissions", model="policy", cwd=os.getcwd())
    async for message in query(prompt=sys.argv[1], options=options):
        print(message)


asyncio.run(main())
