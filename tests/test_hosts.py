"""Hosts reach each other, are cut off, lost and start again, and leave nothing behind."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests import hosts
from tests.hosts import Host, Network


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Network, Host, Host]]:
    hosts.require()
    with hosts.network() as net:
        one = net.join("one")
        yield net, one, net.join("two", private=["/var/tmp"])
        one.serve("sleep.log", "sleep", f"79{os.getpid()}")
        folder = net._folder
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert net._token not in listed
    ps = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert f"sleep 79{os.getpid()}" not in ps
    assert not folder.exists()


def answers(host: Host, address: str, port: int) -> bool:
    script = f"import socket; socket.create_connection(('{address}', {port}), timeout=2)"
    return host.run(sys.executable, "-c", script)[0] == 0


def wait_for_answer(host: Host, address: str, port: int) -> None:
    deadline = time.monotonic() + 30
    while not answers(host, address, port):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def serve(host: Host, port: int, *options: str) -> None:
    host.serve("http.log", sys.executable, "-m", "http.server", str(port), *options)
    wait_for_answer(host, host.address, port)


def test_a_host_has_name_address_processes_memory_and_folders_of_its_own(pair):
    _, one, two = pair
    assert one.run("hostname") == (0, "one\n")
    assert two.address in one.run("getent", "hosts", "two")[1]
    sleeper = one.serve("sleep.log", "sleep", f"77{os.getpid()}")
    deadline = time.monotonic() + 30
    while f"sleep 77{os.getpid()}" not in one.processes():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert f"sleep 77{os.getpid()}" not in two.processes()
    for place, shared in (
        ("/dev/shm/mark", False),
        ("/var/tmp/mark", False),
        ("/tmp/ray/m", False),
    ):
        one.run("touch", place)
        assert (two.run("ls", place)[0] == 0) is shared, place
        one.run("rm", place)
    sleeper.kill()


def test_a_host_is_cut_off_and_lost_and_comes_back_at_its_address(pair):
    net, one, two = pair
    serve(one, 8101)
    wait_for_answer(two, one.address, 8101)
    one.cut()
    assert not answers(two, one.address, 8101)
    assert answers(one, one.address, 8101)  # its own interface is up
    one.heal()
    wait_for_answer(two, one.address, 8101)
    two.serve("sleep.log", "sleep", f"78{os.getpid()}")
    two.lose()
    assert two.processes() == []
    ps = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True).stdout
    assert f"sleep 78{os.getpid()}" not in ps
    again = net.join("two")
    assert again.address == two.address
    serve(again, 8103)
    wait_for_answer(one, again.address, 8103)
