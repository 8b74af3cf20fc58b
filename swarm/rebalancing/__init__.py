"""Which stage a peer serves, and when it moves."""
