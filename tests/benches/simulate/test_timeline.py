"""Virtual time."""

from scripts.benches.simulate.timeline import Timeline


def test_things_happen_in_order_and_may_plan_others() -> None:
    timeline = Timeline()
    happened: list[tuple[float, str]] = []

    def note(name: str) -> None:
        happened.append((timeline.monotonic(), name))

    timeline.at(2.0, lambda: note("second"))
    timeline.at(1.0, lambda: timeline.after(3.0, lambda: note("planned by the first")))
    timeline.at(2.0, lambda: note("as early, planned later"))
    timeline.at(9.0, lambda: note("too late"))
    timeline.run(until=5.0)
    assert happened == [(2.0, "second"), (2.0, "as early, planned later"), (4.0, "planned by the first")]
    assert timeline.monotonic() == 5.0


def test_what_is_past_happens_at_once() -> None:
    timeline = Timeline()
    times: list[float] = []
    timeline.at(3.0, lambda: timeline.at(1.0, lambda: times.append(timeline.monotonic())))
    timeline.run(until=4.0)
    assert times == [3.0]
