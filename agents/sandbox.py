"""Run what a model has written in namespaces of its own: without a network, other processes or lasting files.

This is also a script of the standard library alone, which any Python from 3.12 runs. It needs user namespaces; root in
one has no power outside. With real root's the users of the machine exist in it, else only root does.
"""

import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

_REMEDY = "allow them (sysctl user.max_user_namespaces), and in a container run it with --privileged"
_GiB = 1 << 30
_START_SECONDS = 300  # heavy modules on a busy machine
_SPARE_SECONDS = 10  # beyond a request's own limit
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SHELL_MEMORY, _PYTHON_MEMORY = 1 * _GiB, 8 * _GiB  # address space of a process
_CANNOT = 126  # exit code where a program cannot be run
_DISK = "256m"  # of the files that are written

_LIBC = ctypes.CDLL(None, use_errno=True)
_PDEATHSIG, _BIND, _REC, _PRIVATE, _DETACH = 1, 1 << 12, 1 << 14, 1 << 18, 2  # prctl(2), mount(2), umount(2)
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}  # numbers of system calls
_AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = -100, 0x8000, 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


class SandboxError(OSError):
    """A sandbox cannot be made, or was lost; the message says why, in one line."""


class Sandbox:
    """A started sandbox, which ends with this process. A context manager.

    Args:
        kind: "shell": one machine of its own, with root's rights, the programs of /usr and empty folders, in which
            `run` runs scripts of bash; or "python": `test` runs each program in new namespaces, where files are
            read-only but for /tmp.
        modules: for "python", imported once; each program is a fork.
        python: the Python that runs the sandbox, and the programs.

    It starts while this process goes on. What is asked of it raises SandboxError, in one line, if the machine allows no
    user namespaces.
    """

    def __init__(self, kind: str, modules: Iterable[str] = (), python: str = sys.executable) -> None:
        kept = {name: os.environ[name] for name in ("HOME", "LD_LIBRARY_PATH", "MPLCONFIGDIR") if name in os.environ}
        environment = {**kept, "PATH": _PATH, "LANG": "C.UTF-8", "MPLBACKEND": "Agg", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [python, __file__, kind, *modules],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise SandboxError(f"{python} cannot be run: {error.strerror}") from None
        self._is_ready = False

    def run(self, script: str, seconds: float = 10) -> tuple[int | None, str]:
        """Run a script in the shell. Return its exit code, None if it took too long, and what it printed."""
        code, output = self._ask([script, seconds], seconds)
        return code, output

    def test(self, source: str, seconds: float = 60) -> tuple[int, list[str]]:
        """Run a program that defines unittest's `TestCases`. Return the number of tests and a line for each failure."""
        tests, failures = self._ask([source, seconds], seconds)
        return tests, failures

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        process = self._process
        process.kill()
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        process.wait()

    def _ask(self, request: list[Any], seconds: float) -> Any:
        assert self._process.stdin
        if not self._is_ready:
            self._is_ready = self._answer(_START_SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer(seconds + _SPARE_SECONDS)

    def _answer(self, seconds: float) -> Any:
        assert self._process.stdout and self._process.stderr
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise SandboxError(f"the sandbox has not answered for {seconds:g} s")
        if not (line := self._process.stdout.readline()):
            lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
            raise SandboxError(f"no sandbox: {lines[-1] if lines else 'it has ended'}; {_REMEDY}")
        return json.loads(line)


def check() -> str:
    """Return one line that says whose rights a sandbox has. Raises SandboxError unless one can be made."""
    with Sandbox("shell") as sandbox:
        users = sandbox.run("wc -l < /proc/self/uid_map; chown 1:1 /tmp")[0] == 0
    return f"a sandbox of namespaces, {'with' if users else 'without'} other users than root"


# Within the sandbox


def _call(name: str, *arguments: Any) -> None:
    if getattr(_LIBC, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind and kind.encode(), flags, data.encode())


def _unshare(kinds: int, before: Callable[[], None] = lambda: None) -> None:
    """Enter new namespaces of these kinds, a user namespace among them, in which this process is root.

    Real root keeps the users that there are, as does root of a namespace.

    Args:
        before: called first. A helper tells the users by a /proc that this does not change.
    """
    # By the number that /proc knows it by.
    process, root, maps = Path("/proc", os.readlink("/proc/self")), os.geteuid() == 0, {}
    for kind, own in (("gid", os.getegid()), ("uid", os.geteuid())):
        ranges = [line.split() for line in Path(f"/proc/self/{kind}_map").read_text().splitlines()]
        maps[kind] = "".join(f"{first} {first} {count}\n" for first, _, count in ranges) if root else f"0 {own} 1\n"
    (is_ready, ready), (waiting, go) = os.pipe(), os.pipe()
    if not (helper := os.fork()):
        os.close(go)
        with contextlib.suppress(OSError):
            os.unshare(os.CLONE_NEWNS)
        os.close(ready)
        os.read(waiting, 1)
        with contextlib.suppress(OSError):
            if not root:
                (process / "setgroups").write_text("deny")
            for kind, text in maps.items():
                (process / f"{kind}_map").write_text(text)
            os._exit(0)
        os._exit(1)
    os.close(ready)
    os.read(is_ready, 1)
    try:
        before()
        try:
            os.unshare(kinds)
        except OSError as error:
            raise PermissionError(f"this machine allows no user namespaces ({error.strerror})") from None
    finally:
        os.close(go)
        told = os.waitpid(helper, 0)[1] == 0
    os.close(waiting)
    os.close(is_ready)
    if not told:
        raise PermissionError("the users of a user namespace cannot be set")


def _lock(before: Callable[[], None]) -> None:
    """Let nobody undo what `before` mounts, nor make writable what it makes read-only, real root neither."""
    _unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS, before)
    _call("prctl", _PDEATHSIG, signal.SIGKILL)


def _isolate() -> None:
    """Go on in a child that is process 1 of new namespaces; this process waits for it, and ends as it does."""
    user, files = os.CLONE_NEWUSER, os.CLONE_NEWNS
    _unshare(user | files | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC | os.CLONE_NEWUTS)
    if child := os.fork():
        _call("prctl", _PDEATHSIG, signal.SIGKILL)
        os._exit(abs(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    _call("prctl", _PDEATHSIG, signal.SIGKILL)
    _mount("none", "/", flags=_REC | _PRIVATE)
    with socket.socket() as any_socket:  # the loopback device is down in a new network
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))


def _enter_machine(root: str) -> None:
    """Make `root` a Linux of its own from this one's programs and users, and change into it."""
    _mount("tmpfs", root, "tmpfs", data=f"mode=755,size={_DISK}")
    for folder in ("usr", "etc", "home", "opt", "srv", "dev", "proc", "mnt", "media", "run/up", "run/work", "old"):
        os.makedirs(f"{root}/{folder}")
    for folder in ("log", "lib", "spool/mail", "mail", "backups", "cache"):
        os.makedirs(f"{root}/var/{folder}")
    for folder, mode in (("tmp", 0o1777), ("var/tmp", 0o1777), ("root", 0o700)):
        os.mkdir(f"{root}/{folder}")
        os.chmod(f"{root}/{folder}", mode)
    for link in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{link}", f"{root}/{link}")
    for name in _ETC:
        with contextlib.suppress(OSError):  # distributions differ; a user cannot read all
            if os.path.isdir(f"/etc/{name}"):
                shutil.copytree(f"/etc/{name}", f"{root}/etc/{name}", symlinks=True)
            else:
                shutil.copy2(f"/etc/{name}", f"{root}/etc/{name}", follow_symlinks=name != "localtime")
                status = os.stat(f"/etc/{name}")
                os.chown(f"{root}/etc/{name}", status.st_uid, status.st_gid)
    Path(f"{root}/etc/hosts").write_text("127.0.0.1 localhost\n")
    for device in ("null", "zero", "full", "random", "urandom", "tty"):
        Path(f"{root}/dev/{device}").touch()
        _mount(f"/dev/{device}", f"{root}/dev/{device}", flags=_BIND)
    for number, link in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{root}/dev/{link}")
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    layers = f"lowerdir=/usr,upperdir={root}/run/up,workdir={root}/run/work"
    _mount("overlay", f"{root}/usr", "overlay", data=layers)
    _mount("proc", f"{root}/proc", "proc")
    os.chdir(root)
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b"old")
    os.chdir("/")
    _call("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    _lock(lambda: _make_read_only("/proc"))  # real root's could set the kernel of this machine


_ETC = (
    *("passwd", "group", "shadow", "gshadow", "login.defs", "default", "skel", "shells", "pam.d", "pam.conf"),
    *("security", "nsswitch.conf", "alternatives", "bash.bashrc", "profile", "adduser.conf", "deluser.conf"),
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "subuid", "subgid", "localtime", "hostname", "environment"),
    "os-release",
)


def _shell(script: str, seconds: float) -> tuple[int | None, str]:
    try:
        return _run_shell(script, seconds)
    except (OSError, ValueError) as error:  # the player has removed what it needs; a null character in the script
        return _CANNOT, str(error)


def _run_shell(script: str, seconds: float) -> tuple[int | None, str]:
    with tempfile.TemporaryFile() as output:  # a pipe would be held open by what runs in the background
        limit = _SHELL_MEMORY, _SHELL_MEMORY
        process = subprocess.Popen(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={"PATH": _PATH, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        output.seek(0)
        return code, output.read(1 << 20).decode(errors="replace")


def _test(answers: int, source: str, seconds: float) -> tuple[int, list[str]]:
    """Fork, run the tests there without the descriptor of this sandbox's answers, and return their result."""
    result, told = os.pipe()
    if not (child := os.fork()):
        try:
            os.close(result)
            os.close(answers)
            os.setsid()
            _isolate()
            _run_tests(source, told)
        except BaseException as error:
            os.write(told, json.dumps([0, [_line_of(error)]]).encode())
        finally:
            os._exit(0)
    os.close(told)
    text, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and select.select([result], [], [], left)[0]:
        if not (part := os.read(result, 65_536)):
            break
        text += part
    else:
        text = json.dumps([0, [f"took longer than {seconds:g} s"]]).encode()
    os.close(result)
    os.kill(child, signal.SIGKILL)  # and process 1 of the namespaces with it
    os.waitpid(child, 0)
    with contextlib.suppress(ValueError):
        tests, failures = json.loads(text)
        return tests, failures
    return 0, ["the program ended without a result"]


def _make_read_only(path: str) -> None:
    """With all that is mounted below."""
    attributes = struct.pack("4Q", _READ_ONLY, 0, 0, 0)
    _call("syscall", _MOUNT_SETATTR, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, len(attributes))


def _hide_files() -> None:
    _make_read_only("/")
    for folder in ("/tmp", "/dev/shm", "/run"):  # the second is multiprocessing's, the third has services' sockets
        if os.path.isdir(folder):
            _mount("tmpfs", folder, "tmpfs", data=f"mode=1777,size={_DISK}")


def _run_tests(source: str, told: int) -> None:
    with contextlib.suppress(OSError):  # in containers it may be forbidden
        _mount("proc", "/proc", "proc")
    _lock(_hide_files)
    os.makedirs("/tmp/work")
    os.chdir("/tmp/work")
    os.environ["HOME"] = "/tmp"
    resource.setrlimit(resource.RLIMIT_AS, (_PYTHON_MEMORY, _PYTHON_MEMORY))
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    warnings.simplefilter("ignore")
    for name in ("assertEqual", "assertAlmostEqual"):  # Python 3.12 has lost their other names
        setattr(unittest.TestCase, f"{name}s", getattr(unittest.TestCase, name))
    module = types.ModuleType("__test__")
    sys.modules["__test__"] = module
    exec(compile(source, "__test__.py", "exec"), module.__dict__)
    found = unittest.TestLoader().loadTestsFromTestCase(module.__dict__["TestCases"])
    result = unittest.TestResult()
    found.run(result)
    texts = [text.rstrip(" *\n") for _, text in result.failures + result.errors]  # NLTK frames its errors
    failures = [text.splitlines()[-1][:200] for text in texts]
    os.write(told, json.dumps([result.testsRun, failures]).encode())


def _line_of(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip().splitlines()[0][:200]


def _main(kind: str, *modules: str) -> None:
    os.umask(0o022)  # that of empo2's commands would shut the machine's other users out
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _call("prctl", _PDEATHSIG, signal.SIGKILL)
    try:
        if kind == "shell":
            _isolate()
            _enter_machine("/tmp")  # that of these namespaces alone
            answer = _shell
        else:
            for module in modules:
                with contextlib.suppress(ImportError):
                    importlib.import_module(module)
            answer = functools.partial(_test, answers.fileno())
            if failures := answer("import unittest\nclass TestCases(unittest.TestCase): pass", _START_SECONDS)[1]:
                sys.exit(failures[0])
    except OSError as error:
        sys.exit(str(error))
    print("true", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
