"""Connect to ports as whoever has no key, and print what answers: one JSON object of ``HOST:PORT`` and the answer.

``refused``: nobody takes the connection. ``401``: the key is asked for. ``silent``: no byte within two seconds.
``closed``: the connection is closed without one. Anything else is the beginning of what was sent.
"""

import json
import socket
import sys

import grpc

_SECONDS = 2


def http(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), _SECONDS) as connection:
            connection.settimeout(_SECONDS)
            connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            answer = connection.recv(200)
    except TimeoutError:
        return "silent"
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "closed"
    return "401" if answer.startswith(b"HTTP/1.1 401") else repr(answer) if answer else "closed"


def remote_call(host: str, port: int) -> str | None:
    """What a server of remote calls says; None if it is none."""
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        call = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        try:
            call(b"", timeout=_SECONDS)
        except grpc.RpcError as error:
            code = error.code()  # pyright: ignore[reportAttributeAccessIssue]
            if code is grpc.StatusCode.UNAUTHENTICATED:
                return "401"
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return None
            return f"{code}"
    return "answers remote calls"


def main() -> None:
    answers = {}
    for each in sys.argv[1:]:
        host, _, port = each.rpartition(":")
        said = http(host, int(port))
        answers[each] = said if said in ("401", "refused") else remote_call(host, int(port)) or said
    print(json.dumps(answers))


main()
