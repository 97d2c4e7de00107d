"""An agent that plays text games through any OpenAI-compatible server, without any code for training."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, Self

from ..rollout import MODEL, Rollout
from .episode import ChatEpisode, read_integer
from .game import Outcome, TextGame

MAX_TOKENS = 32  # per reply, as in the EMPO2 paper
MODEL_TIMEOUT_SECONDS = 300
MODEL_RETRIES = 3
# In the messages of OpenAI and of vLLM 0.20; the last one is of a prompt that is just as long as the context.
_TOO_LONG = ("context length", "maximum model length", "max_tokens must be at least 1, got 0")
OUTGROWN = "; ended there because the chat outgrew the model's context"

Message = dict[str, str]
Model = Callable[[list[Message]], str]


class ContextOverflow(Exception):
    """The chat no longer fits into the model's context."""


def is_too_long(error: Exception) -> bool:
    """Return whether a server refused a chat that outgrew the context; there is no error code that all servers send."""
    return any(words in str(error) for words in _TOO_LONG)


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server: its key ("" for none), the model's name, the most tokens of a reply."""

    base_url: str
    key: str
    model: str
    max_tokens: int

    @classmethod
    def of(cls, rollout: Rollout, environ: Mapping[str, str], variables: str) -> Self:
        """Return the server of a rollout. `variables`_MODEL and `variables`_MAX_TOKENS set model name and limit."""
        max_tokens = f"{variables}_MAX_TOKENS"
        return cls(
            rollout.base_url,
            rollout.key,
            environ.get(f"{variables}_MODEL", MODEL),
            read_integer(environ, max_tokens) if max_tokens in environ else MAX_TOKENS,
        )


class TextAgent[Episode: ChatEpisode]:
    """Play one episode and post one reward event; agent-lightning's controller runs this class.

    The task comes in the variables of the episode's `env_map`, the model's address in agent-lightning's `AGL_*`
    variables; EPISODE_PREFIX may have actions that come before (`prefix_of`); ..._MODEL and ..._MAX_TOKENS, which begin
    as the episode's variables do, may set the model's name and the tokens per reply. Every error is raised and fails
    the rollout: a reward is posted only for an episode that was played.
    """

    episode: type[Episode]

    def run(self) -> None:
        episode = self.episode.from_env(os.environ)
        rollout = Rollout.from_env(os.environ)
        outcome = self.play(episode, Server.of(rollout, os.environ, self.episode.variables))
        rollout.report(outcome.score, message=outcome.message, success=outcome.success, **outcome.data)

    def play(self, episode: Episode, server: Server) -> Outcome:
        raise NotImplementedError


def prefix_of(environ: Mapping[str, str]) -> list[str]:
    """Return the actions in EPISODE_PREFIX, a list in JSON, after which an episode starts; "" is a lost step.

    Worlds are deterministic, so these actions lead where they once led; see `TextGame.replay`.
    """
    prefix = environ.get("EPISODE_PREFIX")
    return json.loads(prefix) if prefix else []


def play_game(game: TextGame, server: Server) -> Outcome:
    """Play a started episode from the end of its prefix on."""
    game.replay(prefix_of(os.environ))
    return play_chat(game, connect(server))


class Chat(Protocol):
    """A started episode: show `system`; then show `turn` and `act` on the reply until it is `done`."""

    system: str
    turn: str

    @property
    def done(self) -> bool: ...

    def act(self, reply: str) -> None: ...

    def outcome(self, remark: str = "") -> Outcome: ...


def play_chat(game: Chat, model: Model, show: Callable[[str], object] = lambda text: None) -> Outcome:
    """Play a started episode, one action per reply. `show` is called with each new message of the chat.

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


def connect(server: Server, *, limited: bool = True) -> Model:
    """Return a function from a chat to the model's reply. It raises openai's errors after the retries.

    Models of OpenAI's that reason refuse `max_tokens`: with `limited` false none are sent.
    """
    from openai import BadRequestError, OpenAI, omit  # takes 1.8 s, so only after the task has been checked

    # Without a key the header would be "Bearer ", which is not a valid one.
    key = server.key or "none"
    client = OpenAI(base_url=server.base_url, api_key=key, timeout=MODEL_TIMEOUT_SECONDS, max_retries=MODEL_RETRIES)

    def reply(messages: list[Message]) -> str:
        try:
            answer = client.chat.completions.create(
                model=server.model,
                messages=messages,  # pyright: ignore[reportArgumentType] (plain dicts)
                max_tokens=server.max_tokens if limited else omit,
            )
        except BadRequestError as error:
            if is_too_long(error):
                raise ContextOverflow(str(error)) from error
            raise
        return answer.choices[0].message.content or ""

    return reply
