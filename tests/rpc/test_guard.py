"""Which caller may call what: real servers with real TLS, and all the services of a stage peer."""

import asyncio
import ssl
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from swarm.credentials import certificates
from swarm.credentials.identity import Identity, generate
from swarm.credentials.rights import CALLS, Role
from swarm.errors import PeerUnavailable
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import averaging_pb2, stage_pb2
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceStub
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from tests.rpc.guarded import (
    DENIED,
    READ,
    SERVED,
    SMALL,
    UNREACHABLE,
    Server,
    asking_without_taking,
    calls_of,
    code_of,
    is_served,
    methods,
)
from tests.support import locked
from tests.support.chain import eventually
from tests.support.locked import OTHER_PEER, PEER, TRAINER


def test_the_table_of_rights_has_every_call() -> None:
    ours = methods()
    assert len({name.split("/")[1] for name in ours}) == 8
    assert set(CALLS) == {*ours, "/grpc.health.v1.Health/Check"}


def test_whoever_gives_an_id_of_its_own_is_checked() -> None:
    for name, method in methods().items():
        field = method.input_type
        for part in CALLS[name].sender.split(".") if CALLS[name].sender else ():
            assert part in field.fields_by_name, name
            field = field.fields_by_name[part].message_type
        if "peer_id" in method.input_type.fields_by_name:
            assert CALLS[name].sender == "peer_id", name


async def test_a_call_that_the_table_does_not_have_is_not_served(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await start(locked.OPEN)
    name = "/swarm.rpc.v1.DirectoryService/Read"
    async with server.called_by(locked.OPEN) as channel:
        read = calls_of(channel, locked.OPEN)[name]
        assert await code_of(read()) is grpc.StatusCode.OK
        monkeypatch.delitem(CALLS, name)
        assert await code_of(read()) is grpc.StatusCode.UNIMPLEMENTED


async def _answers(server: Server, identity: Identity) -> dict[str, grpc.StatusCode]:
    async with server.called_by(identity) as channel:
        return {name: await code_of(call()) for name, call in calls_of(channel, identity).items()}


@pytest.mark.parametrize(("server", "caller"), [(PEER, OTHER_PEER), (locked.OPEN, locked.OPEN)], ids=["locked", "open"])
async def test_peers_may_call_everything_in_their_own_name(start: Any, server: Identity, caller: Identity) -> None:
    answers = await _answers(await start(server), caller)
    assert all(map(is_served, answers.values())), answers
    assert answers["/swarm.rpc.v1.AveragingService/Exchange"] is grpc.StatusCode.OK


@pytest.mark.parametrize("stage", [0, 1])
async def test_trainers_may_call_what_trainers_need(start: Any, stage: int) -> None:
    server = await start()
    server.stage = stage
    allowed = {
        name for name, call in CALLS.items() if Role.TRAINER in call.roles | (frozenset() if stage else call.at_stage_0)
    }
    for name, code in (await _answers(server, TRAINER)).items():
        # A caller that is still writing when its call ends may get an error of gRPC itself.
        refused = (DENIED, grpc.StatusCode.INTERNAL) if name.endswith("Exchange") else (DENIED,)
        assert is_served(code) if name in allowed else code in refused, name
    assert server.callers.num_bytes == 0


THIEF = replace(OTHER_PEER, key_pem=locked.OPEN.key_pem)


@pytest.mark.parametrize(
    "intruder",
    [locked.OPEN, locked.EXPIRED, locked.FOREIGN, locked.passed_on(), THIEF],
    ids=["no token", "expired", "another run", "passed on", "a stolen certificate without its key"],
)
async def test_strangers_are_not_even_heard(start: Any, intruder: Identity) -> None:
    assert set((await _answers(await start(), intruder)).values()) == {UNREACHABLE}


async def test_a_tokens_own_certificate_is_nobody(start: Any, tmp_path: Path) -> None:
    """This holds although the owner has signed it. gRPC's clients would not show a token alone, so this client is
    another one."""
    server, shown = await start(), tmp_path / "shown.pem"
    token = locked.PEER_TOKEN
    shown.write_text(certificates.to_pem(token.certificate) + certificates.key_pem(token.key))
    # The loop ends when the server hangs up. How a client hears of that depends on what it is just doing.
    with suppress(ssl.SSLError, ConnectionError):
        async with asyncio.timeout(10.0), asking_without_taking(server, READ, SMALL, shown=shown) as reader:
            await reader.read()
    assert server.directory.num_answered == 0
    shown.write_text(OTHER_PEER.certificate_pem + OTHER_PEER.key_pem)
    async with asking_without_taking(server, READ, SMALL, shown=shown):
        await eventually(lambda: server.directory.num_answered == 1)


async def test_a_connection_ends_to_be_of_use_with_its_token(start: Any) -> None:
    server = await start()
    async with server.called_by(OTHER_PEER) as channel:
        call = calls_of(channel, OTHER_PEER)["/swarm.rpc.v1.AveragingService/Begin"]
        assert await code_of(call()) is SERVED
        server.clock.later_seconds = 31 * 86_400.0
        assert await code_of(call()) is DENIED


async def test_nobody_speaks_for_another_member(start: Any) -> None:
    server = await start()
    async with server.called_by(OTHER_PEER) as channel:
        answers = {name: await code_of(call()) for name, call in calls_of(channel, PEER).items()}
    for name, code in answers.items():
        is_silent = not CALLS[name].sender
        assert is_served(code) if is_silent else code is not grpc.StatusCode.OK, name
        assert is_silent or name.endswith("/Exchange") or code is DENIED, name


# -- the other side --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server_is", [locked.OPEN, locked.FOREIGN, locked.EXPIRED, TRAINER])
async def test_members_call_nobody_but_the_peers_of_their_run(start: Any, server_is: Identity) -> None:
    server = await start(server_is)
    pool = ChannelPool(identity=PEER)
    with pytest.raises(Exception, match="is no peer of this run"):
        pool.channel(server.record)
    await pool.close()


async def test_members_call_the_very_peer_of_the_record(start: Any) -> None:
    """Another peer that the same token let in does not pass for the one of the record."""
    server = await start(OTHER_PEER)
    pool = ChannelPool(identity=PEER)
    stub: Any = StageServiceStub(pool.channel(server.record))
    assert await code_of(stub.Describe(stage_pb2.DescribeRequest(), timeout=10)) is SERVED
    claimed = {"peer_id": locked.PEER.peer_id}
    with pytest.raises(Exception, match="shows the certificate of"):
        pool.channel(server.record.model_copy(update=claimed))
    lured = server.record.model_copy(update={**claimed, "certificate_pem": PEER.certificate_pem})
    stub = StageServiceStub(pool.channel(lured))
    assert await code_of(stub.Describe(stage_pb2.DescribeRequest(), timeout=10)) is UNREACHABLE
    await pool.close()


# -- revoked tokens --------------------------------------------------------------------------------------------------


async def test_who_has_a_revoked_token_is_refused_at_once_even_in_the_middle_of_a_call(start: Any) -> None:
    own, token = locked.PEER_TOKEN.admit(generate()), locked.issue()
    server, caller = await start(own), token.admit(generate())
    assert own.authority is not None
    async with server.called_by(caller) as channel:
        exchange: Any = AveragingServiceStub(channel).Exchange(timeout=10.0)
        await exchange.write(averaging_pb2.ExchangeRequest(data=b"x"))
        calls = calls_of(channel, caller)
        assert is_served(await code_of(calls["/swarm.rpc.v1.AveragingService/Begin"]()))
        own.authority.revoke([token.token_id])
        await exchange.write(averaging_pb2.ExchangeRequest(data=b"x"))
        assert await code_of(exchange) is not grpc.StatusCode.OK
    for name, code in (await _answers(server, caller)).items():
        # A caller that is still writing when its call ends may get an error of gRPC itself.
        assert code is DENIED or (name.endswith("Exchange") and code is grpc.StatusCode.INTERNAL), name
    assert all(map(is_served, (await _answers(server, OTHER_PEER)).values()))


async def test_peers_with_a_revoked_token_are_not_called(start: Any) -> None:
    own, token = locked.PEER_TOKEN.admit(generate()), locked.issue()
    server, pool = await start(token.admit(generate())), ChannelPool(identity=own)
    stub: Any = StageServiceStub(pool.channel(server.record))
    assert await code_of(stub.Describe(stage_pb2.DescribeRequest(), timeout=10)) is SERVED
    assert own.authority is not None
    own.authority.revoke([token.token_id])
    with pytest.raises(PeerUnavailable, match="is no peer of this run: the run's owner has revoked the token 'test'"):
        pool.channel(server.record)
    await pool.close()
