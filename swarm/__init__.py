"""Swarm: train one language model over machines that nobody controls.

This package is the library. It reads no command line and no environment and installs no signal handler;
the programs in `peers/` do that and wire its parts together.
"""

__version__ = "0.1.0"
