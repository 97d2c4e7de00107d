"""One simulator for all tests where isolation is not the point, and a scripted model server."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from empo2.agents.scienceworld import agent
from empo2.agents.scienceworld.environment import Environment
from empo2.agents.scienceworld.tasks import Episode
from empo2.agents.text_game.agent import TextAgent
from empo2.agents.text_game.episode import TextEpisode
from empo2.agents.textworld_express.environment import Environment as TextWorldExpress
from empo2.recipe.retrofit.recorder import serving


@pytest.fixture(scope="session")
def environment() -> Iterator[Environment]:
    with Environment() as shared:
        yield shared


@pytest.fixture(scope="session")
def textworld() -> Iterator[TextWorldExpress]:
    with TextWorldExpress() as shared:
        yield shared


@pytest.fixture
def shared_simulator(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Episodes are played in the shared simulator, which they do not close."""
    monkeypatch.setattr(agent, "Environment", lambda: nullcontext(environment))
    return environment


@dataclass
class Server:
    """A model server and an event endpoint in one. Requests and events are kept as they came."""

    url: str = ""
    reply: Callable[[list[dict]], str] = lambda messages: "look around"  # from the chat to the model's reply
    refusal: tuple[int, str] | None = None  # instead of a reply: a status and a message
    busy: int = 0  # so many events are answered with 503
    chats: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)

    @property
    def variables(self) -> dict[str, str]:
        return {"AGL_OPENAI_BASE_URL": f"{self.url}/v1", "AGL_EVENT_URL": f"{self.url}/events", "AGL_KEY": "secret"}

    def answer(self, path: str, body: dict) -> tuple[int, dict]:
        if path == "events":
            self.events.append(body)
            self.busy -= 1
            return (201 if self.busy < 0 else 503), {}
        self.chats.append(body)
        if self.refusal:
            status, message = self.refusal
            return status, {"error": {"message": message, "type": "BadRequestError", "code": status}}
        message = {"role": "assistant", "content": self.reply(body["messages"])}
        choices = [{"index": 0, "finish_reason": "stop", "message": message}]
        return 200, {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}


@pytest.fixture
def server() -> Iterator[Server]:
    app, state = FastAPI(), Server()

    @app.post("/{path:path}")
    def answer(path: str, request: Request, body: dict) -> JSONResponse:
        state.authorizations.add(request.headers.get("Authorization"))
        status, content = state.answer(path, body)
        return JSONResponse(content, status)

    with serving(app) as state.url:
        yield state


@pytest.fixture
def play_agent(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Run an agent as the controller does, in this process, with these replies; return the data of its reward."""

    def play(agent: type[TextAgent], episode: TextEpisode, replies: Iterable[str] | None = None, **more: str) -> dict:
        for name, value in {**variables_of(episode), **server.variables, **more}.items():
            monkeypatch.setenv(name, value)
        if replies is not None:
            script = iter(replies)
            server.reply = lambda messages: next(script)
        agent().run()
        return server.events[-1]["data"]

    return play


@pytest.fixture
def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """Run a world's command in this process; return its exit code, standard output and standard error."""

    def run(main: Callable[[], None], *arguments: object) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
        code: object = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def episode() -> Callable[..., Episode]:
    def make(**changes: object) -> Episode:
        defaults = {"task": "find-non-living-thing", "variation": 0, "simplification": "easy", "max_steps": 10}
        return Episode(**{**defaults, "actions": "free-text", "choices": 12, "seed": 0, **changes})

    return make


def variables_of(episode: TextEpisode) -> dict[str, str]:
    return {name: str(getattr(episode, path.removeprefix("input."))) for name, path in episode.env_map().items()}


@pytest.fixture
def variables() -> Callable[[TextEpisode], dict[str, str]]:
    return variables_of
