"""An agent that plays text games through any OpenAI-compatible server, and knows nothing of training."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from .episode import TextEpisode, read_integer
from .game import Outcome, TextGame

MODEL = "policy"  # agent-lightning's gateway sets the real name
MAX_TOKENS = 32  # per reply, as in the EMPO2 paper
MODEL_TIMEOUT_SECONDS = 300
MODEL_RETRIES = 3
EVENT_TIMEOUT_SECONDS = 30
EVENT_ATTEMPTS = 4
OUTGROWN = "; ended there because the chat outgrew the model's context"

Message = dict[str, str]
Model = Callable[[list[Message]], str]


class ContextOverflow(Exception):
    """The chat no longer fits into the model's context."""


@dataclass(frozen=True)
class Server:
    """Where the model is: an OpenAI address, its key ("" for none), the model's name, the tokens of a reply."""

    base_url: str
    key: str
    model: str
    max_tokens: int

    @classmethod
    def from_env(cls, environ: Mapping[str, str], variables: str) -> Self:
        return cls(
            environ["AGL_OPENAI_BASE_URL"],
            environ["AGL_KEY"],
            environ[f"{variables}_MODEL"],
            read_integer(environ, f"{variables}_MAX_TOKENS"),
        )


class TextAgent[Episode: TextEpisode]:
    """What agent-lightning's controller runs: one episode, one reward event.

    The task comes in the variables of the episode's `env_map`, the server in `AGL_OPENAI_BASE_URL`, `AGL_EVENT_URL`
    and `AGL_KEY`; the model's name and the tokens per reply may be set in `..._MODEL` and `..._MAX_TOKENS`, begun as
    the episode's variables are. Whatever goes wrong is raised and fails the rollout: a reward is posted only for an
    episode that was played.
    """

    episode: type[Episode]

    def run(self) -> None:
        variables = self.episode.variables
        defaults = {"AGL_KEY": "", f"{variables}_MODEL": MODEL, f"{variables}_MAX_TOKENS": str(MAX_TOKENS)}
        environ = {**defaults, **os.environ}
        episode = self.episode.from_env(environ)
        for variable in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"):
            if not environ.get(variable):
                raise ValueError(f"{variable} is not set: agent-lightning's controller sets it for every rollout")
        outcome = self.play(episode, Server.from_env(environ, variables))
        post_reward(environ["AGL_EVENT_URL"], environ["AGL_KEY"], outcome)

    def play(self, episode: Episode, server: Server) -> Outcome:
        raise NotImplementedError


def play_chat(game: TextGame, model: Model, show: Callable[[str], object] = lambda text: None) -> Outcome:
    """Play an episode that has begun, one action per reply. `show` is given every message of the chat as it comes.

    A chat that outgrows the model's context ends the episode with the score so far; any other error is raised.
    """

    def say(role: str, content: str) -> None:
        messages.append({"role": role, "content": content})
        show(f"[{role}] {content}")

    messages: list[Message] = []
    say("system", game.system)
    while not game.done:
        say("user", game.turn)
        try:
            reply = model(messages)
        except ContextOverflow:
            return game.outcome(OUTGROWN)
        say("assistant", reply)
        game.act(reply)
    return game.outcome()


def connect(server: Server) -> Model:
    """A function from a chat to the model's reply. It raises openai's errors once their retries are used up."""
    from openai import BadRequestError, OpenAI  # 1.8 s: not before the task has been checked

    # Without a key the header would be "Bearer ", which is no valid header.
    key = server.key or "none"
    client = OpenAI(base_url=server.base_url, api_key=key, timeout=MODEL_TIMEOUT_SECONDS, max_retries=MODEL_RETRIES)

    def reply(messages: list[Message]) -> str:
        try:
            answer = client.chat.completions.create(
                model=server.model,
                messages=messages,  # pyright: ignore[reportArgumentType] (plain dicts)
                max_tokens=server.max_tokens,
            )
        except BadRequestError as error:
            # The words of vLLM 0.20 and of OpenAI; neither sends a code that every server would.
            if "context length" in str(error):
                raise ContextOverflow(str(error)) from error
            raise
        return answer.choices[0].message.content or ""

    return reply


def post_reward(event_url: str, key: str, outcome: Outcome) -> None:
    """Post the rollout's reward event. Raises httpx.HTTPError when it is refused or cannot be delivered.

    After a broken connection it is sent again; should both arrive, agent-lightning counts the last, which is equal.
    """
    import httpx

    event = {
        "event_type": "reward",
        "data": {"value": outcome.score, "source": "agent", "message": outcome.message, "success": outcome.success},
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for attempt in range(1, EVENT_ATTEMPTS + 1):
        try:
            httpx.post(event_url, json=event, headers=headers, timeout=EVENT_TIMEOUT_SECONDS).raise_for_status()
            return
        except httpx.TransportError:
            if attempt == EVENT_ATTEMPTS:
                raise
            time.sleep(2**attempt / 4)
