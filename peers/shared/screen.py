"""The console on which programs print tables and progress."""

from rich.console import Console


class Screen(Console):
    """rich's console, but it raises BrokenPipeError when nothing reads its output, as in `swarm-status | head`."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, for which run_program ends the program. rich would raise SystemExit, which ends only
        one asyncio task."""
        raise BrokenPipeError
