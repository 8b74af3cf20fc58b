"""The rate of a download, and which time counts as time of sending."""

import math

from swarm.rpc.segments import Arriving


def test_time_in_which_several_send_counts_once_and_pauses_do_not_count() -> None:
    arriving = Arriving("the state", 100)
    assert arriving.bytes_per_second == math.inf
    for began_at, ended_at in ((10.0, 12.0), (1.0, 4.0), (3.0, 5.0), (1.5, 2.0)):
        arriving.timed(15, began_at, ended_at)
    assert (arriving.sending_seconds, arriving.bytes_per_second) == (6.0, 10.0)
