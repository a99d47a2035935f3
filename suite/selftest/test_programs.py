"""The programs that set-up brings along: fetched without a service, and a message where they cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import programs

pytestmark = pytest.mark.selftest


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Debian host with apt and without etcd and nft."""
    here = {"apt-get", "dpkg-deb"}
    monkeypatch.setattr(
        "tools.programs.shutil.which", lambda name, path=None: f"/usr/bin/{name}" if name in here else None
    )


def test_nothing_to_be_had_is_a_message_each_and_no_error(bare: None, tmp_path: Path) -> None:
    missing = programs.provide(tmp_path, lambda command, folder: False)
    assert [line.split(":")[0] for line in missing] == ["no etcd", "no nft"]
    assert all("UNTESTABLE" in line for line in missing)


def test_without_root_nothing_is_installed(bare: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr("os.geteuid", lambda: 1000)

    def run(command: list[str], folder: Path) -> bool:
        asked.append(command)
        return False

    programs.provide(tmp_path, run)
    assert asked == [["apt-get", "download", "etcd-server"]]


def test_etcd_is_taken_out_of_its_package(bare: None, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()

    def run(command: list[str], folder: Path) -> bool:
        if command[:2] == ["apt-get", "download"]:
            (folder / "etcd-server_3.4_amd64.deb").write_bytes(b"")
        if command[0] == "dpkg-deb":
            program = folder / "package" / "usr" / "bin" / "etcd"
            program.parent.mkdir(parents=True)
            program.write_bytes(b"etcd itself")
        assert command[:2] != ["apt-get", "install"] or command[-1] == "nftables"
        return True

    assert programs.provide(tmp_path, run) == []
    assert (tmp_path / "bin" / "etcd").read_bytes() == b"etcd itself"
