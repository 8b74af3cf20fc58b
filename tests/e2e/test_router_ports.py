"""A peer behind a router that forwards ports on request: miniupnpd, as many home routers have it."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared.internet import Internet
from tests.support.nat_swarm import INTERNET, NatSwarm
from tests.support.swarm import wait_until

CONFIG = """
ext_ifname=wan
ext_ip=11.0.0.1
listening_ip=lan
enable_natpmp={natpmp}
enable_upnp={upnp}
secure_mode=yes
min_lifetime=10
max_lifetime=86400
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 10.0.0.0/8 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
upnp_table_name=miniupnpd
upnp_nat_table_name=miniupnpd
upnp_forward_chain=forward
upnp_nat_chain=prerouting
upnp_nat_postrouting_chain=postrouting
"""
TABLE = """
table inet miniupnpd {
    chain forward { type filter hook forward priority -5; policy accept; }
    chain prerouting { type nat hook prerouting priority dstnat; policy accept; }
    chain postrouting { type nat hook postrouting priority srcnat; policy accept; }
}
"""
"""Its own chains. The external address that it tells, 11.0.0.1, is not its own: nobody is to believe that."""

pytestmark = [
    pytest.mark.e2e, pytest.mark.slow, *INTERNET,
    pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="miniupnpd is not installed"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "num_ports"), [("natpmp", 2), ("natpmp", 1), ("upnp", 2)])
def test_the_router_forwards_the_ports_as_long_as_the_peer_is_there(
    internet: Internet, children: Supervisor, tmp_path: Path, way: str, num_ports: int
) -> None:
    """miniupnpd speaks PCP where it speaks NAT-PMP."""
    public, hidden = internet.public_host(), internet.host("restricted")
    router = internet.router_of(hidden)
    config = tmp_path / "miniupnpd.conf"
    config.write_text(CONFIG.format(**{name: "yes" if name == way else "no" for name in ("natpmp", "upnp")}))
    subprocess.run(router.command(["nft", "-f", "-"]), input=TABLE, text=True, check=True)
    pid = tmp_path / "miniupnpd.pid"
    children.start("miniupnpd", router.command(["miniupnpd", "-d", "-f", config, "-P", pid]))
    wait_until(pid.exists, 10.0, "miniupnpd")
    swarm = NatSwarm(tmp_path, children, num_stages=1)
    swarm.start_peer_on(public, 0)
    swarm.options = ["--port", "7001", "--dht-port", "7001"] if num_ports == 1 else []
    peer = swarm.start_peer_on(hidden, 0)
    assert peer.ready["endpoint"].startswith(f"{router.address}:")
    assert peer.ready["dht_addresses"][0].startswith(f"/ip4/{router.address}/tcp/")
    assert swarm.answers_from(public)["peer-2"]["reached"] == "direct"

    def forwarded() -> int:
        command = router.command(["nft", "list", "chain", "inet", "miniupnpd", "prerouting"])
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.count("dnat")

    assert forwarded() == num_ports
    peer.child.process.send_signal(signal.SIGTERM)
    wait_until(lambda: forwarded() == 0, 60.0, "the forwarding to end")
