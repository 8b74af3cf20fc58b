"""Figures of other people's papers that the studies reproduce, as they were printed.

Used by swarm/simulation/studies. Only figures; what they are compared with is computed elsewhere.
"""

from collections.abc import Mapping

from swarm.simulation.plans import Training

# Streaming DiLoCo, arXiv 2501.18512, table 4 -----------------------------------------------------------------------

TRAININGS: Mapping[str, Training] = {
    "1B": Training(num_layers=24, num_parameters=1e9, step_seconds=0.1),
    "10B": Training(num_layers=48, num_parameters=1e10, step_seconds=0.8),
    "100B": Training(num_layers=108, num_parameters=1e11, step_seconds=4.9),
}
"""The table's models, with H = 100."""
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Its columns: shares of the time in which a machine shall compute."""
BANDWIDTHS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "1B": {
        "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "streaming-overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
        "streaming-overlap-fp4": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B": {
        "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "streaming-overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
        "streaming-overlap-fp4": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100B": {
        "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "streaming-overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
        "streaming-overlap-fp4": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gigabits a second that each utilisation needs, by model and method."""
GRID_START, GRID_STEP = 0.1, 10 ** (4 / 49)
"""All its bandwidths lie on a geometric grid: 50 points from 0.1 to 1000 Gbit/s, as the printed ones with three and
more digits show (86.8 is the point 36 steps above 0.1, and 569.0 that 46 above). Printed with one decimal."""

# SWARM, arXiv 2301.11913, the table on the square-cube law -----------------------------------------------------------

ROUND_TRIPS_MS = (0, 10, 50, 100, 200)
"""Its rows."""
GPU_UTILISATION: Mapping[str, tuple[float, ...]] = {
    "base": (18.0, 11.8, 4.88, 2.78, 1.53),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "GPT-3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "Ours": (89.5, 87.2, 79.5, 71.5, 59.2),
}
"""Per cent of a V100's time, by layers; over 500 Mb/s."""
LINK_MEGABITS_PER_SECOND = 500.0
"""Of that table."""
