"""Another host on this one, for what a stack of several hosts needs: ``python -m tools.second_host up|down|env``. Root, Linux.

A network namespace with an address and a loopback of its own, and in it a docker daemon (own data, own socket) and an sshd
(own key, own port). The daemon sees an empty ``/root``, ``/home`` and ``/tmp``: what a container there needs has to be brought.
Kernel and clock are this host's, and so are its cores.

``up`` copies the stack's image from this host's daemon, where one answers (``docker save | docker load``), and prints what
``env`` prints: variables for the suite's selftests (``DOCKER_HOST=$KVGATES_SECOND_HOST`` puts a stack there). ``down`` ends and removes all of it; ``--keep`` leaves the daemon's data.
Needs Debian's ``docker.io openssh-server iproute2 util-linux``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMESPACE = "kvgates-second"
LINK_HERE, LINK_THERE = "kvg-second0", "kvg-second1"
HERE, THERE = "10.214.0.1", "10.214.0.2"
"""Far from docker's own networks and from those of the suite (10.213.0.0/16)."""

PORT = 2222
STATE = Path("/run/kvgates-second")
DATA = Path("/var/lib/kvgates-second")
SOCKET = STATE / "docker.sock"
HIDDEN = ("/root", "/home", "/tmp")

START_BOUND_S = 60.0
"""For dockerd and sshd; on two busy cores dockerd takes 2 s."""

STOP_BOUND_S = 30.0

URL = f"ssh://root@{THERE}:{PORT}{SOCKET}"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - a command's answer


def run(*argv: str, check: bool = True) -> str:
    """Run a program; what it printed. Ends with its last words where it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if check and done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines() or ["no word"]
        raise SystemExit(f"second host: {shlex.join(argv)}: {words[-1]}")
    return done.stdout


def environment() -> dict[str, str]:
    """What the suite has to be told to use it."""
    return {"KVGATES_SECOND_HOST": URL, "KVGATES_SSH": f"ssh -F {STATE / 'ssh_config'}"}


def up() -> None:
    for program in ("dockerd", "docker", "/usr/sbin/sshd", "ip", "nsenter", "unshare", "ssh-keygen"):
        if shutil.which(program) is None:
            raise SystemExit(f"second host: {program} is not installed")
    if os.geteuid() != 0:
        raise SystemExit("second host: run it as root")
    if STATE.exists():
        raise SystemExit(f"second host: {STATE} is there already; run it with down first")
    STATE.mkdir(mode=0o755)
    try:
        _network()
        _sshd()
        _dockerd()
        _image()
    except BaseException:
        down(keep=True)
        raise


def _network() -> None:
    run("ip", "netns", "add", NAMESPACE)
    run("ip", "link", "add", LINK_HERE, "type", "veth", "peer", "name", LINK_THERE, "netns", NAMESPACE)
    run("ip", "address", "add", f"{HERE}/30", "dev", LINK_HERE)
    run("ip", "link", "set", LINK_HERE, "up")
    for words in (
        ("address", "add", f"{THERE}/30", "dev", LINK_THERE),
        ("link", "set", LINK_THERE, "up"),
        ("link", "set", "lo", "up"),
    ):
        run("ip", "-netns", NAMESPACE, *words)


def _inside(*argv: str) -> list[str]:
    # Not "ip netns exec": that mounts another /sys, without control groups.
    return ["nsenter", f"--net=/run/netns/{NAMESPACE}", *argv]


def _sshd() -> None:
    Path("/run/sshd").mkdir(exist_ok=True)  # where it locks itself in; Debian makes it with its service only
    for name in ("host_key", "user_key"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", NAMESPACE, "-f", str(STATE / name))
    shutil.copy(STATE / "user_key.pub", STATE / "authorized_keys")
    key = (STATE / "host_key.pub").read_text(encoding="utf-8")
    (STATE / "known_hosts").write_text(f"[{THERE}]:{PORT} {key}", encoding="utf-8")
    (STATE / "sshd_config").write_text(
        f"Port {PORT}\nListenAddress {THERE}\nHostKey {STATE}/host_key\nPidFile {STATE}/sshd.pid\n"
        f"AuthorizedKeysFile {STATE}/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\nAllowStreamLocalForwarding yes\n",
        encoding="utf-8",
    )
    (STATE / "ssh_config").write_text(
        f"Host {THERE}\n  IdentityFile {STATE}/user_key\n  IdentitiesOnly yes\n  UserKnownHostsFile {STATE}/known_hosts\n",
        encoding="utf-8",
    )
    run(*_inside("/usr/sbin/sshd", "-f", str(STATE / "sshd_config"), "-E", str(STATE / "sshd.log")))


def _dockerd() -> None:
    DATA.mkdir(mode=0o711, exist_ok=True)
    hide = "; ".join(f"mount -t tmpfs kvgates-second {folder}" for folder in HIDDEN)
    words = [
        "dockerd", f"--host=unix://{SOCKET}", f"--data-root={DATA / 'docker'}", f"--exec-root={STATE / 'exec'}",
        f"--pidfile={STATE / 'dockerd.pid'}", f"--containerd-namespace={NAMESPACE}",
        f"--containerd-plugins-namespace={NAMESPACE}-plugins", "--bridge=none", "--iptables=false", "--ip6tables=false",
    ]  # fmt: skip
    with (STATE / "dockerd.log").open("ab") as log:
        daemon = subprocess.Popen(
            _inside("unshare", "--mount", "--propagation", "private", "sh", "-c", f"{hide}; exec {shlex.join(words)}"),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_BOUND_S
    while not run("docker", "-H", f"unix://{SOCKET}", "version", "--format", "{{.Server.Version}}", check=False):
        if daemon.poll() is not None or time.monotonic() > deadline:
            last = (STATE / "dockerd.log").read_text(errors="replace").strip().splitlines() or ["no word"]
            raise SystemExit(f"second host: its dockerd does not answer: {last[-1]}")
        time.sleep(0.2)  # why: the daemon is coming up, within START_BOUND_S


def _image() -> None:
    from fixtures.runtimes.docker_image import image_name

    name, there = image_name("cpu"), ("docker", "-H", f"unix://{SOCKET}")
    local = {k: v for k, v in os.environ.items() if k != "DOCKER_HOST"}
    asked = ["docker", "image", "inspect", "--format", "{{.Id}}", name]
    found = subprocess.run(asked, capture_output=True, text=True, env=local, check=False).stdout.strip()
    if not found:
        say(f"second host: this host's daemon has no image {name}; bring it with docker save | docker load")
        return
    if run(*there, "image", "inspect", "--format", "{{.Id}}", name, check=False).strip() == found:
        return
    with subprocess.Popen(["docker", "save", name], stdout=subprocess.PIPE, env=local) as saved:
        subprocess.run([*there, "load"], stdin=saved.stdout, stdout=subprocess.DEVNULL, check=True)


def down(*, keep: bool) -> None:
    for name in ("dockerd.pid", "sshd.pid"):
        _end(STATE / name)
    run("ip", "netns", "delete", NAMESPACE, check=False)
    run("ip", "link", "delete", LINK_HERE, check=False)  # its other end goes with it
    shutil.rmtree(STATE, ignore_errors=True)
    if not keep:
        shutil.rmtree(DATA, ignore_errors=True)


def _end(pid_file: Path) -> None:
    """SIGTERM to the process of a pid file, and wait for its end: dockerd stops its containers and takes its mounts along."""
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
        fd = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGTERM)
        deadline = time.monotonic() + STOP_BOUND_S
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.1)  # why: it is ending, within STOP_BOUND_S
    finally:
        os.close(fd)


def main(words: list[str]) -> int:
    """Entry point. Exit status 4 for bad words."""
    match words:
        case ["up"]:
            up()
        case ["env"]:
            pass
        case ["down", *more] if more in ([], ["--keep"]):
            down(keep=bool(more))
            return 0
        case _:
            print("usage: python -m tools.second_host up|env|down [--keep]", file=sys.stderr)  # noqa: T201
            return 4
    for name, value in environment().items():
        say(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
