"""The console on which programs print tables and progress."""

from rich.console import Console


class Screen(Console):
    """rich's console, but it raises BrokenPipeError when nothing reads its output, as in `swarm-status | head`."""

    def on_broken_pipe(self) -> None:
        """Raise the error for which run_program ends the program. rich's SystemExit would end only an asyncio task."""
        raise BrokenPipeError
