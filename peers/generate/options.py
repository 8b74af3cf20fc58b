"""The options of swarm-generate."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from peers.shared import option_types as takes
from peers.shared.run_options import RunOptions
from swarm.generation.sampling import Sampling

PROG = "swarm-generate"
DEFAULT_ADDRESS = "127.0.0.1"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(RunOptions):
    """Have a swarm, or a model in this process, write text: for a prompt, in a conversation, or over HTTP.

    With an INVITE the run's stages write it, also while they train.
    """

    prompt: takes.Text | None = None
    """Text to continue."""
    chat: bool = False
    """Have a conversation in the terminal. A line is a message; /reset begins anew, /exit ends, and Ctrl-C stops an
    answer."""
    system: takes.Text = ""
    """What the model is told before a conversation begins."""
    serve: str | None = None
    """Answer at HOST:PORT, or at PORT of this machine alone, in the form of OpenAI's API. Needs the extra serve."""
    serve_token: str | None = None
    """What requests must bring as a bearer token; @FILE reads it from a file. Also as SWARM_SERVE_TOKEN in the
    environment."""
    serve_origin: tuple[str, ...] = ()
    """Web pages that may ask --serve from a browser, as SCHEME://HOST or SCHEME://HOST:PORT; * allows all, and needs a
    token. Left out, none may."""
    checkpoint: takes.Folder | None = None
    """Folder with checkpoints of all stages."""
    round: takes.Count | None = None
    """Round of the checkpoints; left out, the newest that is whole."""
    base: takes.FolderOrName | None = None
    """The model to which the checkpoints' adapters (LoRA) belong, as in the first peer's --model: a run folder, a
    model's folder of Hugging Face, or its name on the hub."""
    model: takes.FolderOrName | None = None
    """Run folder, a model's folder of Hugging Face, or a model on the hub, instead of checkpoints."""
    path: takes.Count | None = None
    """Of a run with several paths (stages.variants): the one that writes; left out, path 0."""
    router: takes.Folder | None = None
    """Folder with the router of these paths, as swarm-model route and export write it: the first tokens of each prompt
    choose its path. --model may be the folder with all paths' exports."""
    reroute_every: Annotated[int, takes.whole(32, takes.LARGEST_COUNT)] | None = None
    """With --router: after every so many tokens of a text, its last 32 choose the path anew. Another path computes all
    of the text once more."""
    tokenizer: takes.FolderOrName | None = None
    """bytes, a folder with a tokenizer.json, the path of one, or class:MODULE:CLASS, if it is not with the model; a
    swarm has its own, unless that is a class."""
    max_tokens: takes.Positive | None = None
    """Tokens to write at most: left out, 200 for a prompt, and 1,024 for an answer. A request may ask for another
    number."""
    sampling: tyro.conf.OmitArgPrefixes[Sampling] = field(default_factory=lambda: Sampling(temperature=0.8))
    """How tokens are chosen. Not for --serve, where requests bring their own."""
    stop: tuple[takes.Text, ...] = ()
    """Strings before which the text ends."""
    max_sequences: takes.Positive = 16
    """Texts that are written at once, with --serve; others wait."""
    cache_gib: Annotated[float, takes.number(0, 1 << 20, above=True)] = 4.0
    """Memory for the keys and values of these texts, with --serve."""
    device: str = "auto"
    """Where a model in this process computes: cpu, cuda, cuda:1, ... or mps; auto takes a GPU if there is one."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of its matrices. Left out, it is what model.autocast of its run says, and fp32 for a model's folder."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile its layers for prompts (torch.compile) before it writes, which takes a minute the first time. auto does
    so on a CUDA GPU with --serve."""
    threads: takes.Threads = 0
    """CPU threads for computing; 0 leaves the choice to PyTorch."""

    def __post_init__(self) -> None:
        takes.require_one({
            "INVITE": self.invite is not None,
            "--lan": self.lan,
            "--initial-peers ADDRESS": bool(self.initial_peers),
            "--checkpoint DIR": self.checkpoint is not None,
            "--model DIR_OR_NAME": self.model is not None,
        })  # fmt: skip
        computes = self.device != "auto" or self.dtype is not None or self.compile != "auto"
        if computes and self.checkpoint is None and self.model is None:
            raise ValueError("--device, --dtype and --compile need --checkpoint DIR or --model DIR_OR_NAME")
        if self.round is not None and self.checkpoint is None:
            raise ValueError("--round needs --checkpoint DIR: a model's folder has no rounds")
        if self.path is not None and self.router is not None:
            raise ValueError("--path excludes --router, which chooses the path")
        if self.reroute_every is not None and self.router is None:
            raise ValueError("--reroute-every needs --router DIR, which chooses paths")
        if self.base is not None and self.checkpoint is None:
            raise ValueError("--base needs --checkpoint DIR")
        takes.require_one({
            "--prompt TEXT": self.prompt is not None,
            "--chat": self.chat,
            "--serve HOST:PORT": self.serve is not None,
        })  # fmt: skip
        if self.prompt == "":
            raise ValueError("--prompt must not be empty")
        if self.system and not self.chat:
            raise ValueError("--system needs --chat")
        if self.serve_token is not None and self.serve is None:
            raise ValueError("--serve-token needs --serve HOST:PORT")
        if self.serve_origin and self.serve is None:
            raise ValueError("--serve-origin needs --serve HOST:PORT")
        for origin in self.serve_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"--serve-origin takes SCHEME://HOST, with :PORT if it has one, or *, not {origin!r}")
        if "" in self.stop:
            raise ValueError("--stop must not be empty")
        if self.serve is not None:
            _ = self.address  # which checks it

    @property
    def most_tokens(self) -> int:
        return self.max_tokens or (200 if self.prompt is not None else 1024)

    @property
    def address(self) -> tuple[str, int]:
        host, mark, port = (self.serve or "").rpartition(":")
        if not port.isdecimal() or int(port) > 65535 or (mark and not host):
            raise ValueError(f"--serve takes HOST:PORT or PORT, not {self.serve!r}")
        return host.removeprefix("[").removesuffix("]") or DEFAULT_ADDRESS, int(port)
