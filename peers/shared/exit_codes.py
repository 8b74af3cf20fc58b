"""The exit codes of the programs."""

import signal

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_NO_READER = 128 + signal.SIGPIPE
