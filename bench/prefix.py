"""Measure the effect of tips on vLLM's prefix cache: the same episodes through `empo2 gateway` without and with tips.

Uses real vLLM on a CPU, with SmolLM2-135M. Each prompt of an episode extends the previous one, so vLLM computes only
the new turn, as long as earlier turns stay as they were sent, tips included. The prefix cache is emptied before each
pass.

  prompt tokens   of all calls (vllm:prefix_cache_queries)
  hits            those of them found in the cache (vllm:prefix_cache_hits)
  of reusable     hits divided by the tokens of the previous turn's prompt; below 1, since vLLM rounds down to blocks
  prefill tokens  the rest of the prompt tokens, which vLLM had to compute
  reflections     the requests for a tip when the episodes have ended, each the whole episode and one question
"""

import argparse
import asyncio
import random
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx
from shared import HEADERS, SCOPE, Goal, empo2_gateway, empty_table, filled_memory, report, say, turns, vllm

from empo2.recipe.files.models import SMOLLM2, resolve_model

TIPS = 500
_CALL_SECONDS = 600
_TOKENS = 8192  # SmolLM2's context
_REPLY_TOKENS = 8
_GOAL = "share of hits at least 0.95 of that without tips"


@dataclass(frozen=True)
class Counts:
    """Tokens that vLLM looked up in its prefix cache, and tokens that it found there."""

    queries: float
    hits: float

    def __sub__(self, before: "Counts") -> "Counts":
        return Counts(self.queries - before.queries, self.hits - before.hits)

    @property
    def share(self) -> float:
        return self.hits / self.queries

    @property
    def prefill(self) -> float:
        return self.queries - self.hits


@dataclass(frozen=True)
class Pass:
    """Tips shown in each turn; tokens shared with the previous turn; vLLM's counts for calls and reflections."""

    tips: float
    reusable: int
    calls: Counts
    reflections: Counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2 episodes of 3 turns")
    parser.add_argument("--episodes", type=int, default=16, metavar="N", help="episodes (default: 16)")
    parser.add_argument("--turns", type=int, default=10, metavar="N", help="model calls of an episode (default: 10)")
    parser.add_argument("--agents", type=int, default=4, metavar="N", help="concurrent episodes (default: 4)")
    parser.add_argument(
        "--top-k", type=int, default=10, metavar="N", help="tips shown at most at each turn (default: 10)"
    )
    options = parser.parse_args()
    if options.quick:
        options.episodes, options.turns = 2, 3
    with tempfile.TemporaryDirectory() as folder:
        passes = asyncio.run(compare(Path(folder), options))
    columns = ("tips a turn", "prompt tokens", "hits", "of reusable", "share of hits", "with / without")
    columns += ("prefill tokens", "with / without")
    title = f"{options.episodes} episodes of {options.turns} turns, at most {options.top_k} tips a turn"
    table = empty_table(title, ["requests"], columns)
    without, with_tips = passes
    for kind in "calls", "reflections":
        for name, played in ("without tips", without), ("with tips", with_tips):
            counts, plain = getattr(played, kind), getattr(without, kind)
            table.add_row(
                f"{kind} {name}",
                f"{played.tips:.1f}" if kind == "calls" else "",
                f"{counts.queries:,.0f}",
                f"{counts.hits:,.0f}",
                f"{counts.hits / played.reusable:.3f}" if kind == "calls" else "",
                f"{counts.share:.3f}",
                f"{counts.share / plain.share:.3f}",
                f"{counts.prefill:,.0f}",
                f"{counts.prefill / plain.prefill:.2f}",
            )
    ratio = with_tips.calls.share / without.calls.share
    report(table, [Goal(_GOAL, f"{ratio:.3f}", ratio >= 0.95)])


async def compare(folder: Path, options: argparse.Namespace) -> list[Pass]:
    """Run the pass without tips and the pass with tips."""
    memory = filled_memory(folder, TIPS)
    model = str(resolve_model(SMOLLM2))
    own = [f"model.max_context_tokens={_TOKENS}", f"hardware.max_sequences={options.agents}"]
    # Only the development mode has the route that empties the prefix cache.
    # The cache holds all episodes in float32, too: the reflections begin when the last of them has ended.
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    settings = [f"memory.capacity={2 * TIPS}", f"memory.top_k={options.top_k}", "reflection.max_tokens=48"]
    passes = []
    with (
        vllm(folder, model, *own, **variables) as url,
        empo2_gateway(folder, memory, *settings) as (gateway, _),
    ):
        async with httpx.AsyncClient(headers=HEADERS, timeout=_CALL_SECONDS) as client:
            register = [{"model": model, "endpoint": f"{url}/v1"}]
            (await client.post(f"{gateway}/api/models", json=register)).raise_for_status()
            for name, mode in ("without tips", "no-memory"), ("with tips", "memory"):
                say(f"episodes {name}")
                (await client.post(f"{url}/reset_prefix_cache")).raise_for_status()
                begin = await _counts(client, url)
                rollouts, reusable = zip(*await _play_all(client, gateway, mode, options), strict=True)
                played = await _counts(client, url)
                for rollout in rollouts:
                    await _finish(client, gateway, rollout)
                drained = await client.post(f"{gateway}/empo2/drain", json={"timeout": _CALL_SECONDS})
                end = await _counts(client, url)
                metrics = drained.raise_for_status().json()
                if metrics["empo2/memory_failures"] or metrics["empo2/reflections_failed"]:
                    raise RuntimeError(f"the memory failed, so this is no measurement: {metrics}")
                tips = metrics["empo2/tips_injected_per_call"]
                passes.append(Pass(tips, sum(reusable), played - begin, end - played))
    return passes


async def _play_all(
    client: httpx.AsyncClient, gateway: str, mode: str, options: argparse.Namespace
) -> list[tuple[str, int]]:
    """Play the same episodes in either mode, without ending them; return each rollout's id and its reusable tokens."""
    places = asyncio.Semaphore(options.agents)

    async def play(number: int) -> tuple[str, int]:
        tag = {"rollout_mode": mode, "update_mode": "on-policy", "scope": SCOPE}
        created = await client.post(f"{gateway}/api/rollouts", json=[{"input": {}, "metadata": {"empo2": tag}}])
        rollout = created.raise_for_status().json()[0]["rollout_id"]
        messages = [{"role": "system", "content": "You act in a small text world. Reply with one action."}]
        path = f"{gateway}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1/chat/completions"
        tokens = [0]
        async with places:
            for text in turns(random.Random(number), options.turns):
                messages.append({"role": "user", "content": text})
                body = {"model": "policy", "messages": messages, "max_tokens": _REPLY_TOKENS}
                answer = await client.post(path, json=body)
                reply = answer.raise_for_status().json()
                messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
                tokens.append(reply["usage"]["total_tokens"])
        return rollout, sum(tokens[:-1])

    return await asyncio.gather(*(play(number) for number in range(options.episodes)))


async def _finish(client: httpx.AsyncClient, gateway: str, rollout: str) -> None:
    """Post an episode's reward and end it, so that the gateway asks for its tip."""
    url = f"{gateway}/api/rollouts/{rollout}"
    event = {"event_type": "reward", "data": {"value": 0.0}}
    (await client.post(f"{url}/attempt/0/events", json=event)).raise_for_status()
    for state in "running", "succeeded":
        (await client.patch(url, json={"status": {"state": state}})).raise_for_status()


async def _counts(client: httpx.AsyncClient, url: str) -> Counts:
    text = (await client.get(f"{url}/metrics")).raise_for_status().text
    queries, hits = (
        sum(map(float, re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*\}} (\S+)$", text, re.MULTILINE)))
        for name in ("queries", "hits")
    )
    return Counts(queries, hits)


if __name__ == "__main__":
    main()
