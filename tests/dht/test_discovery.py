"""Which run there is, over an in-memory DHT on manual time."""

import dataclasses

import pytest

from swarm import __version__
from swarm.config import DataConfig, ModelConfig, RunConfig, to_json
from swarm.credentials import identity
from swarm.credentials.identity import Identity
from swarm.dht import keys
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_config, discover_runs
from swarm.dht.records import seal
from swarm.errors import IncompatibleVersion
from swarm.types import PROTOCOLS, Protocols, RunRecord
from tests.support import locked
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore

OURS, THEIRS = identity.generate(), identity.generate()
RUN = "run.0123"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(clock)


CONFIG = RunConfig()


async def _publish(store: MemoryStore, who: Identity, run_id: str, clock: ManualClock, config_json: str) -> None:
    record = RunRecord(peer_id=who.peer_id, config_json=config_json)
    await Directory(store, who, run_id, clock).announce(record, 60)


async def test_a_run_without_sizes_is_refused(store: MemoryStore, clock: ManualClock) -> None:
    """Nobody could divide it into microbatches."""
    config = dataclasses.replace(CONFIG, data=DataConfig(microbatch_size=0))
    await _publish(store, OURS, config.run_id, clock, to_json(config))
    with pytest.raises(ValueError, match="leaves out sizes"):
        await discover_config(store, clock, address="/x")


async def test_several_runs_are_listed(store: MemoryStore, clock: ManualClock) -> None:
    other = dataclasses.replace(CONFIG, model=ModelConfig(num_layers=8))
    await _publish(store, OURS, CONFIG.run_id, clock, to_json(CONFIG))
    await _publish(store, THEIRS, other.run_id, clock, to_json(other))
    first, second = sorted([CONFIG.run_id, other.run_id])
    with pytest.raises(ValueError, match=f"^several runs share the DHT at /x: {first}, {second};"):
        await discover_config(store, clock, address="/x")


async def test_all_runs_are_found_if_that_is_asked_and_the_named_one_comes_first(
    store: MemoryStore, clock: ManualClock
) -> None:
    others = [dataclasses.replace(CONFIG, run=f"run-{number}") for number in range(5)]
    for config in (*others, CONFIG):
        await _publish(store, identity.generate(), config.run_id, clock, to_json(config))
    runs = [config.run_id for config in await discover_runs(store, clock, address="/x")]
    assert runs == sorted([CONFIG.run_id, *(config.run_id for config in others)])
    for named in (CONFIG, others[3]):
        run = named.run_id.rpartition(".")[2]
        first, *rest = await discover_runs(store, clock, address="/x", run=run)
        assert first == named
        assert len(rest) == 5


async def test_nonsense_hides_no_run(store: MemoryStore, clock: ManualClock) -> None:
    await _publish(store, THEIRS, RUN, clock, '{"model": {"num_heads": 0}}')
    with pytest.raises(ValueError, match=r"^the configuration of the run at /x: model"):
        await discover_config(store, clock, address="/x")
    await _publish(store, OURS, CONFIG.run_id, clock, to_json(CONFIG))
    assert await discover_config(store, clock, address="/x") == CONFIG


@pytest.mark.parametrize(
    ("spoken", "advice"),
    [
        (Protocols(PROTOCOLS.newest + 1, PROTOCOLS.newest + 2), ""),
        (Protocols(1, PROTOCOLS.oldest - 1), ", or update these"),
    ],
)
async def test_a_run_of_a_release_without_a_protocol_in_common(
    store: MemoryStore, clock: ManualClock, spoken: Protocols, advice: str
) -> None:
    record = RunRecord(
        peer_id=THEIRS.peer_id, protocol_version=spoken.newest, oldest_protocol=spoken.oldest, config_json="{}"
    )
    await store.store(keys.RUNS, THEIRS.peer_id, seal(THEIRS, keys.RUNS, record, 1060.0), 1060.0)
    with pytest.raises(IncompatibleVersion) as error:
        await discover_config(store, clock, address="/x")
    assert str(error.value) == (
        f"the run at /x speaks protocol {spoken}, and this release of swarm, {__version__}, speaks {PROTOCOLS}: "
        f"install the release that its peers have{advice}"
    )


@pytest.mark.parametrize(
    ("used", "fault"),
    [
        ('{"telepathy": true}', "unknown key 'model.telepathy'"),
        ('{"bottleneck": "telepathic"}', "model.bottleneck: Input should be 'fixed', .*"),
    ],
)
async def test_a_run_that_uses_what_only_the_next_release_has(
    store: MemoryStore, clock: ManualClock, used: str, fault: str
) -> None:
    await _publish(store, THEIRS, RUN, clock, f'{{"model": {used}}}')
    with pytest.raises(ValueError, match=rf"{fault}; this release does not have it yet: install"):
        await discover_config(store, clock, address="/x")


# -- locked runs -------------------------------------------------------------------------------------------------------

OWNED = dataclasses.replace(CONFIG, owner=locked.OWNER.authority.fingerprint)
OTHERS = dataclasses.replace(CONFIG, owner=locked.STRANGER.authority.fingerprint)


@pytest.fixture
def now() -> ManualClock:
    return ManualClock(locked.NOW.timestamp())


async def _published(now: ManualClock, *statements: tuple[identity.Identity, RunConfig]) -> MemoryStore:
    store = MemoryStore(now)
    for who, config in statements:
        await _publish(store, who, config.run_id, now, to_json(config))
    return store


async def test_nobody_takes_a_locked_run_over(now: ManualClock) -> None:
    """A stranger cannot take over the run with another configuration, nor with the same one, nor as a trainer."""
    taken_over = dataclasses.replace(OWNED, model=ModelConfig(num_layers=8))
    store = await _published(
        now, (locked.OPEN, CONFIG), (locked.FOREIGN, taken_over), (locked.TRAINER, taken_over), (OURS, OTHERS),
        (locked.PEER, OWNED),
    )  # fmt: skip
    assert await discover_config(store, now, address="/x", authority=locked.OWNER.authority) == OWNED


async def test_without_a_token_a_locked_run_is_named_as_such(now: ManualClock) -> None:
    store = await _published(now, (locked.PEER, OWNED))
    with pytest.raises(ValueError, match=r"^the run at /x is locked: .*join with /x#TOKEN$"):
        await discover_config(store, now, address="/x")


@pytest.mark.parametrize(
    ("publisher", "config", "theirs"), [(locked.OPEN, CONFIG, "is open"), (locked.FOREIGN, OTHERS, "is owned by")]
)
async def test_a_token_for_another_run_is_refused(
    now: ManualClock, publisher: identity.Identity, config: RunConfig, theirs: str
) -> None:
    store = await _published(now, (publisher, config))
    with pytest.raises(ValueError, match=f"^the token is for the run of owner .*, and the run at /x {theirs}"):
        await discover_config(store, now, address="/x", authority=locked.OWNER.authority)


async def test_all_runs_are_those_that_the_token_is_good_for(now: ManualClock) -> None:
    store = await _published(now, (locked.PEER, OWNED), (locked.FOREIGN, OTHERS), (locked.OPEN, CONFIG))
    assert await discover_runs(store, now, address="/x") == [CONFIG]
    assert await discover_runs(store, now, address="/x", authority=locked.OWNER.authority) == [OWNED]
    with pytest.raises(ValueError, match=r"^the run at /x is locked"):
        await discover_runs(await _published(now, (locked.PEER, OWNED)), now, address="/x")
    both_locked = await _published(now, (locked.PEER, OWNED), (locked.FOREIGN, OTHERS))
    with pytest.raises(ValueError, match=r"^the run at /x is locked"):
        await discover_runs(both_locked, now, address="/x", run=OWNED.run_id.rpartition(".")[2])
