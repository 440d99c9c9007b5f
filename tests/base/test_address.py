"""This host's own addresses, in a network namespace of several interfaces where that can be
made."""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import subprocess
import sys
from typing import Any

import pytest

from trainkit.base.address import local_address_in, local_address_toward, local_addresses
from trainkit.base.errors import ConfigError, TrainkitError


def test_loopback_is_here() -> None:
    here = local_addresses()
    assert ("lo", "127.0.0.1") in here
    versions = [ipaddress.ip_address(address).version for _, address in here]
    assert versions == sorted(versions)
    assert (
        local_address_in("lo")
        == local_address_in("127.0.0.0/8")
        == "127.0.0.1"
        == local_address_toward("127.0.0.1")
        == local_address_toward("localhost")
    )
    name = socket.gethostname()
    if local_address_toward(name) not in {a for _, a in here}:
        pytest.fail(f"the way to this host itself, {name}, begins elsewhere")


def test_what_is_not_here_is_an_error_that_names_what_is() -> None:
    for wanted in ("ib7", "203.0.113.0/24", "2001:db8::/32"):
        with pytest.raises(ConfigError) as error:
            local_address_in(wanted)
        assert (
            error.value.exit == 7
            and wanted in str(error.value)
            and "lo 127.0.0.1" in str(error.value)
        )
    with pytest.raises(TrainkitError, match="no-such-host") as unknown:
        local_address_toward("no-such-host.invalid")
    assert unknown.value.exit == 8


SETTING = """
ip link set lo up
for name in eth0 ib0 off0; do ip link add $name type veth peer name to-$name; done
ip addr add 10.9.0.5/24 dev eth0; ip addr add 10.8.0.5/24 dev eth0
ip -6 addr add fd00::5/64 dev eth0 nodad
ip addr add 10.7.0.5/16 dev ib0; ip addr add 10.6.0.5/16 dev off0
for name in eth0 to-eth0 ib0 to-ib0; do ip link set $name up; done
"""
PROGRAM = """
import json, sys
from trainkit.base.address import local_address_in, local_addresses, local_address_toward
from trainkit.base.errors import TrainkitError
def said(call, *words):
    try:
        return call(*words)
    except TrainkitError as error:
        return "ERROR " + str(error)
wanted = ["eth0", "ib0", "off0", "10.8.0.0/24", "10.0.0.0/8", "fd00::/16", "10.9.0.5"]
hosts = ["10.7.3.3", "10.9.0.9", "192.0.2.1"]
inside = {w: said(local_address_in, w) for w in wanted}
toward = {h: said(local_address_toward, h) for h in hosts}
print(json.dumps({"own": local_addresses(), "in": inside, "toward": toward}))
"""


@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"),
    reason="needs root, unshare and iproute2",
)
def test_among_several_interfaces() -> None:
    argv = [
        "unshare",
        "--net",
        "bash",
        "-ec",
        SETTING + 'exec "$0" -c "$1"',
        sys.executable,
        PROGRAM,
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode and ("not supported" in done.stderr or "not permitted" in done.stderr):
        pytest.skip(f"no network namespace or veth here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert ["eth0", "10.9.0.5"] in said["own"] and not [
        pair for pair in said["own"] if pair[0] == "off0" or pair[1].startswith("fe80")
    ]
    wanted = said["in"]
    assert (
        wanted["ib0"] == "10.7.0.5"
        and wanted["10.8.0.0/24"] == "10.8.0.5"
        and wanted["fd00::/16"] == "fd00::5"
        and wanted["10.9.0.5"] == "10.9.0.5"
    )
    for several in ("eth0", "10.0.0.0/8"):
        assert (
            "several" in wanted[several]
            and "10.8.0.5" in wanted[several]
            and "CIDR" in wanted[several]
        )
    assert wanted["off0"].startswith("ERROR no address")  # it is down
    assert (
        said["toward"]["10.7.3.3"] == "10.7.0.5"
        and said["toward"]["10.9.0.9"] == "10.9.0.5"
        and "no route" in said["toward"]["192.0.2.1"]
    )
