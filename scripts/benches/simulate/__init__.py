"""The swarm on virtual time: scripts/simulate.

The classes that decide are the real ones, and what surrounds them is simulated (docs/simulation.md). A study asks, and
plans what happens on a timeline. In microbatches/ every microbatch goes its way; in fluid/ only the throughput of whole
stages counts, so that hundreds of peers can be followed for days.
"""
