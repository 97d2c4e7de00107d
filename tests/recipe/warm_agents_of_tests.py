"""Agents that the process of test_warm_agents.py forks; ``ACT`` says what one does."""

import atexit
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

IMPORTED_BY = os.getpid()


class Agent:
    def run(self) -> None:
        atexit.register(print, f"{os.environ['ACT']} leaves", flush=True)
        match os.environ["ACT"]:
            case "tell":
                mine = {name: value for name, value in os.environ.items() if name.startswith("MY_")}
                print(os.getpid(), os.getppid(), os.getsid(0), IMPORTED_BY, mine, sys.argv, sys.stdin.read(), sep="|")
                print("on stderr", file=sys.stderr)
            case "draw":
                print(random.random(), np.random.rand(), sep="|")
            case "write":
                os.environ["MY_MARK"] = "left behind"
                globals()["IMPORTED_BY"] = "left behind"
            case "raise":
                raise ValueError("no such door")
            case "exit":
                sys.exit(7)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "leave":
                left = [subprocess.Popen(["sleep", "1000"], start_new_session=own) for own in (False, True)]
                print("left", *(each.pid for each in left))
            case "alone":
                print(multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True))
                multiprocessing.set_start_method("spawn")
            case "hang":
                if not os.fork():
                    print(f"child|{os.getpid()}", flush=True)
                time.sleep(1000)
