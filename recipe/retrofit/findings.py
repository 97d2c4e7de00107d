"""Explain what a recorded episode means for training."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from empo2.recipe.config import Settings
from empo2.recipe.failures import LIBRARY, TRACEBACK, reported_error, without_ignored
from empo2.recipe.gateway.tokens.sampling import overridden
from empo2.recipe.messages import added_blocks, has_images, is_compaction, newest_turn
from empo2.recipe.protocol import MODEL_EVENT, REWARD_EVENT, data_of
from empo2.recipe.retrofit.recorder import Call, Trace
from empo2.recipe.retrofit.rows import AGAIN, Told

_PROXIED = ("chat/completions", "completions")
_DIALECTS = ("responses", "messages")


@dataclass(frozen=True)
class Finding:
    """One thing to tell the user."""

    # ``wrong`` if it prevents training, ``note`` if the user should know it, else ``ok``.
    level: Literal["ok", "note", "wrong"]
    text: str


def examine(trace: Trace, told: Sequence[Told], settings: Settings, time_limit: float) -> list[Finding]:
    """Return all findings about an episode, the wrong ones first, the cause of the others before them.

    Args:
        told: what training makes of each of its calls.
        time_limit: seconds that the agent was given.
    """
    every = zip(trace.calls, told, strict=True)
    played = [pair for pair in every if pair[0].path in _PROXIED and pair[0].status == 200 and pair[0].trained]
    main = [call for call, told in played if not told.beside]
    rewards = [data.get("value") for data in data_of(trace.events, REWARD_EVENT)]
    did_without = bool(main and rewards and trace.exit_code == 0)
    algorithm = settings.algorithm
    found = [
        *_refused(trace.calls, "note" if did_without else "wrong"),
        *_elsewhere(trace),
        *_ending(trace, time_limit),
        *_calls(trace, main, [told for _, told in played], settings),
        *_reward(trace, rewards, (algorithm.failure_return, algorithm.success_return)),
    ]
    order = ("wrong", "ok", "note")
    return sorted(found, key=lambda finding: order.index(finding.level))


def _calls(trace: Trace, main: list[Call], told: list[Told], settings: Settings) -> Iterator[Finding]:
    if not trace.calls and trace.exit_code == 0:
        cache = "a cache of replies must be empty, for DSPy by DSPY_CACHEDIR={EMPO2_REWARD_FILE}.cache before the line"
        yield Finding("wrong", f"no model call came: {_ADDRESS}; {cache}")
    elif trace.exit_code == 0 and not any(call.status for call in trace.calls):
        yield Finding("wrong", "the agent gave up on every model call before it was answered: give it more time")
    elif trace.exit_code is not None and (left := sum(not call.status for call in trace.calls)):
        why = "answers of a training may take minutes: raise its time-out"
        yield Finding("note", f"{_count(left, 'call')} given up by the agent before the answer came: {why}")
    elif not main and any(not call.trained for call in trace.calls):
        yield Finding("wrong", "no call is trained: gateway.trained_calls leaves out all that the agent makes")
    if main:
        yield from _rows(main, told)
        yield from _uses(main)
    if beside := sum(each.beside for each in told):
        stand = "stands" if beside == 1 else "stand"
        why = "one turn without tools, of an agent that offers some, such as for a title"
        yield Finding("ok", f"{_count(beside, 'call')} {stand} beside the main chat, and not trained: {why}")
    others = [call for call in trace.calls if not call.trained]
    if made_up := sum(call.asked == "embeddings" and settings.gateway.other_server is None for call in others):
        got = "status 400" if settings.gateway.trained_calls else "made-up vectors here, in training status 400"
        why = f"went to /embeddings, which the policy does not have: it got {got}"
        yield Finding("note", f"{_count(made_up, 'call')} {why}; name a server that embeds with gateway.other_server")
        others = [call for call in others if call.asked != "embeddings"]
    if others:
        paths = ", ".join(sorted({f"/{call.asked}" for call in others}))
        passes, is_ = ("passes", "is") if len(others) == 1 else ("pass", "are")
        answered = f"{is_} answered by the policy, but {is_} not trained"
        passed = f"{passes} to gateway.other_server, and {is_} not trained"
        where = answered if settings.gateway.other_server is None else passed
        yield Finding("ok", f"{_count(len(others), 'call')} {where}: {paths}")


def _rows(calls: list[Call], told: list[Told]) -> Iterator[Finding]:
    if again := sum(each.why == AGAIN for each in told):
        yield Finding("note", f"{_count(again, 'call')}: each {AGAIN}")
    rows = max((each.row for each in told if each.row), default=0)
    calls_made = _count(len(calls), "model call") + _manner(calls)
    if rows < 2:
        whole = ", each with the whole chat so far" if len(calls) - again > 1 else ""
        yield Finding("ok", f"{calls_made}{whole}: the episode is one training row")
        return
    why = "a call that does not begin with an earlier chat and the model's reply, unchanged, opens another one"
    yield Finding("note", f"{calls_made}, in {rows} training rows: {why} (--calls shows which)")
    reasons = [each.why for each in told if each.row and each.why]
    for kind, times in Counter(reason.partition(":")[0] for reason in reasons).most_common():
        first = next(reason for reason in reasons if reason.startswith(kind))
        yield Finding("note", first if times == 1 else f"{first} ({times} times)")


def _manner(calls: list[Call]) -> str:
    """Return how the calls were made, where that is not the usual way."""
    paths = sorted({f"/{call.asked}" for call in calls if call.asked in _DIALECTS})
    streamed = sum(call.streamed for call in calls)
    where = f" to {' and '.join(paths)}" if paths else ""
    return where + (", streamed" if streamed == len(calls) else f", {streamed} of them streamed" if streamed else "")


def offered_tools(calls: Iterable[Call]) -> set[str]:
    """Return the names of the tools that the calls offer to the model; those of a refused call may be malformed."""
    answered = (call.body for call in calls if call.status == 200 and "messages" in call.body)
    tools = (tool for body in answered for tool in body.get("tools") or [])
    return {tool["function"]["name"] for tool in tools}


def image_calls(calls: Iterable[Call]) -> str:
    """Return how many calls have images, and what to do; "" for none."""
    if not (count := sum(any(map(has_images, call.body.get("messages") or [])) for call in calls if call.trained)):
        return ""
    fix = "send text, or leave these calls to gateway.other_server (gateway.trained_calls)"
    return f"{_count(count, 'call')} with images, which are not trained: {fix}"


def _uses(calls: list[Call]) -> Iterator[Finding]:
    if tools := offered_tools(calls):
        yield Finding("ok", f"tools are offered: {', '.join(sorted(tools))}")
    names = sorted({str(call.body["model"]) for call in calls if call.body.get("model")})
    if len(names) > 1:
        named = f"calls name the models {', '.join(names)}, and all are trained"
        yield Finding("note", f"{named}: gateway.trained_calls can choose, such as [{{model: {names[0]}}}]")
    if most := max((call.body.get("n") or 1) for call in calls) - 1:
        yield Finding("note", f"n={most + 1} choices are asked for: only the first of each call is trained")
    if without := sum(not {"max_tokens", "max_completion_tokens"} & call.body.keys() for call in calls):
        yield Finding("note", f"{_count(without, 'call')} set no max_tokens: one reply may fill the model's context")
    if any(call.body.get("seed") is not None for call in calls):
        yield Finding("note", "a seed is sent: it is left out in training, where it would make all rollouts the same")
    if options := sorted({option for call in calls for option in overridden(call.body)} - {"seed"}):
        are = "is" if len(options) == 1 else "are"
        why = "as is temperature: the policy is trained on what it samples itself (model.temperature)"
        yield Finding("note", f"{', '.join(options)} {are} left out in training, {why}")
    if images := image_calls(calls):
        yield Finding("wrong", images)
    if closed := sum("messages" in call.body and newest_turn(call.body["messages"]) is None for call in calls):
        why = "no message of the user or a tool comes after the model's last reply"
        yield Finding("note", f"{_count(closed, 'call')} cannot be shown tips: {why}")
    yield from _form(calls)


def _form(calls: list[Call]) -> Iterator[Finding]:
    """Yield what the normal form makes of the calls."""
    if lines := sorted({line for call in calls for line in call.left_out}):
        why = "they may change from call to call, and tasks share what stands before a prompt"
        yield Finding("note", f"lines before the system message are left out of prompts: {', '.join(lines)}; {why}")
    if blocks := sorted({name for call in calls for name in added_blocks(call.body.get("messages") or [])}):
        yield Finding("ok", f"blocks are left out of states, and stand before tips: {', '.join(blocks)}")
    if lists := sum(isinstance(call.body.get("prompt"), list) for call in calls):
        fix = "send one text in each call"
        yield Finding(
            "note", f"{_count(lists, 'prompt')} of token ids or of several texts: without tips and visits; {fix}"
        )
    with_tools = bool(offered_tools(calls))
    if own := sum(is_compaction(call.body, with_tools=with_tools) for call in calls):
        yield Finding(
            "ok", f"{_count(own, 'call')} to summarize the agent's own chat, trained as gateway.compaction says"
        )


def _reward(trace: Trace, rewards: Sequence[Any], returns: tuple[float, float]) -> Iterator[Finding]:
    for status, answer in trace.refused_events:
        level = "note" if rewards else "wrong"
        yield Finding(level, f"an event was refused with status {status}: {answer[:200]}; {_HOW_TO}")
    if not rewards:
        others = {event["event_type"] for event in trace.events} - {REWARD_EVENT, MODEL_EVENT}
        seen = f", only events of type {', '.join(sorted(others))}" if others else ""
        if trace.exit_code == 0:
            yield Finding("wrong", f"no reward was reported{seen}: {_HOW_TO}")
        return
    value = rewards[-1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        yield Finding("wrong", f"the reward is {value!r}: must be a finite number; {_HOW_TO}")
        return
    if len(rewards) > 1:
        yield Finding("note", f"{len(rewards)} rewards were reported: only the last one counts, {value}")
    else:
        yield Finding("ok", f"the reward was reported: {value}")
    if not returns[0] <= value <= returns[1]:
        of = f"algorithm.failure_return={returns[0]:g} to success_return={returns[1]:g}"
        yield Finding("note", f"the reward {value} lies outside of {of}: give --rewards WORST BEST")


_HOW_TO = (
    'post {"event_type": "reward", "data": {"value": 1.0}} to AGL_EVENT_URL with AGL_KEY as the bearer token (a '
    "command may write the number to the file that EMPO2_REWARD_FILE names)"
)


_ADDRESS = (
    "the agent must take the model's address from AGL_OPENAI_BASE_URL and its key from AGL_KEY (a command also from "
    "OPENAI_BASE_URL and OPENAI_API_KEY)"
)
# What clients write that reached no server, or one that refused their key; and where they stand while they wait.
_UNREACHED = re.compile(
    r"API_?Connection_?Error|Connect(ion)?Error|connection (refused|error)|ECONNREFUSED|\bENOTFOUND|EAI_AGAIN|"
    r"getaddrinfo|name resolution|Name or service|fetch failed|Max retries exceeded|AuthenticationError|"
    r"(OPENAI|ANTHROPIC)_API_KEY|(incorrect|invalid)[ _]api[ _]key",
    re.IGNORECASE,
)
_CLIENT = re.compile(r"-packages/(openai|anthropic|litellm|httpx|requests|urllib3)/")
_PLACE = re.compile(r"\b(?:api\.[\w-]+\.[\w.-]*\w|localhost|127\.0\.0\.1)(?::\d+)?")
_FRAME = re.compile(r'^ *File "([^"\n]+)", line (\d+), in .*\n +(.+)$', re.MULTILINE)
_IMPORT = re.compile(r"(?:import|from) \w")


def _elsewhere(trace: Trace) -> Iterator[Finding]:
    """Find an agent that calls another address, or with no key, by what it wrote: before what it made of that."""
    if trace.calls or trace.exit_code == 0 or ((at := _stood(trace.output)) and _IMPORT.match(at[1])):
        return
    error = reported_error(trace.events)
    output = f"{trace.output}\n{error or ''}"
    if not _UNREACHED.search(output) and not (trace.exit_code is None and _CLIENT.search(output)):
        return
    places = [place for place in _PLACE.findall(output) if place not in trace.address]
    where = f" to {places[0]}" if places else ""
    told = f"what the agent wrote tells of a connection{where} or a key that failed"
    yield Finding("wrong", f"no model call came, and {told}: {_ADDRESS}")


def _stood(output: str) -> tuple[str, str] | None:
    """Return where the agent's own code was when it was interrupted, and the line there; the first import under way.

    None if it did not write it.
    """
    begin, interrupted, _ = output.rpartition("\nKeyboardInterrupt")
    frames = [*_FRAME.finditer(begin, max(0, begin.rfind(TRACEBACK)))] if interrupted else []
    own = [frame for frame in frames if not LIBRARY.search(frame[1])] or frames
    if not own:
        return None
    at = next((frame for frame in own if _IMPORT.match(frame[3])), own[-1])
    return f"{Path(at[1]).name}:{at[2]}", at[3]


def _ending(trace: Trace, time_limit: float) -> Iterator[Finding]:
    if trace.exit_code is None:
        at, more = _stood(trace.output), "--time-limit gives more time"
        calls = f"after {_count(len(trace.calls), 'model call')}" if trace.calls else "before any model call"
        if at and not trace.calls and _IMPORT.match(at[1]):
            killed = f"was killed after {time_limit:g} s while it was still importing: {at[1]} ({at[0]})"
            yield Finding("wrong", f"the agent {killed}; {more}")
            return
        where = f", at {at[0]}: {at[1]}" if at else ""
        fix = f"--reply gives a reply that it waits for, {more}" if trace.calls else more
        yield Finding("wrong", f"the agent did not end within {time_limit:g} s, and was killed {calls}{where}; {fix}")
    elif trace.exit_code:
        yield Finding("wrong", f"the agent failed: {_cause(trace)}")
        if trace.scripted and any(call.status == 200 for call in trace.calls):
            others = "--reply gives another, --server and --model those of a real model"
            yield Finding("note", f"a script replied: if the agent could not read a reply, {others}")


def _cause(trace: Trace) -> str:
    """Return the exception that the agent's process reported, with a hint if there is one; else its last line."""
    error = reported_error(trace.events)
    if error is None:
        lines = without_ignored(trace.output).strip().splitlines()
        return lines[-1] if lines else f"exit code {trace.exit_code}"
    if error.type == "KeyError" and (variable := re.fullmatch(r"'([A-Z_][A-Z0-9_]*)'", error.message)):
        return f"{error}; if it is a variable of the environment: --env {variable[1]}=input.FIELD, or a literal"
    if error.type in ("ModuleNotFoundError", "ImportError"):
        return f"{error}; name the Python that has it, as in --command '/its/.venv/bin/python play.py'"
    return str(error)


def _refused(calls: list[Call], level: Literal["note", "wrong"]) -> Iterator[Finding]:
    refused = Counter(_why(call) for call in calls if call.status != 200 and call.status != 0)
    for reason, times in refused.items():
        yield Finding(level, f"{_count(times, 'call')} {reason}")


def _why(call: Call) -> str:
    if call.status == 401:
        return "came without the key, or with another one: send AGL_KEY (OPENAI_API_KEY for a command) as the API key"
    if call.path == "embeddings" and call.status == 400:
        return "went to /embeddings, which the policy does not have: name a server that does with gateway.other_server"
    if call.path not in (*_PROXIED, "embeddings") and call.asked not in _DIALECTS:
        served = ", ".join(f"/{path}" for path in (*_PROXIED, *_DIALECTS))
        return f"went to /{call.path}, answered {call.status}: the gateway has {served}"
    return f"to {call.path} was answered {call.status}: {json.dumps(call.answer)[:200]}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
