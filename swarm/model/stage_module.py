"""The module of one stage: its forward pass, the last stage's loss, and the weights as autocast uses them.

Nothing is kept between two forward passes.

A model of your own
-------------------
`model.custom_class = "package.module:Class"` replaces StageModule, on every peer of the run, or in the blocks of some
paths, if it is a list. The class

- is a torch.nn.Module, constructed as `Class(config, stage, layer_range)`, once for each block;
- has `forward(inputs, *, dropout_key)`, with inputs, outputs and key as in StageModule.forward without targets, which
  takes all randomness from the key (`swarm.model.masks.Dropout`), keeps nothing between calls, and changes no buffer;
- holds float32 parameters, named by their place in the whole model, so that under any cut the stages together have the
  parameters of the single-stage model; those that do not require a gradient are not trained, and follow from the seed;
  optimizer.name = "muon" steps matrices whose names begin with `layers.`, and AdamW the others;
- may have `init_parameters(seed)`, which sets every parameter to values that follow from the seed and the parameter's
  name. Without it, `initialise` does so.

With `model.bottleneck_dim` and a fixed bottleneck the residual stream consists of R trained columns, which the layers
write and the stages hand on, and of fixed columns, which every stage looks up by token (Protocol Models, arXiv
2506.01260, with the subspace of the first R columns). The model is the same under any cut, and what travels is exact.
With learned bottlenecks all columns are trained, and R numbers stand for them between two layers where a stage may end
(TransformerLayer has the formulas). A bottleneck is a part of these two layers, whether a stage ends there or not.

Shape suffixes: B samples, T positions, D model width, R the numbers that travel (D without a bottleneck), V vocabulary.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from swarm.config import ModelConfig, RunConfig
from swarm.model.adapters import trained_parameters
from swarm.model.attention import Documents, rotary_tables
from swarm.model.cache import Cache, KeyValueCache, LayerPiece
from swarm.model.functions import as_cast, whole_tables
from swarm.model.layers import Embedding, FixedColumns, Head, Positions, TransformerLayer
from swarm.model.loss import summed_loss_of_logits
from swarm.model.masks import Dropout, DropoutKey
from swarm.model.shards import Shards, Stretch, stretches

MOST_VARIANTS = 64
"""The most pieces of code that torch makes of a layer; with more it would run uncompiled. Training, evaluation and
computing again each need some, for either kind of shape."""


class StageModule(nn.Module):
    """The layers of one stage. Stage 0 also holds the embedding, and the last stage the head.

    With tied embeddings the last stage has the embedding's matrix too, for its head.
    """

    def __init__(
        self, config: RunConfig, stage: int, layer_range: range, shards: Shards | None = None, *, fused: bool = False
    ) -> None:
        """`shards` are given if the layers have a block type and other processes hold some of the shards. This module
        then has only this process's parts of the matrices, those of shards.part_of."""
        super().__init__()
        has_places = bool(config.model.bottleneck_layers) or not config.model.learns_bottlenecks
        assert has_places, "the peer that begins a run says where bottlenecks are"
        self.fused = fused
        self.compiles = False
        """Whether layers are compiled."""
        self.compiles_prompts = False
        """Whether there is compiled code for pieces of prompts, too."""
        self.model = config.model
        if config.model.block_types and shards is None:
            shards = Shards(num_shards=config.model.num_shards, num_held=config.model.num_shards)
        if shards is not None and shards.num_held < shards.num_shards and config.lora.dropout:
            raise ValueError(
                "lora.dropout is not for shards in several processes, each of which would zero other inputs"
            )
        self.shards = shards
        self.stretches = list[Stretch]() if shards is None else stretches(config.model, layer_range)
        self.is_first = stage == 0
        is_last = stage == config.stages.num_stages - 1
        has_embedding = self.is_first or (is_last and config.model.tied_embeddings)
        self.embedding = Embedding(config.model) if has_embedding else None
        has_positions = self.is_first and config.model.learns_positions
        self.positions = Positions(config.model) if has_positions else None
        self.embedding_dropout = Dropout(config.model.dropout, "embedding")
        held = config.model if shards is None else shards.held(config.model)
        self.layers = nn.ModuleDict(
            {str(layer): TransformerLayer(held, layer, shards, fused=fused) for layer in layer_range}
        )
        has_fixed_columns = any(layer.reads_fixed_columns for layer in self.layers.values())
        self.fixed_columns = FixedColumns(config.model, config.data.seed) if has_fixed_columns else None
        self.head = Head(config.model, fused=fused) if is_last else None

    def compile_layers(self) -> None:
        """Let torch.compile compile the layers at their next call. With a cache they run uncompiled, but for pieces of
        prompts if `compiles_prompts` is set.

        All layers share their code. The first shape has code of its own, and all others share one that fits any shape.
        """
        self.compiles = True
        for layer in self.layers.values():
            layer.compile()

    def forward(
        self, inputs: Tensor, *, dropout_key: DropoutKey | None = None, tokens_BT: Tensor | None = None,
        documents_BT: Tensor | None = None, cache: Cache | None = None, num_logits: int = 1,
        targets_BT: Tensor | None = None, gradient_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the stage.

        With gradient checkpointing the backward reads the parameters once more, so these must not change until then.

        Args:
            inputs: tokens_BT (int64) at stage 0, and the previous stage's hidden_BTR (float32) at later stages.
            dropout_key: names the microbatch. None turns dropout off.
            tokens_BT: int64, for later stages of a model with a bottleneck.
            documents_BT: the document of each token, if rows have several (see Documents).
            cache: when text is generated, the cache of the earlier positions; these positions are added to it.
            num_logits: with a cache, of how many positions the last stage gives logits: the last ones.
            targets_BT: int64, for the last stage, with NO_TARGET where a position has no target.
            gradient_scale: with targets, all gradients become those of the loss times this scalar.

        Returns:
            Before the last stage: hidden_BTR. At the last stage with targets: the sum of their losses in nats, a
            scalar. At the last stage without targets: logits_BTV. Always float32.
        """
        if self.compiles and torch._dynamo.config.recompile_limit != MOST_VARIANTS:
            # Set here because it counts for the present thread alone.
            torch._dynamo.config.recompile_limit = MOST_VARIANTS
        # Compiled layers have no dropout, and with a key they would be compiled once more.
        dropout_key = None if self.compiles else dropout_key
        num_positions, device = inputs.shape[1], inputs.device
        reach = cache if documents_BT is None else Documents(documents_BT)
        # Without a cache or documents, positions begin with 0.
        positions_T = (KeyValueCache(0) if reach is None else reach).next_positions(num_positions, device)
        cast_dtype = autocast_dtype(self.model)
        # If the model has no autocast of its own, an autocast of the caller stays in effect.
        with torch.autocast(inputs.device.type, cast_dtype) if cast_dtype else contextlib.nullcontext():
            hidden_BTR = self._embedded(inputs, positions_T, dropout_key) if self.is_first else inputs
            tokens_BT = inputs if self.is_first else tokens_BT
            fixed_BTC = None if self.fixed_columns is None else self.fixed_columns(tokens_BT)
            tables = rotary_tables(self.model, positions_T) if self.model.is_rotary else (None, None)
            if self.fused and tables[0] is not None:
                tables = whole_tables(*tables)
            context = (fixed_BTC, *tables, dropout_key, reach)
            run: Callable[..., Tensor] = self._run_layer
            if cache is not None:
                run = self._run_with(cache, num_positions)
            if self.shards is not None:
                hidden_BTR = self._run_spans(self.shards, run, hidden_BTR, context)
            else:
                for layer in self.layers.values():
                    hidden_BTR = run(layer, hidden_BTR, *context)
            if cache is not None:
                cache.advance(num_positions)
            if self.head is not None:
                hidden_BTR = hidden_BTR if cache is None else hidden_BTR[:, -num_logits:]
                embedding_VD = None if self.embedding is None else self.embedding.weight
                hidden_BTR = self.head(hidden_BTR, embedding_VD, targets_BT, gradient_scale)
        return hidden_BTR.float()

    def _embedded(self, tokens_BT: Tensor, positions_T: Tensor, dropout_key: DropoutKey | None) -> Tensor:
        assert self.embedding is not None
        hidden_BTR = self.embedding(tokens_BT)
        if self.positions is not None:
            hidden_BTR = self.positions(hidden_BTR, positions_T)
        embedded_BTR: Tensor = self.embedding_dropout(hidden_BTR, dropout_key)
        return embedded_BTR

    def _run_spans(
        self, shards: Shards, run: Callable[..., Tensor], hidden_BTD: Tensor, context: Sequence[object]
    ) -> Tensor:
        """Run all layers of a model with block types (shards.py)."""
        for stretch in self.stretches:
            begun_NBTD = streams_NBTD = shards.begin(hidden_BTD)
            for layer, sublayers in stretch:
                streams_NBTD = run(self.layers[str(layer)], streams_NBTD, *context, sublayers)
            hidden_BTD = hidden_BTD + shards.meet(streams_NBTD - begun_NBTD)
        return hidden_BTD

    def _run_with(self, cache: Cache, num_positions: int) -> Callable[..., Tensor]:
        if not (self.compiles_prompts and isinstance(cache, KeyValueCache)) or num_positions == 1:
            return _run_uncompiled
        # torch makes code of its own for a length of 1.
        return _run_uncompiled if cache.num_positions == 1 else functools.partial(_run_piece, cache)

    def _run_layer(self, layer: nn.Module, *arguments: object) -> Tensor:
        output_BTR: Tensor
        if self.model.gradient_checkpointing and torch.is_grad_enabled():
            # The parameters are bound here, because by the time of the backward functional_call has put others into the
            # module. The arguments are passed one by one, because neither autograd nor the code that counts what it
            # saves would look into a tuple.
            parameters = dict(layer.named_parameters())
            output_BTR = checkpoint(
                _call_with, layer, parameters, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            output_BTR = layer(*arguments)
        return output_BTR

    def product_weights(self) -> list[str]:
        """Names of the trained parameters that autocast casts, because they are used only in matrix products.

        A tied matrix is one of them, unless one stage has the whole model: there it is the embedding too, in float32.
        """
        trained = trained_parameters(self)
        names = [f"{name}.weight" for name, part in self.named_modules() if isinstance(part, nn.Linear)]
        if self.head is not None and self.head.output is None and not self.is_first:
            names.append("embedding.weight")
        return [name for name in names if name in trained]


def with_shared_casts(
    module: nn.Module, parameters: Mapping[str, Tensor], casts: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Parameters to call `module` with, such that all graphs share the weights that autocast would cast.

    torch.autocast casts float32 weights in every forward pass, and each graph keeps its casts, which take half of the
    weights' bytes. A weight that was cast beforehand is used as it is, with the same numbers and gradients. A custom
    class casts for itself.

    Args:
        casts: the casts of these parameters. The first call with these parameters fills it, and later ones use it.
    """
    types = {name: dtype for name, dtype in cast_types(module).items() if parameters[name].dtype is not dtype}
    if types and not casts:
        masters = {name: parameters[name].detach() for name in types}
        casts |= {name: torch.empty_like(master, dtype=types[name]) for name, master in masters.items()}
        torch._foreach_copy_(list(casts.values()), list(masters.values()))
    return {**parameters, **{name: as_cast(parameters[name], cast) for name, cast in casts.items()}}


def cast_types(module: nn.Module) -> dict[str, torch.dtype]:
    """The types of the parameters that all matrix products use in another type, by name. A custom class has none."""
    if not isinstance(module, StageModule) or (cast_dtype := autocast_dtype(module.model)) is None:
        return {}
    return dict.fromkeys(module.product_weights(), cast_dtype)


def autocast_dtype(model: ModelConfig) -> torch.dtype | None:
    """The type in which the model computes matrix products; None where it leaves that to its caller."""
    match model.autocast:
        case "off" | "auto":
            # A program has replaced `auto` by what its device computes in, if that is not float32.
            return None
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case other:
            assert_never(other)


def with_weights(module: StageModule, parameters: Mapping[str, Tensor]) -> StageModule:
    """A module like this one that computes with these parameters, for calls without gradients.

    No tensor is copied. functional_call would look up each parameter in each call, which takes long compared with the
    computation of one token.

    Args:
        parameters: by name; the module's own stand in for those that are missing.
    """
    own = dict(module.named_parameters())
    with torch.no_grad():
        values = own | with_shared_casts(module, parameters, {})
    # Tells deepcopy what to use as the copy of each tensor of the module.
    copies: dict[int, object] = {id(buffer): buffer for buffer in module.buffers()}
    copies |= {id(own[name]): nn.Parameter(values[name], requires_grad=False) for name in own}
    copied = copy.deepcopy(module, copies)
    if module.compiles_prompts:
        # Such code is left out when a module is copied. All share what torch has made.
        copied.compile_layers()
    return copied


def stage_loss(
    module: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor, targets_BT: Tensor, *,
    gradient_scale: Tensor | None = None, **options: object,
) -> Tensor:  # fmt: skip
    """The last stage's loss with these parameters: the sum over targets in nats, a scalar.

    A custom class gives logits, so those of all positions are in memory at once.

    Args:
        gradient_scale: a scalar; all gradients become those of the loss times this.
    """
    if isinstance(module, StageModule):
        options |= {"targets_BT": targets_BT, "gradient_scale": gradient_scale}
        loss: Tensor = functional_call(module, dict(parameters), (inputs,), options)
        return loss
    logits_BTV = functional_call(module, dict(parameters), (inputs,), options)
    loss = summed_loss_of_logits(logits_BTV, targets_BT)
    return loss if gradient_scale is None else loss.detach() + gradient_scale * (loss - loss.detach())


def _run_piece(
    cache: KeyValueCache, layer: TransformerLayer, hidden_BTR: Tensor, fixed_BTC: Tensor | None, cos_TJ: Tensor | None,
    sin_TJ: Tensor | None, key: DropoutKey | None, _: Cache, *sublayers: object,
) -> Tensor:  # fmt: skip
    piece = LayerPiece(cache.earlier(layer.site))
    lengths = [(hidden_BTR, hidden_BTR.ndim - 2), (fixed_BTC, 1), (cos_TJ, 0), (sin_TJ, 0)]
    for tensor, dimension in (*lengths, *((heads_SGK, 0) for heads_SGK in piece.earlier)):
        if tensor is not None:
            # So one piece of code fits all lengths.
            torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    output_BTR: Tensor = layer(hidden_BTR, fixed_BTC, cos_TJ, sin_TJ, key, piece, *sublayers)
    if piece.new:
        cache.add(layer.site, *piece.new)
    return output_BTR


def _run_uncompiled(layer: nn.Module, *arguments: object) -> Tensor:
    output_BTR: Tensor = layer.forward(*arguments)
    return output_BTR


def _call_with(layer: nn.Module, parameters: dict[str, Tensor], *arguments: object) -> Tensor:
    output_BTR: Tensor = functional_call(layer, parameters, arguments)
    return output_BTR
