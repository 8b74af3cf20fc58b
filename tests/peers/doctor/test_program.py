"""swarm-doctor: what it says of a run, and of a machine without one."""

import asyncio
import dataclasses
import json
import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from peers.doctor import line
from peers.doctor import program as doctor
from peers.doctor.finding import Finding, State
from peers.doctor.options import DoctorOptions
from peers.doctor.program import in_passing
from peers.reach import inquiry
from peers.reach.own_port import answering_as_node
from peers.shared.devices import Device
from peers.shared.entrance import find_entrance
from peers.shared.room import Room
from scripts.benches.shared.ports import free_ports
from swarm import __version__
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock
from swarm.model.stage_module import StageModule
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.rpc.meeting import check
from swarm.types import PROTOCOLS, Protocols
from tests.support.shown_run import ShownRun, shown_run

CONFIG = configs.load_preset("tiny")
NEXT = Protocols(PROTOCOLS.newest, PROTOCOLS.newest + 1)
"""What the next release speaks."""
NODE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWQfGkQq4wGkyNqHUBd7HScWJGfNYsPzRUnGwkKDUdJhqZ"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set waits so long that findings do not depend on how busy the machine is."""
    monkeypatch.setattr(line, "DISTANCE_SECONDS", 60.0)
    monkeypatch.setattr(line, "RATE_SECONDS", 60.0)
    monkeypatch.setattr(inquiry, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(check, "DIAL_SECONDS", 30.0)


class Ahead(SystemClock):
    """A clock that is a minute fast."""

    def time(self) -> float:
        return super().time() + 60.0


def _options(*entries: Entry, run_id: str = CONFIG.run_id, **more: Any) -> DoctorOptions:
    invite = str(Invite.fitting(run_id, entries, is_locked=False)) if entries else None
    return DoctorOptions(invite=invite, device="cpu", **more)


async def _examine(options: DoctorOptions) -> dict[str, Finding]:
    entrance = find_entrance(options, {}, prog="swarm-doctor", clock=SystemClock())
    return {finding.what: finding for finding in await doctor.examine(options, entrance)}


async def test_a_machine_that_can_serve_is_told_so_with_figures() -> None:
    (port,) = free_ports(1)
    async with (
        answering_as_node("127.0.0.1", port),
        shown_run(CONFIG, generate(), NODE.replace("4001", str(port))) as run,
    ):
        found = await _examine(_options(run.entry))
    assert list(found) == [
        "device", "files", "memory", "disk", "version", "gRPC port", "DHT port", "DHT", "peers", "clock", "round trip",
        "packets", "bandwidth",
    ]  # fmt: skip
    assert {finding.state for finding in found.values()} == {State.FINE}
    for what in ("gRPC port", "DHT port"):
        assert re.match(r"127\.0\.0\.1:\d+ is reached from outside", found[what].text), found[what]
    assert "Mbit/s up" in found["bandwidth"].text
    assert "ms to 1 peer" in found["round trip"].text
    assert found["version"].text == f"{__version__}, of protocol {PROTOCOLS.newest}, as the run's peers have"


async def test_a_node_of_the_dht_that_no_connection_reaches_is_told_though_grpc_does() -> None:
    (port,) = free_ports(1)
    async with shown_run(CONFIG, generate(), NODE.replace("4001", str(port))) as run:
        found = await _examine(_options(run.entry))
    assert [what for what, finding in found.items() if finding.state is not State.FINE] == ["DHT"]
    assert found["DHT"].state is State.WRONG
    assert found["DHT"].text.startswith(f"no node of the run's DHT answers at 127.0.0.1:{port}, so no peer could join")


async def test_what_is_wrong_says_what_to_change() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        async with shown_run(CONFIG, generate(), NODE, clock=Ahead(), protocols=NEXT) as run:
            found = await _examine(_options(run.entry, host="127.0.0.1", port=port))
    assert "60.0 s behind 1 peer's: turn on time synchronisation" in found["clock"].text
    assert f"1 peer of the run with protocol {NEXT.newest}: they train together; update this" in found["version"].text
    assert f"--port {port} cannot be had: Address already in use; choose another port" in found["gRPC port"].text
    wrong = {what for what, finding in found.items() if finding.state is State.WRONG}
    assert wrong == {"clock", "gRPC port", "DHT"}


async def test_a_class_of_the_run_s_own_is_measured_once_the_user_allows_it() -> None:
    name = f"{StageModule.__module__}:{StageModule.__qualname__}"
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, custom_class=name))
    async with shown_run(config, generate(), NODE) as run:
        strange, allowed = [
            await _examine(_options(run.entry, run_id=config.run_id, allow_class=names)) for names in ((), (name,))
        ]
    for what in ("memory", "disk"):
        assert (strange[what].state, allowed[what].state) == (State.NOT_CHECKED, State.FINE)
    assert strange["memory"].text.endswith(f"if you trust that code, add --allow-class {name}")
    assert re.match(r"a stage takes \S+ MiB to \S+ MiB or more, and \S+ GiB of cpu are there", allowed["memory"].text)


async def test_a_class_that_is_not_here_is_wrong() -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, custom_class="no.such:Class"))
    async with shown_run(config, generate(), NODE) as run:
        found = await _examine(_options(run.entry, run_id=config.run_id, allow_class=("no.such:Class",)))
    assert found["memory"].state is State.WRONG
    assert found["memory"].text.startswith("model.custom_class 'no.such:Class' cannot be imported")


def test_lines_and_json_and_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("device", State.FINE, "cpu"), Finding("ports", State.NOT_CHECKED, "nobody asked")]

    async def examine(*_: object) -> list[Finding]:
        return findings

    monkeypatch.setattr(doctor, "examine", examine)
    assert doctor.main([]) == 0
    assert capsys.readouterr().out == "device      fine         cpu\nports       not checked  nobody asked\n"
    findings.append(Finding("clock", State.WRONG, "behind: set it"))
    assert doctor.main(["--json"]) == 1
    shown = json.loads(capsys.readouterr().out)
    assert shown["fine"] is False
    assert shown["findings"][2] == {"what": "clock", "state": "wrong", "text": "behind: set it"}


# -- while a peer joins ------------------------------------------------------------------------------------------------


async def _in_passing(run: ShownRun, **plan: Any) -> list[Finding]:
    options = _options(run.entry, **plan)
    entrance = find_entrance(options, {}, prog="swarm-doctor", clock=SystemClock())
    async with entrance.asking(SystemClock()) as (member, _):
        await member.known.look(member.directory, member.blocks)
        room = Room.of(Device(name="cpu", free_bytes=8 << 30), member, CONFIG, None)
        return await in_passing(options, room.each, None, member)


async def test_a_peer_that_joins_is_told_only_what_is_wrong(tmp_path: Path) -> None:
    async with shown_run(CONFIG, generate(), NODE) as run:
        assert await _in_passing(run, checkpoint=tmp_path, keep_checkpoints=1) == []
        (disk,) = await _in_passing(run, checkpoint=tmp_path, keep_checkpoints=10**9)
        assert " and 1000000001 checkpoints take " in disk.text, "the next one is there before the oldest goes"
    async with shown_run(CONFIG, generate(), NODE, clock=Ahead()) as run:
        assert [finding.what for finding in await _in_passing(run)] == ["clock"]


async def test_a_frozen_peer_does_not_hold_up_one_that_joins(caplog: pytest.LogCaptureFixture) -> None:
    """The frozen peer's kernel takes connections, but no process answers."""
    with socket.create_server(("127.0.0.1", 0)) as frozen, caplog.at_level(logging.DEBUG):
        channels, record = ChannelPool(insecure=True), None
        async with shown_run(CONFIG, generate(), NODE) as run:
            entrance = find_entrance(_options(run.entry), {}, prog="swarm-doctor", clock=SystemClock())
            async with entrance.asking(SystemClock()) as (member, _):
                await member.known.look(member.directory, member.blocks)
                [record] = member.known.everyone()
        silent = record.model_copy(update={"endpoint": f"127.0.0.1:{frozen.getsockname()[1]}", "certificate_pem": ""})
        async with asyncio.timeout(10.0):
            found = await line.distances([silent], channels, SystemClock(), seconds=0.3)
        await channels.close()
    assert found == {silent.peer_id: f"first at {silent.endpoint}: no answer within 0 s"}
