"""The sandbox: what a script in it can reach, which is nothing outside; its limits; a machine that allows none."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from empo2.agents import sandbox
from empo2.agents.sandbox import Sandbox

TESTS = "import unittest\nclass TestCases(unittest.TestCase):\n"


def test_a_machine_keeps_what_scripts_do_and_the_host_sees_none_of_it(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    with Sandbox("shell") as machine:
        assert machine.run("echo a; echo b >&2; exit 3") == (3, "a\nb\n")
        sleeping = "(sleep 60; echo late) & until pgrep sleep > /opt/pid; do :; done"  # a busy machine starts it late
        assert machine.run(f"cd /tmp; pwd > /opt/here; {sleeping}; echo started") == (0, "started\n")
        assert machine.run("cat /opt/here; pgrep -c sleep; id -un; cat") == (0, "/tmp\n1\nroot\n")
        assert machine.run("touch /usr/bin/new && rm /usr/bin/env && ls /usr/bin/new") == (0, "/usr/bin/new\n")
        assert machine.run(f"cat {secret}; ls /work /home /root /srv")[1].count("No such file") == 2
        assert int(machine.run("ls /proc | grep -c '^[0-9]'")[1]) <= 8
        assert machine.run("mknod /tmp/disk b 8 0; mount -o remount,rw /; cat /proc/1/environ | tr '\\0' '\\n'")[
            1
        ].count("not permitted")
        assert "EMPO2" not in machine.run("env; cat /proc/*/environ")[1]
        assert machine.run("sleep 60", seconds=0.2) == (None, "")
        assert machine.run("ping -c1 1.1.1.1 || cat < /dev/tcp/1.1.1.1/80")[0] != 0
    assert not Path("/usr/bin/new").exists() and Path("/usr/bin/env").exists() and not Path("/opt/here").exists()


def test_machines_know_nothing_of_one_another_and_end_with_their_owner():
    with Sandbox("shell") as one, Sandbox("shell") as other:
        one.run("touch /tmp/mine; sleep 1000 &")
        assert other.run("ls /tmp; pgrep sleep") == (1, "")
        running = psutil.Process(one._process.pid).children(recursive=True)
    assert len(running) >= 2 and not psutil.wait_procs(running, timeout=60)[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_with_root_there_are_other_users():
    """Also where the files of the command that plays are for their owner only, as of `empo2 adapt`."""
    assert sandbox.check() == "a sandbox of namespaces, with other users than root"
    umask = os.umask(0o077)
    try:
        machine = Sandbox("shell")
    finally:
        os.umask(umask)
    with machine:
        assert machine.run("useradd -m ann && su - ann -c 'id -un; pwd'") == (0, "ann\n/home/ann\n")


def test_programs_are_forks_of_which_each_has_files_and_a_network_of_its_own():
    files = "  def test_a(self): open('kept', 'x').write('1')\n  def test_b(self): open('/var/tmp/x', 'w')\n"
    with Sandbox("python", ["json", "no_such_module"]) as programs:
        for _ in range(2):  # `kept` is not there in the second
            assert programs.test(TESTS + files) == (2, ["OSError: [Errno 30] Read-only file system: '/var/tmp/x'"])
        loaded = "import sys\nassert 'json' in sys.modules\n" + TESTS + "  def test_a(self): pass\n"
        assert programs.test(loaded) == (1, [])
        network = (
            "  def test_own(self):\n    import socket\n    with socket.create_server(('127.0.0.1', 0)) as server:\n"
            "      socket.create_connection(server.getsockname()).close()\n"
            "  def test_other(self):\n    import socket\n    socket.create_connection(('1.1.1.1', 80), 5)\n"
        )
        assert programs.test(TESTS + network) == (2, ["OSError: [Errno 101] Network is unreachable"])


def test_nothing_that_is_read_only_is_made_writable_again():
    """Not as root of the namespaces that made it so, nor as real root, who owns the settings of the kernel."""
    written = Path(f"/var/tmp/empo2-sandbox-{os.getpid()}")
    attempts = ["mount -o remount,rw,bind / || mount -o remount,rw,bind /proc", "umount -l /proc /tmp /run", "true"]
    program = "".join(
        f"  def test_{number}(self):\n    import os, subprocess\n    subprocess.run({each!r}, shell=True)\n"
        f"    for file in ({str(written)!r}, '/proc/sys/kernel/core_pattern'):\n"
        "      with self.assertRaises(OSError): os.open(file, os.O_WRONLY | os.O_CREAT)\n"
        f"    self.assertNotEqual(os.stat('/run').st_dev, {os.stat('/run').st_dev})\n    os.write(3, b'no answer')\n"
        for number, each in enumerate(attempts)
    )
    try:
        with Sandbox("python") as programs:
            assert programs.test(TESTS + program) == (3, [])
            assert programs.test(TESTS + "  def test_a(self): pass\n") == (1, [])  # which is answered in its own words
        assert not written.exists()
    finally:
        written.unlink(missing_ok=True)
    with Sandbox("shell") as machine:
        for attempt in attempts[:2]:
            assert machine.run(f"{attempt}; : >> /proc/sys/kernel/core_pattern")[0] != 0


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("while True: pass", "took longer than 0.5 s"),
        ("import os\nif os.fork(): os.wait()\nelse:\n  while True: pass", "took longer than 0.5 s"),
        ("x = bytearray(9 << 30)", "MemoryError"),
        ("import os; os._exit(0)", "the program ended without a result"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("x = 1", "KeyError: 'TestCases'"),
        (TESTS + "  def test_a(self): self.assertEqual(1, 2)", "AssertionError: 1 != 2"),
        (TESTS + "  def test_a(self): raise SystemExit", "SystemExit"),
    ],
)
def test_a_program_that_fails_is_told_in_a_line_and_the_next_one_runs(source: str, says: str):
    with Sandbox("python") as programs:
        _, failures = programs.test(source, seconds=0.5 if "while True" in source else 60)
        assert failures == [says]
        assert programs.test(TESTS + "  def test_a(self): pass\n") == (1, [])


def test_a_machine_without_user_namespaces_gets_one_line():
    """Within a user namespace that allows no other."""
    script = (
        "echo 0 > /proc/sys/user/max_user_namespaces; exec $0 -c "
        "'from empo2.agents.sandbox import check\ntry: check()\nexcept OSError as error: print(error)'"
    )
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", script, sys.executable], capture_output=True, text=True)
    line = "no sandbox: this machine allows no user namespaces (No space left on device); allow them "
    assert done.stdout.startswith(line) and done.stdout.count("\n") == 1, done.stderr
