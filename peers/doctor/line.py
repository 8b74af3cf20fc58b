"""Checks the lines to other peers: clocks, round trips, large packets, and rates.

It asks a few peers at once, and measures rates with one of them. The functions that judge are pure.
"""

import asyncio
import logging
import statistics
from collections.abc import Mapping, Sequence

from peers.doctor.finding import Finding, fine, not_checked, wrong
from swarm.config import RunConfig
from swarm.dht import addresses
from swarm.errors import SwarmError
from swarm.machine.clock import Clock
from swarm.machine.words import counted
from swarm.rpc.channels import ChannelPool
from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.entry import where
from swarm.rpc.meeting.check import is_node
from swarm.rpc.probe import SHORT_ALONE, Distance, Rates, measure_distance, measure_rates, passes_long
from swarm.stage.boundary import request_specs
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

MOST_PEERS = 4
"""The most peers that are asked."""
DISTANCE_SECONDS, RATE_SECONDS = 4.0, 6.0
CLOCK_SECONDS = 3.0
"""By how many seconds clocks may differ; hivemind's DHT refuses more."""
LONG_SECONDS = 1.0
"""A round trip beyond this is wrong: leases and rounds count in seconds."""
SLOW_SECONDS = 5.0
"""A line is too slow if a microbatch takes longer than this on it."""

Distances = Mapping[PeerId, Distance | str]
"""For each peer id, the distance to the peer, or text that names the peer and says why the distance is not known."""


async def distances(peers: Sequence[PeerRecord], channels: ChannelPool, clock: Clock, *, seconds: float) -> Distances:
    """Measure the distances to some peers at the same time, for `seconds`. Cancellation ends the calls."""

    async def ask(peer: PeerRecord) -> Distance | str:
        try:
            async with asyncio.timeout(seconds):
                return await measure_distance(channels.channel(peer), clock)
        except TimeoutError:
            fault = f"no answer within {seconds:.0f} s"
        except SwarmError as error:
            fault = str(error)
        return f"{peer.display_name} {where(peer.endpoint)}: {fault}"

    asked = peers[:MOST_PEERS]
    return dict(zip((PeerId(peer.peer_id) for peer in asked), await asyncio.gather(*map(ask, asked)), strict=True))


async def nodes(dht_addresses: Sequence[str]) -> dict[str, bool]:
    """For each node of the DHT with these addresses, by its endpoints: whether it answers. Cancellation ends the
    calls."""

    async def answers(address: str) -> bool:
        try:
            async with asyncio.timeout(DISTANCE_SECONDS):
                return await is_node(*addresses.place(address))
        except (OSError, TimeoutError):
            return False

    async def any_answers(node: addresses.Node) -> bool:
        return any(await asyncio.gather(*map(answers, node)))

    found = addresses.of_nodes(dht_addresses)
    names = [", ".join(endpoint_of(*addresses.place(address)) for address in node) for node in found]
    return dict(zip(names, await asyncio.gather(*map(any_answers, found)), strict=True))


async def passing(peers: Sequence[PeerRecord], channels: ChannelPool) -> list[bool]:
    """For each peer that answers: whether messages of several packets reach it and come back. Cancellation ends the
    calls."""

    async def ask(peer: PeerRecord) -> bool | None:
        try:
            return await passes_long(channels.channel(peer))
        except SwarmError as error:
            logger.debug("%s did not help: %s", peer.endpoint, error)
            return None

    answers = await asyncio.gather(*map(ask, peers))
    return [answer for answer in answers if answer is not None]


async def rates(peers: Sequence[PeerRecord], channels: ChannelPool, clock: Clock) -> Rates | str:
    """Measure the rates of the line to the first of these peers that has time for it. If none has, return text that
    says why. Cancellation ends the call."""
    fault = "nobody is there to measure it with"
    try:
        async with asyncio.timeout(RATE_SECONDS):
            for peer in peers[:MOST_PEERS]:
                try:
                    return await measure_rates(channels.channel(peer, bulk=True), clock)
                except SwarmError as error:
                    logger.debug("%s did not help: %s", peer.endpoint, error)
                    fault = str(error)
    except TimeoutError:
        fault = f"2 MB did not pass each way within {RATE_SECONDS:.0f} s"
    return fault


# -- judging -----------------------------------------------------------------------------------------------------------


def reached(found: Distances) -> list[Distance]:
    return [distance for distance in found.values() if isinstance(distance, Distance)]


def judge_peers(found: Distances) -> Finding:
    silent = [why for why in found.values() if isinstance(why, str)]
    if not found:
        return not_checked("peers", "no other peer serves")
    if not silent:
        return fine("peers", f"{len(found)} of {len(found)} that were asked answer")
    why = "; ".join(silent)
    if len(silent) < len(found):
        return fine("peers", f"{len(found) - len(silent)} of {len(found)} that were asked answer; {why}")
    return wrong("peers", f"none answers ({why}): check that this machine may open connections to them")


def judge_dht(found: Mapping[str, bool]) -> Finding:
    """Whether some of the nodes at which a peer would enter the DHT answer; each is named by its endpoints."""
    silent = [name for name, answers in found.items() if not answers]
    if not found:
        return wrong("DHT", "no peer of the run says where its DHT is entered: one has to be reached from outside")
    if len(silent) < len(found):
        text = f"{len(found) - len(silent)} of {counted(len(found), 'node')} of the run's DHT answer"
        return fine("DHT", text + (f"; no answer at {', '.join(silent)}" if silent else ""))
    return wrong(
        "DHT",
        f"no node of the run's DHT answers at {', '.join(silent)}, so no peer could join from here. Where a firewall "
        "lets out few ports, one peer with --port 443 --dht-port 443, or a swarm-meet, serves all",
    )


def judge_clock(found: Distances) -> Finding:
    answers = reached(found)
    if not answers:
        return not_checked("clock", "no peer to compare it with answers")
    offset = statistics.median(distance.clock_offset_seconds for distance in answers)
    others = "1 peer's" if len(answers) == 1 else f"those of {counted(len(answers), 'peer')}"
    if abs(offset) <= CLOCK_SECONDS:
        return fine("clock", f"within {max(0.1, abs(offset)):.1f} s of {others}")
    side = "behind" if offset > 0 else "ahead of"
    return wrong(
        "clock", f"{abs(offset):.1f} s {side} {others}: turn on time synchronisation; {CLOCK_SECONDS:.0f} s are allowed"
    )


def judge_round_trip(found: Distances) -> Finding:
    """Whether the median round trip to other peers is short enough."""
    answers = [distance.round_trip_seconds for distance in reached(found)]
    if not answers:
        return not_checked("round trip", "no peer answers")
    text = f"{1000 * min(answers):.0f} to {1000 * max(answers):.0f} ms to {counted(len(answers), 'peer')}"
    if len(answers) == 1:
        text = f"{1000 * answers[0]:.0f} ms to 1 peer"
    if statistics.median(answers) <= LONG_SECONDS:
        return fine("round trip", text)
    return wrong(
        "round trip", f"{text}: leases and rounds count in seconds; look for a nearer line, or for what fills it"
    )


def activation_bytes(config: RunConfig) -> int:
    """Bytes of a microbatch's activations at the stage where they are largest; its gradients are as large."""
    stages = range(config.stages.num_stages)
    return max(sum(spec.num_bytes for spec in request_specs(config, stage).values()) for stage in stages)


def judge_packets(passing: Sequence[bool]) -> Finding:
    """Whether messages of several packets pass. The peers that were tried here answer short messages."""
    if not passing:
        return not_checked("packets", "no peer is free to try it with")
    if any(passing):
        return fine("packets", f"of any size, to {sum(passing)} of {counted(len(passing), 'peer')}")
    return wrong("packets", f"{counted(len(passing), 'peer')} asked: {SHORT_ALONE}")


def judge_rates(found: Rates | str, config: RunConfig) -> Finding:
    if isinstance(found, str):
        return not_checked("bandwidth", found)
    slower = min(found.up_per_second, found.down_per_second)
    up, down = (f"{8e-6 * rate:.{1 if rate < 1e6 else 0}f}" for rate in (found.up_per_second, found.down_per_second))
    seconds = activation_bytes(config) / slower
    text = f"{up} Mbit/s up, {down} down: a microbatch's activations take {seconds:.1f} s"
    if seconds <= SLOW_SECONDS:
        return fine("bandwidth", text)
    return wrong("bandwidth", f"{text}: this line is too slow for the run, which would need smaller microbatches")
