"""Connect to ports as whoever has no key, and print what answers: one JSON object of ``HOST:PORT`` and the answer.

What gives neither ``refused`` nor ``401`` is asked once more: a process of Ray's may have ended meanwhile.

``refused``: nobody takes the connection. ``401``: the key is asked for, of remote calls by every method that the server
has. ``silent``: no byte within seconds. ``closed``: the connection is closed without one. Else what was answered.
"""

import json
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import ray

_SECONDS = 15
_REMOTE = Path(ray.__file__).parent / "core" / "generated"
_OBJECTS = [f"/ray.rpc.ObjectManagerService/{name}" for name in ("Push", "Pull", "FreeObjects")]  # not in that folder


def http(host: str, port: int) -> str:
    answer = b""
    try:
        with socket.create_connection((host, port), _SECONDS) as connection:
            connection.settimeout(_SECONDS)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            while len(answer) < 300 and (more := connection.recv(300)):
                answer += more
    except TimeoutError:  # also of a connection that is kept open after an answer
        if not answer:
            return "silent"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "closed"
    return "401" if answer.startswith(b"HTTP/1.1 401") else repr(answer) if answer else "closed"


def remote_calls(host: str, port: int) -> str | None:
    """What a server of Ray's remote calls says; None if it is none, or has none of these methods."""
    codes: dict[str, list[str]] = {"UNIMPLEMENTED": []}
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        for method in methods():
            try:
                channel.unary_unary(method)(b"", timeout=_SECONDS)
                code = "OK"
            except grpc.RpcError as error:
                code = error.code().name  # pyright: ignore[reportAttributeAccessIssue]
            if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") and not codes["UNIMPLEMENTED"]:
                return None
            codes.setdefault(code, []).append(method)
    del codes["UNIMPLEMENTED"]
    return "401" if [*codes] == ["UNAUTHENTICATED"] else json.dumps(codes) if codes else None


def methods() -> list[str]:
    """Those that Ray's servers may have, with one first that none has."""
    texts = [file.read_text() for file in _REMOTE.glob("*_grpc.py")]
    return ["/none", *_OBJECTS, *sorted({method for text in texts for method in re.findall(r"'(/ray[\w./]+)'", text)})]


def answer(address: str) -> str:
    said = _ask(address)
    return said if said in ("401", "refused") else _ask(address)


def _ask(address: str) -> str:
    host, _, port = address.rpartition(":")
    said = http(host, int(port))
    return said if said in ("401", "refused") else remote_calls(host, int(port)) or said


if __name__ == "__main__":
    with ThreadPoolExecutor(32) as threads:
        print(json.dumps(dict(zip(sys.argv[1:], threads.map(answer, sys.argv[1:]), strict=True))))
