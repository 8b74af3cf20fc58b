"""The parts of one peer's averaging, put together: each is built from those before it.

Used by the stage peer's program, which gives them to an averager (averaging/averager).
"""

from dataclasses import dataclass
from functools import partial

from swarm.averaging import messages
from swarm.averaging.advance import Advance
from swarm.averaging.barrier import Barrier
from swarm.averaging.beginning import Beginning
from swarm.averaging.blame import Blame
from swarm.averaging.branches import Branches
from swarm.averaging.broadcast import Broadcast
from swarm.averaging.calls import Calls
from swarm.averaging.catch_up import CatchUp
from swarm.averaging.changes import Changes
from swarm.averaging.context import Context
from swarm.averaging.donor import Donor
from swarm.averaging.entry import Entry
from swarm.averaging.handlers import Handlers
from swarm.averaging.lead_loop import LeadLoop
from swarm.averaging.leader import Leader
from swarm.averaging.own_round import OwnRound
from swarm.averaging.participant import Participant
from swarm.averaging.place import KEPT_OUTCOMES, Place
from swarm.averaging.report_answers import ReportAnswers
from swarm.averaging.reporter import Reporter
from swarm.averaging.roster import Roster
from swarm.averaging.shared import SharedBlocks
from swarm.averaging.state_transfer import StateTransfer
from swarm.averaging.survey import Survey
from swarm.averaging.watch import RoundWatch
from swarm.training.round_member import RoundMember


@dataclass(frozen=True, kw_only=True)
class Parts:
    """One peer's, as far as anybody asks them from outside."""

    context: Context
    changes: Changes
    place: Place
    roster: Roster
    donor: Donor
    shared: SharedBlocks
    catch_up: CatchUp
    reporter: Reporter
    watch: RoundWatch
    leader: Leader
    lead_loop: LeadLoop
    handlers: Handlers


def put_together(context: Context, member: RoundMember) -> Parts:
    """Build all parts.

    Args:
        member: the stage, as averaging sees it.
    """
    changes = Changes(context.clock)
    place = _place(context, member)
    roster = _roster(context, place)
    donor = Donor(place, member, context.clock)
    shared = SharedBlocks(context)
    own_round = OwnRound(context, place, member)
    advance = Advance(context, place, member, own_round, shared=shared, donor=donor, roster=roster, changes=changes)
    participant = Participant(context, place, own_round, advance, shared)
    call = Calls(context, roster, participant, changes)
    survey = Survey(context, place, member, roster=roster, advance=advance, call=call, changes=changes)
    transfer = StateTransfer(
        context.transport,
        address=context.address,
        own_id=context.own_id,
        silence_seconds=context.timing.silence_seconds,
    )
    catch_up = CatchUp(
        context,
        place,
        own_round=own_round,
        advance=advance,
        transfer=transfer,
        roster=roster,
        survey=survey,
        entry=Entry(context, member),
    )
    reporter = Reporter(
        context,
        place,
        member,
        roster=roster,
        own_round=own_round,
        survey=survey,
        catch_up=catch_up,
        changes=changes,
    )
    watch = RoundWatch(context, place, member, roster=roster, reporter=reporter, changes=changes)
    barrier = Barrier(context, place, shared=shared, watch=watch, call=call, changes=changes)
    broadcast = Broadcast(call=call, is_silent=roster.is_silent, timing=context.timing)
    blame = Blame(context.own_id)
    beginning = Beginning(context, watch=watch, broadcast=broadcast, blame=blame)
    leader = Leader(
        context,
        place,
        beginning=beginning,
        broadcast=broadcast,
        barrier=barrier,
        shared=shared,
        blame=blame,
        changes=changes,
    )
    lead_loop = LeadLoop(
        context,
        place,
        roster=roster,
        own_round=own_round,
        reporter=reporter,
        watch=watch,
        leader=leader,
        changes=changes,
    )
    reports = ReportAnswers(context, place, member, roster=roster, reporter=reporter, watch=watch, changes=changes)
    handlers = Handlers(
        context,
        participant=participant,
        donor=donor,
        shared=shared,
        barrier=barrier,
        reports=reports,
        changes=changes,
    )
    return Parts(
        context=context,
        changes=changes,
        place=place,
        roster=roster,
        donor=donor,
        shared=shared,
        catch_up=catch_up,
        reporter=reporter,
        watch=watch,
        leader=leader,
        lead_loop=lead_loop,
        handlers=handlers,
    )


def _place(context: Context, member: RoundMember) -> Place:
    standing = messages.standing_of(member.progress())
    branches = Branches(
        standing,
        clock=context.clock,
        more_samples_win=context.config.averaging.quorum == "available",
        patience_seconds=context.timing.fresh_seconds,
        run_round=partial(_run_round, context),
    )
    return Place(standing, branches, num_kept=max(KEPT_OUTCOMES, context.config.averaging.num_fragments))


def _run_round(context: Context) -> int | None:
    """Synchronous: a round that at least half of the other stages' peers have reached, as they say."""
    stages = set(range(context.config.stages.num_stages)) - {context.own.stage}
    rounds = sorted(record.round for stage in stages for record in context.peers(stage))
    return rounds[len(rounds) // 2] if rounds and context.config.rounds.synchronous else None


def _roster(context: Context, place: Place) -> Roster:
    config = context.config
    return Roster(
        own=context.own,
        directory=partial(context.peers, context.own.stage),
        clock=context.clock,
        timing=context.timing,
        branches_yield=config.averaging.quorum == "available",
        round_microbatches=config.microbatches_per_round if config.rounds.synchronous else None,
        is_elsewhere=place.branches.is_elsewhere,
    )
