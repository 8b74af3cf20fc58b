"""The terminal, or what stands in its place. Used where programs print tables and progress."""

from rich.console import Console


class Screen(Console):
    """rich's console, but for what it does when a reader of the output goes away, as in `swarm-status | head`."""

    def on_broken_pipe(self) -> None:
        """Leave it to run_program, which ends the program in order. SystemExit would end an event loop's task alone."""
        raise BrokenPipeError
