"""The terminal, or what stands in its place. Used where programs print tables and progress."""

from rich.console import Console


class Screen(Console):
    """rich's console, but it raises BrokenPipeError when nobody reads its output, as in `swarm-status | head`."""

    def on_broken_pipe(self) -> None:
        """Raise what run_program ends the program for. rich's SystemExit would end the printing asyncio task alone."""
        raise BrokenPipeError
