"""A real pool in containers of another host's daemon, alone and spanning both hosts: seen, hurt, healed, and nothing of it left.

Needs a second host (``python -m tools.second_host up``); what ssh refuses is tried on an sshd of the test's own.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures import capabilities
from fixtures.errors import HarnessError, Untestable, UsageError
from fixtures.faults import DropLink, Fault, Freeze, Restart
from fixtures.faults import docker as faults
from fixtures.faults.docker_disk import FillDisk
from fixtures.runtimes import docker_hosts, far, sight
from fixtures.runtimes.docker_address import parse
from fixtures.runtimes.docker_audit import audit
from fixtures.runtimes.docker_client import Daemon, labelled, remove_all
from fixtures.runtimes.docker_far import FarUnit
from fixtures.runtimes.docker_files import content_volume
from fixtures.runtimes.docker_image import image_name
from fixtures.runtimes.docker_unit import ContainerUnit
from fixtures.runtimes.process import clean_dead_runs
from fixtures.runtimes.ssh_tunnel import PREFIX, Tunnel
from fixtures.stack import Stack
from fixtures.waiting import wait_for
from suite.selftest.process_helpers import PROJECT, own_state_dir
from suite.selftest.store_stack import healed_record, paused_run, store_stack

pytestmark = [pytest.mark.selftest, pytest.mark.slow]

SECOND = capabilities.second_host()
ALL_THERE = f'runtime = "docker"\ndocker_host = "{SECOND}"'
OWNERS = 'mode = "standalone"\nowners = 2'

second_host = pytest.mark.needs("second-host")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with (
        pytest.MonkeyPatch.context() as patched,
        own_state_dir(patched),
        store_stack(tmp_path_factory.mktemp("pool"), OWNERS, ALL_THERE) as running,
    ):
        yield running


@pytest.fixture
def healed(stack: Stack) -> Iterator[Stack]:
    yield stack
    assert stack.heal_all() == []


@pytest.fixture
def daemon() -> Iterator[Any]:
    there = Daemon(SECOND)
    yield there.client
    there.close()


def unit(stack: Stack, name: str) -> FarUnit:
    found = stack.handle(name)
    assert isinstance(found, FarUnit)
    return found


def left(client: Any, run: str) -> list[str]:
    """Names of what a run still has on a daemon."""
    found = client.containers.list(all=True, filters=labelled(run)) + client.volumes.list(filters=labelled(run))
    return [one.name for one in found]


def run_of(stack: Stack) -> str:
    return unit(stack, "master").marker.partition("/")[0]


# What is seen of it -------------------------------------------------------------------------------------------------
@second_host
def test_processes_sockets_and_rights_are_those_of_the_other_host(stack: Stack) -> None:
    (master,) = stack.handle("master").processes()
    assert Path(master.cmdline[0]).name == "mooncake_master"
    assert master.env["PATH"].startswith("/opt/kvgates/bin")
    assert master.pid > sight.FAR, "no number of this host's"
    assert audit(stack.units()) == []
    assert stack.snapshot_processes("owner0", "x").rss_bytes > 1 << 20
    taken = stack.snapshot_sockets("x")
    assert {line.split()[0] for line in taken.listening} == {"master", "owner0", "owner1"}
    (there,) = {unit(stack, name).address for name in ("master", "owner0", "owner1")}
    assert taken.addresses == dict.fromkeys(("master", "owner0", "owner1"), there)


@second_host
def test_a_store_there_serves_a_client_here_and_its_log_comes(stack: Stack) -> None:
    stored, read = stack.store_tool([{"op": "put", "keys": ["a", "b"], "bytes": 64}, {"op": "digest", "keys": ["a"]}])
    assert set(stored.values()) == {0}
    assert read["a"]["bytes"] == 64
    assert stack.handle("master").log_tail()
    assert stack.handle("master").read_log()


@second_host
def test_the_evidence_names_daemon_image_and_address(stack: Stack) -> None:
    (there,) = stack.runtime.facts()["daemons"]
    assert there["another_host"] is True
    assert there["image"].startswith("sha256:")
    assert there["units"] == ["e0", "master", "owner0", "owner1"]
    assert "@" not in there["daemon"]


# Faults -------------------------------------------------------------------------------------------------------------
@second_host
def test_a_paused_container_is_silent_inside(healed: Stack) -> None:
    pause = faults.Pause("owner0")
    record = pause.inject(healed)
    assert record.landed
    assert record.proof["silent_inside"] is True
    with pytest.raises(Untestable, match=r"needs docker-proc: .* is held on another host"):
        healed.handle("owner0").processes()
    assert healed.handle("owner0").alive()
    assert healed_record(healed, pause).landed
    assert healed.handle("owner0").processes()


@second_host
def test_a_pause_that_does_nothing_has_not_landed(healed: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit(healed, "owner0").container, "pause", lambda: None)
    assert not faults.Pause("owner0").inject(healed).landed


@second_host
def test_a_freeze_stops_every_process_and_one_that_does_nothing_has_not_landed(
    healed: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze = Freeze("owner0")
    assert set(freeze.inject(healed).proof["states"].values()) == {"T"}
    assert healed_record(healed, freeze).landed
    monkeypatch.setattr(far.FarSight, "signal", lambda *_: True)
    monkeypatch.setattr("fixtures.faults.signals.LANDING_BOUND_S", 0.5)
    assert not Freeze("owner0").inject(healed).landed
    monkeypatch.undo()


@second_host
@pytest.mark.parametrize(
    ("fault", "wanted"),
    [
        (faults.Disconnect("owner1"), "docker-bridge"),
        (faults.Partition("owner0", "owner1"), "docker-bridge"),
        (faults.LimitNetwork("owner0", 200_000), "docker-bridge"),
        (FillDisk("owner0"), "docker-here"),
        (DropLink("data", "owner1"), "docker-here"),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_what_needs_this_hosts_kernel_is_untestable_there(healed: Stack, fault: Fault, wanted: str) -> None:
    with pytest.raises(Untestable, match=f"needs {wanted}: "):
        fault.inject(healed)


@second_host
def test_a_unit_that_is_seen_by_nobody_is_never_taken_for_gone(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way inside breaks while the daemon says that the container runs: an error, not a dead process."""
    monkeypatch.setattr(far, "RETRY_BOUND_S", 0.3)

    def broken(*_: Any) -> None:
        raise ConnectionError("cut")

    monkeypatch.setattr(far._Link, "ask", broken)
    with pytest.raises(HarnessError, match=r"nothing inside it answers, and its daemon says that it runs .*cut"):
        stack.handle("owner0").processes()


@second_host
def test_a_restarted_container_is_the_same_with_new_processes_and_a_killed_one_is_gone(
    tmp_path: Path, state: Path
) -> None:
    with store_stack(tmp_path, OWNERS, ALL_THERE) as running:
        before = (tmp_path / "master" / "log.txt").read_bytes()
        record = faults.RestartContainer("master").inject(running)
        assert record.landed
        after = (tmp_path / "master" / "log.txt").read_bytes()
        assert after.startswith(before)
        assert after.count(before.splitlines()[1]) == 1, "docker's old log is not written again"
        assert faults.KillContainer("owner1").inject(running).landed
        assert running.handle("owner1").exit_code() == -9
        assert Restart("owner0").inject(running).landed
        assert running.runtime.stop(running.handle("owner0"), 5.0) == []


# Both hosts ---------------------------------------------------------------------------------------------------------
@pytest.mark.needs("second-host", "docker-image", "nft")
def test_a_pool_spans_two_hosts(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master and an owner here, an owner there: both are listed, hold blocks, and are told apart."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    places = f'{OWNERS}\nowner_docker_hosts = ["local", "{SECOND}"]'
    with store_stack(tmp_path, places, 'runtime = "docker"\ndocker_host = "local"') as running:
        kinds = {name: type(running.handle(name)) for name in ("master", "owner0", "owner1")}
        assert kinds == {"master": ContainerUnit, "owner0": ContainerUnit, "owner1": FarUnit}
        keys = [f"k{i}" for i in range(24)]
        stored, owners = running.store_tool([{"op": "put", "keys": keys, "bytes": 64}, {"op": "owners", "keys": keys}])
        assert set(stored.values()) == {0}
        taken = running.snapshot_sockets("x")
        held = {taken.unit_at(endpoint) for where in owners.values() for endpoint in where}
        assert held == {"owner0", "owner1"}
        assert len(set(taken.addresses.values())) == 2
        with pytest.raises(Untestable, match="needs docker-bridge: unit owner0 is on its host's network"):
            faults.Disconnect("owner0").inject(running)
        link = DropLink("data", "owner0")
        assert link.inject(running).landed
        assert healed_record(running, link).landed
        assert audit(running.units()) == []


@pytest.mark.needs("second-host", "docker-image")
@pytest.mark.parametrize(
    ("head", "program", "wanted"),
    [
        (
            'host = "192.0.2.250"\n',
            docker_hosts.REACH,
            "192.0.2.250 cannot be bound here .*set host to an address of this",
        ),
        (
            "",
            "print('Network is unreachable')",
            r"does not reach this one at \S+ \(Network is unreachable\); open the way",
        ),
        (
            "",
            docker_hosts.REACH.replace("int(sys.argv[2])", "1"),
            r"does not reach this one at \S+ \(Connection refused\)",
        ),
    ],
)
def test_a_host_that_does_not_reach_this_one_is_one_line(
    head: str, program: str, wanted: str, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(docker_hosts, "REACH", program)  # goes another way, as behind a firewall
    placed = f'{head}runtime = "docker"\ndocker_host = "local"'
    with (
        pytest.raises(UsageError, match=wanted),
        store_stack(tmp_path, f'{OWNERS}\nowner_docker_hosts = ["{SECOND}"]', placed),
    ):
        pass


class _Forward(socketserver.BaseRequestHandler):
    """One connection on to a UNIX socket, both ways."""

    def handle(self) -> None:
        with socket.socket(socket.AF_UNIX) as there:
            there.connect(str(self.server.tunnel.socket))  # type: ignore[attr-defined]
            ways = {self.request: there, there: self.request}
            while True:
                for ready in select.select(list(ways), [], [])[0]:
                    if not (data := ready.recv(1 << 16)):
                        return
                    ways[ready].sendall(data)


@second_host
def test_a_daemon_is_reached_over_tcp_too(stack: Stack, tmp_path: Path, state: Path) -> None:
    """Its own port, as far as the suite sees: here something stands in front of its socket."""
    tunnel = Tunnel(parse(SECOND))
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Forward) as server:
        server.daemon_threads = True
        server.block_on_close = False
        server.tunnel = tunnel  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"tcp://127.0.0.1:{server.server_address[1]}"
        head = f'runtime = "docker"\ndocker_host = "{url}"'
        try:
            with (
                pytest.raises(UsageError, match=r"127.0.0.1 is loopback.*set addresses"),
                store_stack(tmp_path, "", head),
            ):
                pass
            head += f'\naddresses = {{ "{url}" = "{unit(stack, "master").address}" }}'
            with store_stack(tmp_path, "", head) as running:
                assert unit(running, "master").processes()
                assert running.key_count() == 0
        finally:
            server.shutdown()
            tunnel.close()


# What stays ---------------------------------------------------------------------------------------------------------
@second_host
def test_a_copy_is_made_once_and_again_where_it_was_cut_short(tmp_path: Path, daemon: Any) -> None:
    (tmp_path / "w.bin").write_bytes(os.urandom(1000))
    image = daemon.images.get(image_name("cpu")).id
    name = content_volume(daemon, tmp_path, image, "selftest")
    try:
        assert look(daemon, image, name) == [".kvgates-complete", "w.bin"]
        look(daemon, image, name, "rm /content/w.bin")
        assert content_volume(daemon, tmp_path, image, "selftest") == name
        assert look(daemon, image, name) == [".kvgates-complete"], "nothing was copied the second time"
        look(daemon, image, name, "rm /content/.kvgates-complete")
        content_volume(daemon, tmp_path, image, "selftest")
        assert look(daemon, image, name) == [".kvgates-complete", "w.bin"]
    finally:
        daemon.volumes.get(name).remove()


def look(client: Any, image: str, volume: str, command: str = "ls -A /content") -> list[str]:
    said = client.containers.run(
        image, ["sh", "-c", command], entrypoint=[], user="0", remove=True, network_mode="none",
        volumes={volume: {"bind": "/content", "mode": "rw"}},
    )  # fmt: skip
    return sorted(said.decode().split())


@second_host
def test_a_run_in_order_leaves_nothing_there(tmp_path: Path, state: Path, daemon: Any) -> None:
    with store_stack(tmp_path, "", ALL_THERE) as running:
        run = run_of(running)
        assert len(left(daemon, run)) == 2
    assert left(daemon, run) == []
    assert not list((state / "runs").iterdir())


def killed_run(folder: Path, client: Any, how: signal.Signals, **env: str) -> str:
    """A run in small, with a paused container, and its end. Returns its id."""
    with subprocess.Popen(
        [sys.executable, "-c", paused_run(ALL_THERE), str(folder)],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
    ) as process:
        assert process.stdout is not None
        run = str(json.loads(process.stdout.readline())["run"])
        assert len(left(client, run)) == 2
        process.send_signal(how)
        process.wait()
    return run


@second_host
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_or_interrupted_leaves_nothing_there(
    how: signal.Signals, daemon: Any, state: Path, tmp_path: Path
) -> None:
    assert list((state / "s").glob(f"{PREFIX}*")) == [], (
        "the way that this test looks through is of another state directory"
    )
    run = killed_run(tmp_path, daemon, how)

    def clean() -> bool:
        clean_dead_runs(state)  # the next start; the guardian is at it as well
        gone = not list((state / "runs").glob("*.jsonl")) and not list((state / "s").glob(f"{PREFIX}*"))
        return gone and left(daemon, run) == []

    wait_for("the dead run's containers to go", clean, bound_s=60, bound_source="selftest", poll_s=0.1)


@second_host
def test_what_could_not_be_reached_is_cleaned_by_a_later_start(
    state: Path, tmp_path: Path, daemon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed while nobody comes through to its host; the journal stays until somebody does."""
    cut = tmp_path / "cut"
    program, *words = os.environ.get("KVGATES_SSH", "ssh").split()
    (tmp_path / "ssh").write_text(
        f'#!/bin/sh\nif test -e {cut}; then echo "No route to host" >&2; exit 255; fi\nexec {program} "$@"\n',
        encoding="utf-8",
    )
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("KVGATES_SSH", " ".join([str(tmp_path / "ssh"), *words]))
    with store_stack(tmp_path / "a", "", ALL_THERE) as running:
        run = run_of(running)
        hosts = running.runtime._hosts  # type: ignore[attr-defined]  # its ssh is cut off, as by a network
        (host,) = hosts
        cut.touch()
        host.daemon._tunnel._process.kill()
        host.daemon._tunnel._process.wait()
    assert len(left(daemon, run)) == 2
    assert len(list((state / "runs").glob("*.jsonl"))) == 1
    clean_dead_runs(state)  # its process lives: this one
    assert len(left(daemon, run)) == 2
    cut.unlink()
    remove_all(daemon, run)  # no later start will: this run's process lives on
    other = killed_run(tmp_path / "b", daemon, signal.SIGKILL)
    cut.touch()
    clean_dead_runs(state)
    cut.unlink()

    def clean() -> bool:
        clean_dead_runs(state)
        return left(daemon, other) == []

    wait_for("the dead run's containers to go", clean, bound_s=60, bound_source="selftest", poll_s=0.1)


@second_host
def test_a_way_that_was_cut_for_a_while_is_found_again_at_the_end(state: Path, tmp_path: Path, daemon: Any) -> None:
    with store_stack(tmp_path, "", ALL_THERE) as running:
        run = run_of(running)
        (host,) = running.runtime._hosts  # type: ignore[attr-defined]  # its ssh ends, as by a network
        host.daemon._tunnel._process.kill()
        host.daemon._tunnel._process.wait()
        with pytest.raises(HarnessError, match="the daemon does not answer"):
            running.handle("master").alive()
    assert left(daemon, run) == []
    gc.collect()  # a socket that was left open is a warning, and so an error, of this test


@second_host
def test_a_port_of_the_other_host_that_is_taken_is_one_line(stack: Stack) -> None:
    from dataclasses import replace

    launch = unit(stack, "master").launch
    with pytest.raises(UsageError, match=r"again: port \d+ of \S+ is in use; stop what listens there"):
        stack.runtime.start(replace(launch, name="again", directory=launch.directory.with_name("again")))


# ssh itself ---------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An sshd of the test's own on loopback, for this user, and a socket behind it where "docker" answers one word."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user", "stranger"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
            check=True,
            stdin=subprocess.DEVNULL,
        )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/pid\nStrictModes no\nUsePAM no\n"
        f"AuthorizedKeysFile {folder}/user.pub\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n",
        encoding="utf-8",
    )
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}", encoding="utf-8")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    program = capabilities.find_program("sshd")
    assert program is not None
    with subprocess.Popen(
        [program, "-D", "-f", str(folder / "config"), "-E", str(folder / "log")], stdin=subprocess.DEVNULL
    ) as server:
        try:
            wait_for("sshd", lambda: (folder / "pid").exists(), bound_s=10, bound_source="selftest", poll_s=0.02)
            yield {"folder": folder, "port": port}
        finally:
            server.terminate()


def ssh_command(sshd: dict[str, Any], *, key: str = "user", known: str = "known") -> str:
    folder = sshd["folder"]
    return f"ssh -F /dev/null -o IdentitiesOnly=yes -i {folder}/{key} -o UserKnownHostsFile={folder}/{known}"


@pytest.mark.needs("sshd")
@pytest.mark.parametrize(
    ("how", "path", "wanted"),
    [
        ({}, "/no/docker.sock", "no docker on that host: no socket /no/docker.sock there"),
        ({"key": "stranger"}, "", "no permission: it takes no key of this user's"),
        ({"known": "nobody"}, "", "its host key is unknown, or another than before"),
    ],
)
def test_what_a_real_sshd_refuses_is_one_line(
    sshd: dict[str, Any], monkeypatch: pytest.MonkeyPatch, how: dict[str, str], path: str, wanted: str
) -> None:
    monkeypatch.setenv("KVGATES_SSH", ssh_command(sshd, **how))
    with pytest.raises(UsageError, match=wanted) as caught:
        Daemon(f"ssh://127.0.0.1:{sshd['port']}{path}")
    assert "\n" not in str(caught.value)


@pytest.mark.needs("sshd")
def test_a_socket_where_no_docker_answers_is_one_line(sshd: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATES_SSH", ssh_command(sshd))
    monkeypatch.chdir(sshd["folder"])  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("dead.sock")
        with pytest.raises(UsageError, match=r"ssh ended without a connection|no daemon answers there"):
            Daemon(f"ssh://127.0.0.1:{sshd['port']}{sshd['folder']}/dead.sock")
    Path("dead.sock").unlink()


@pytest.mark.needs("sshd")
def test_a_tunnel_leads_to_the_socket_there_and_leaves_nothing(
    sshd: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVGATES_SSH", ssh_command(sshd))
    monkeypatch.chdir(sshd["folder"])
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("there.sock")
        server.listen()
        tunnel = Tunnel(parse(f"ssh://127.0.0.1:{sshd['port']}{sshd['folder']}/there.sock"))
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as here:
                here.connect(str(tunnel.socket))
                accepted, _ = server.accept()
                with accepted:
                    accepted.sendall(b"word")
                    assert here.recv(4) == b"word"
            tunnel.reopen()  # the same place again, after it ended
        assert tunnel.alive
        assert tunnel.socket.parent.stat().st_mode & 0o077 == 0, "nobody else may use it"
        tunnel.close()
    assert not tunnel.socket.parent.exists()
    Path("there.sock").unlink()
