"""Notice that a host, or a worker on one, has left the Ray cluster: the trainer would wait for it."""

import contextlib
import os
import socket
import sys
import threading
import time
from typing import Any

import ray
from ray._private import state

from empo2.recipe.errors import Empo2Error

_POLL_SECONDS = 2
_SILENT_SECONDS = 20  # Ray itself gives a host up that is silent for more than a minute
_CONNECT_SECONDS = 3
_VITAL = ("WorkerDict", "vLLMHttpServer")  # classes of actors without which no step can be completed


class NodeWatch:
    """The workers of this job in a Ray cluster, and the hosts that they run on; made when all of them have started."""

    def __init__(self) -> None:
        self._heard = {node["NodeID"]: time.monotonic() for node in ray.nodes()}
        self._watched = {
            id: (each["ActorClassName"], each["Address"]["NodeID"])
            for id, each in _actors().items()
            if each["State"] == "ALIVE" and each["ActorClassName"].rpartition(".")[2] in _VITAL
        }

    def check(self) -> None:
        """Look once.

        Raises:
            Empo2Error: names the host that has left, or on which a worker has ended.
        """
        nodes = {node["NodeID"]: node for node in ray.nodes()}
        for node_id in {node_id for _, node_id in self._watched.values()}:
            self._check_host(node_id, nodes[node_id])
        actors = _actors()
        for id, (name, node_id) in self._watched.items():
            if actors[id]["State"] == "DEAD":
                raise Empo2Error(f"{name} on host {_name(nodes[node_id])} has ended")

    def _check_host(self, node_id: str, node: dict[str, Any]) -> None:
        if node["Alive"]:
            address = node["NodeManagerAddress"], node["NodeManagerPort"]
            with contextlib.suppress(OSError), socket.create_connection(address, _CONNECT_SECONDS):
                self._heard[node_id] = time.monotonic()
            if time.monotonic() - self._heard[node_id] < _SILENT_SECONDS:
                return
        raise Empo2Error(f"host {_name(node)} has left the Ray cluster; start it, or another one, again")

    def end_process_with_them(self, done: threading.Event) -> threading.Thread:
        """End this process, in a thread, once one of them has ended; its main thread may hang in a call to them.

        Args:
            done: the process needs them no more, and may leave the cluster.
        """

        def watch() -> None:
            while not done.wait(_POLL_SECONDS):
                try:
                    self.check()
                except Exception as error:
                    if done.is_set():
                        return
                    print(f"empo2: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
                    os._exit(1)

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread


def _actors() -> dict[str, dict[str, Any]]:
    return state.actors(job_id=ray.get_runtime_context().job_id)


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"
