"""A model of 24 layers in small files, and a process that imports it and prints by how many bytes its memory grew.

Run by test_run_folder.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source

NUM_LAYERS = 24


def write_model(folder: Path, width: int = 512) -> tuple[int, int]:
    """Write a model's folder, two layers to a file; return its bytes, and those of the largest file."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 256, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    square, wide = (width, width), (4 * width, width)
    shapes = {
        "self_attn.q_proj": square, "self_attn.k_proj": square, "self_attn.v_proj": square, "self_attn.o_proj": square,
        "mlp.gate_proj": wide, "mlp.up_proj": wide, "mlp.down_proj": wide[::-1], "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }  # fmt: skip
    index: dict[str, str] = {}
    sizes = list[int]()
    for first in range(0, NUM_LAYERS, 2):
        tensors = {
            f"model.layers.{layer}.{name}.weight": torch.zeros(shape)
            for layer in (first, first + 1)
            for name, shape in shapes.items()
        }
        if first == 0:
            outer = {"model.embed_tokens": (256, width), "model.norm": (width,), "lm_head": (256, width)}
            tensors |= {f"{name}.weight": torch.zeros(shape) for name, shape in outer.items()}
        save_file(tensors, folder / f"{first}.safetensors")
        index |= dict.fromkeys(tensors, f"{first}.safetensors")
        sizes.append((folder / f"{first}.safetensors").stat().st_size)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(sizes), max(sizes)


def _peak_bytes() -> int:
    # The peak is not getrusage's, because a child's includes what its parent had.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def main() -> None:
    folder = Path(sys.argv[1])
    # Code of torch that is paged in by its first use counts as memory, too.
    write_model(folder / "small", width=64)
    import_model(Source(folder / "small"), folder / "small-run", ImportOptions())
    before = _peak_bytes()
    import_model(Source(folder / "model"), folder / "run", ImportOptions())
    sys.stdout.write(f"{_peak_bytes() - before}\n")


if __name__ == "__main__":
    main()
