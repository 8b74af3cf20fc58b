"""What the CPU time of a command's start is compared with."""

from scripts.benches.startup import _over_import


def test_cpu_seconds_are_over_what_a_command_has_to_import() -> None:
    found = _over_import(
        {
            "import_torch_cpu_seconds": [2.0, 4.0],
            "import_hivemind_cpu_seconds": [3.0, 6.0],
            "import_trainer_cpu_seconds": [3.0, 6.0],
            "status_cpu_seconds": [1.0, 1.0],
            "status_seconds": [9.0, 9.0],
            "status_dht_cpu_seconds": [6.0, 12.0],
        }
    )
    assert {name: ratio.median for name, ratio in found.items()} == {
        "import_trainer": 1.5,
        "status": 0.375,
        "status_dht": 2.0,
    }
