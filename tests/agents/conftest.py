"""One simulator for all tests where isolation is not the point, and a scripted model server."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from empo2.agents.scienceworld import agent
from empo2.agents.scienceworld.environment import Environment
from empo2.agents.scienceworld.tasks import Episode
from empo2.agents.text_game.agent import TextAgent
from empo2.agents.text_game.episode import TextEpisode
from empo2.agents.textworld_express.environment import Environment as TextWorldExpress


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
    """An OpenAI-compatible server and an event endpoint in one. Requests and events are kept as they came."""

    url: str
    reply: Callable[[list[dict]], str] = lambda messages: "look around"  # from the chat to the model's reply
    refusal: tuple[int, str] | None = None  # instead of a reply: a status and a message
    chats: list[dict] = field(default_factory=list)
    events: list[dict] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    broken_posts: int = 0  # so many events are received, and their connection broken without an answer
    busy_posts: int = 0  # so many events are answered with 503

    @property
    def variables(self) -> dict[str, str]:
        return {"AGL_OPENAI_BASE_URL": f"{self.url}/v1", "AGL_EVENT_URL": f"{self.url}/events", "AGL_KEY": "secret"}

    def answer(self, path: str, body: dict) -> tuple[int, dict] | None:
        if path == "/events":
            self.events.append(body)
            if self.broken_posts:
                self.broken_posts -= 1
                return None
            if self.busy_posts:
                self.busy_posts -= 1
                return 503, {}
            return 201, {}
        self.chats.append(body)
        if self.refusal:
            status, message = self.refusal
            return status, {"error": {"message": message, "type": "BadRequestError", "code": status}}
        message = {"role": "assistant", "content": self.reply(body["messages"])}
        return 200, {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        }


@pytest.fixture
def server() -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.authorizations.add(self.headers["Authorization"])
            answer = state.answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if answer is None:
                self.close_connection = True
                return
            status, body = answer
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = Server(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


@pytest.fixture
def play_agent(server: Server, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict]:
    """Run an agent as the controller does, in this process; return the data of its reward.

    Its replies are the given ones, or what `server.reply` says.
    """

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
def episode() -> Callable[..., Episode]:
    """An episode of find-non-living-thing, with what the test changes."""

    def make(**changes: object) -> Episode:
        defaults = {"task": "find-non-living-thing", "variation": 0, "simplification": "easy", "max_steps": 10}
        return Episode(**{**defaults, "actions": "free-text", "choices": 12, "seed": 0, **changes})

    return make


def variables_of(episode: TextEpisode) -> dict[str, str]:
    """An episode as the environment variables that agent-lightning's controller makes of a rollout's input."""
    return {name: str(getattr(episode, path.removeprefix("input."))) for name, path in episode.env_map().items()}


@pytest.fixture
def variables() -> Callable[[TextEpisode], dict[str, str]]:
    return variables_of
