"""The decoder: embed → expand → layers → collapse → logits. It knows no residual system by name."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from grlab import errors, residual
from grlab.layers import ngram
from grlab.layers.attention import Attention
from grlab.layers.ffn import SwiGLU
from grlab.layers.gated_delta_net import GatedDeltaNet
from grlab.layers.moe import MoE
from grlab.layers.sparse_attention import SparseAttention
from grlab.ops import remat
from grlab.ops.matmul import matmul
from grlab.ops.mesh import split_by_batch, with_whole_rows
from grlab.params import fold, normal

MIXERS = {"attention": Attention, "gdn": GatedDeltaNet, "qsa": SparseAttention}
FEED_FORWARD = {"ffn": SwiGLU, "moe": MoE}


class Context(NamedTuple):
    """What layers know of a batch beside the stream. `documents_BxT` is None where documents are one text."""

    tokens_BxT: jax.Array
    documents_BxT: jax.Array | None


class Layer(nnx.Module):
    """A token mixer and a feed-forward sublayer, each behind its site; before them, in some layers, n-grams."""

    def __init__(self, config, system: residual.Residual, mixer: str, index, key: jax.Array, make_ngram=None):
        """`make_ngram`, if given, makes the layer's n-gram embedding of a key."""
        dtype = jnp.dtype(config.compute_dtype)
        self.sublayers = (mixer, feed_forward(config))
        for k, (name, of) in enumerate(zip(self.sublayers, (MIXERS, FEED_FORWARD), strict=True)):
            setattr(self, name, of[name](config, dtype, system.initial_std, fold(key, name)))
            setattr(self, f"{name}_site", system.site(2 * index + k, fold(key, f"{name}_site")))
        if make_ngram is not None:
            self.ngram = make_ngram(fold(key, "ngram"))

    def __call__(self, stream, context: Context, system: residual.Residual):
        """(the stream after the layer, the sublayers' statistics)."""
        unwritten, statistics = self.until_last_write(stream, context, system)
        return self.write(unwritten), statistics

    def until_last_write(self, stream, context: Context, system: residual.Residual):
        """(the layer but for its last write, the sublayers' statistics).

        The stream before it may be `Unwritten` too, where no n-grams are added to it first.
        """
        mixer, feed_forward = (getattr(self, name) for name in self.sublayers)
        site, next_site = (getattr(self, f"{name}_site") for name in self.sublayers)
        if isinstance(stream, Unwritten):
            stream, x_BxTxD, gates = site.write_read(*stream, site)
        else:
            if hasattr(self, "ngram"):
                stream = system.add(stream, lambda streams_BxTxNxD: self.ngram(streams_BxTxNxD, *context))
            x_BxTxD, gates = site.read(stream)
        y_BxTxD, of_mixer = mixer(split_by_batch(x_BxTxD), context.documents_BxT)
        stream, x_BxTxD, gates = site.write_read(stream, split_by_batch(remat.keep(y_BxTxD)), gates, next_site)
        y_BxTxD, of_feed_forward = feed_forward(split_by_batch(x_BxTxD), context.documents_BxT)
        return split_by_batch(Unwritten(stream, remat.keep(y_BxTxD), gates)), of_mixer | of_feed_forward

    def write(self, unwritten: "Unwritten"):
        """The stream after the layer."""
        site = getattr(self, f"{self.sublayers[-1]}_site")
        return split_by_batch(site.write(*unwritten))


class Unwritten(NamedTuple):
    """A stream, and what is still to be written to it."""

    stream: residual.Stream
    y_BxTxD: jax.Array
    gates: residual.Gates


class Stack(nnx.Module):
    """Periods of the layer pattern that are alike: the parameters of each of its layers, stacked over the periods."""

    def __init__(self, first: int, periods: int, layers: list[Layer]):
        self.first, self.periods, self.layers = first, periods, nnx.List(layers)

    def sites(self) -> jax.Array:
        """The first sublayer of each period."""
        return 2 * (self.first + len(self.layers) * jnp.arange(self.periods))


class Decoder(nnx.Module):
    """A causal language model over tokens 0 .. vocab − 1."""

    def __init__(self, config, residual_config, vocab: int, key: jax.Array, separator: int = 0):
        """Builds the parameters.

        Args:
          config: `config.model` (configs/base.py).
          residual_config: `config.residual`.
          vocab: the number of tokens.
          key: of the initial values.
          separator: the token between two documents.

        Raises:
          UsageError: a field or a combination of fields that cannot be.
        """
        self.pattern, with_ngrams = check(config)
        self.scan, self.remat, self.remat_block = config.scan, config.remat, config.remat_block
        self.dtype = jnp.dtype(config.compute_dtype)
        self.separator = separator if config.separate_documents else None
        self.loss_weights = {"balance": config.moe.balance, "index_kl": config.qsa.loss}
        self.residual = residual.build(
            residual_config,
            width=config.width,
            layers=config.layers,
            key=fold(key, "residual"),
            norm_eps=config.norm_eps,
            compute_dtype=config.compute_dtype,
        )
        self.embedding = normal(key, "embedding", (vocab, config.width), ("vocab", "embed"), config.embed_std)
        self.head = normal(key, "head", (config.width, vocab), ("embed", "vocab"), config.width**-0.5)

        layers_key = fold(key, "layers")
        n_streams = self.residual.n_streams  # none of whose attributes may be looked up inside vmap

        def stacked(first: int, periods: int, place: int) -> Layer:
            """The layers at `place` of the periods from layer `first` on: what the scan runs over."""
            index = first + place
            make_ngram = None
            if index in with_ngrams:
                count = with_ngrams.index(index)

                def make_ngram(key):
                    return ngram.NGramEmbedding(config, vocab, n_streams, count, separator, self.dtype, key)

            def layer(i):
                layer_key = jax.random.fold_in(layers_key, i)
                return Layer(config, self.residual, self.pattern[place], i, layer_key, make_ngram)

            return nnx.vmap(layer)(index + len(self.pattern) * jnp.arange(periods))

        self.stacks = nnx.List(
            Stack(first, periods, [stacked(first, periods, place) for place in range(len(self.pattern))])
            for first, periods in runs(config.layers, len(self.pattern), with_ngrams)
        )

    def __call__(self, tokens_BxT: jax.Array) -> jax.Array:
        """The logits [B, T, V] in float32 of the token after each one."""
        return self.with_statistics(tokens_BxT)[0]

    def with_statistics(self, tokens_BxT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The logits, and the statistics of the sublayers: name -> [layers that have it], in their order."""
        table_VxD = with_whole_rows(self.embedding[...].astype(self.dtype))
        x_BxTxD = split_by_batch(table_VxD[tokens_BxT])
        stream, statistics = self.run_layers(split_by_batch(self.residual.expand(x_BxTxD)), tokens_BxT)
        x_BxTxD = split_by_batch(self.residual.collapse(stream))
        return matmul(x_BxTxD, self.head[...].astype(self.dtype), dtype=jnp.float32), statistics

    def auxiliary_loss(self, statistics: dict[str, jax.Array]) -> jax.Array | float:
        """What is minimised beside the loss: the statistics that are losses, weighted means over their layers."""
        weights = self.loss_weights.items()
        return sum(weight * jnp.mean(statistics[name]) for name, weight in weights if name in statistics)

    def run_layers(self, stream, tokens_BxT: jax.Array):
        """(the stream after all layers, the statistics by name)."""
        documents_BxT = None
        if self.separator is not None:  # it begins the document after it, as it does in the held-out windows
            documents_BxT = jnp.cumsum(tokens_BxT == self.separator, axis=1)
        context = Context(tokens_BxT, documents_BxT)
        of_layers = []  # {name: [periods]} for each layer of each stack's pattern
        for stack in self.stacks:
            stream, statistics = self._run(stack, stream, context)
            of_layers += [{k: v[i] for k, v in layer.items()} for i in range(stack.periods) for layer in statistics]
        names = dict.fromkeys(name for statistics in of_layers for name in statistics)
        return stream, {name: jnp.stack([s[name] for s in of_layers if name in s]) for name in names}

    def _run(self, stack: Stack, stream, context: Context):
        graphdefs, params = zip(*(nnx.split(layer) for layer in stack.layers), strict=True)

        def layers(params):
            return [nnx.merge(graphdef, of_layer) for graphdef, of_layer in zip(graphdefs, params, strict=True)]

        def step(stream, params, context):
            joins, statistics = isinstance(stream, Unwritten), []
            for layer in layers(params):
                run = layer.until_last_write if joins else layer
                stream, of_sublayers = run(stream, context, self.residual)
                statistics.append(of_sublayers)
            return stream, statistics

        adds = any(hasattr(layer, "ngram") for layer in stack.layers)
        if self.remat == "full" and self.scan and not adds:  # what is added beside the sublayers can not be recalled
            return _scan_packed(step, self.residual, stack.sites(), stream, params, context)

        width = sum(x.size for x in jax.tree.leaves(stream)) / context.tokens_BxT.size  # of all that a stream is
        nothing = None if adds or self.remat == "full" else self.residual.unwritten(stream)
        if nothing is not None:  # what a full recomputation begins with would be wider by an output
            stream = split_by_batch(Unwritten(stream, *nothing))
        last = jax.tree.map(lambda p: p[-1], params)

        def over(stream, stacked, run):
            return self._over(lambda stream, params: run(stream, params, context), stream, stacked)

        def again(run, times):
            # Inside a scan nothing merges the recomputation with the first computation, so the barrier is not needed.
            alone = not self.scan or times == 1
            return jax.checkpoint(run, policy=remat.POLICIES[self.remat], prevent_cse=alone)

        blocks, run = stack.periods, step
        if self.remat == "streams":
            n = width / self.embedding.shape[1]
            size = remat.periods_of_a_block(stack.periods, len(stack.layers), n, self.remat_block)
            blocks //= size
            params = jax.tree.map(lambda p: p.reshape(blocks, size, *p.shape[1:]), params)
            one = again(step, size)  # so that a block's backward pass has what is inside of one period at a time
            run = lambda stream, params, context: over(stream, params, one)  # noqa: E731
        if self.remat != "none":
            run = again(run, blocks)
        stream, statistics = over(stream, params, run)
        if self.remat == "streams":
            statistics = jax.tree.map(lambda x: x.reshape(stack.periods), statistics)
        if nothing is not None:
            stream = layers(last)[-1].write(stream)
        return stream, statistics

    def _over(self, f, stream, stacked):
        """The stream through f for each of the `stacked` parameters in turn, and what f gives beside it, stacked."""
        if self.scan:
            return jax.lax.scan(f, stream, stacked)
        found = []
        for i in range(len(jax.tree.leaves(stacked)[0])):
            stream, more = f(stream, jax.tree.map(lambda p: p[i], stacked))
            found.append(more)
        return stream, jax.tree.map(lambda *values: jnp.stack(values), *found)


def _scan_packed(step, system: residual.Residual, sites, stream, stacked, context):
    """The scan of `step` over the periods, of which the backward pass has what the system keeps of each one's input.

    With a system's default hooks it is `jax.checkpoint` with nothing saved. A packed stream may have fewer
    bits than a gradient needs, so the gradient of a period is taken between the unpacked streams.
    """

    def forward(stream, stacked, context):
        def body(packed, of_period):
            params, k = of_period
            stream, statistics = step(system.unpack(packed), params, context)
            return system.pack(stream), (system.keep(packed, k), statistics)

        packed, (kept, statistics) = jax.lax.scan(body, system.pack(stream), (stacked, sites))
        return (system.unpack(packed), statistics), (packed, kept, stacked, context)

    def backward(residuals, cotangents):
        after, kept, stacked, context = residuals

        def body(carry, of_period):
            cotangent, after = carry
            kept, params, k, of_statistics = of_period
            packed = system.recall(kept, after, k)
            _, vjp = jax.vjp(lambda stream, params: step(stream, params, context), system.unpack(packed), params)
            cotangent, of_params = vjp((cotangent, of_statistics))
            return (cotangent, packed), of_params

        cotangent, of_statistics = cotangents
        periods = (kept, stacked, sites, of_statistics)
        (cotangent, _), of_params = jax.lax.scan(body, (cotangent, after), periods, reverse=True)
        return cotangent, of_params, jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), context)

    run = jax.custom_vjp(lambda *args: forward(*args)[0])
    run.defvjp(forward, backward)
    return run(stream, stacked, context)


def token_nats(logits_BxTxV: jax.Array, targets_BxT: jax.Array) -> jax.Array:
    """−log p(target) of each token, in nats: [B, T] float32."""
    picked_BxT = jnp.take_along_axis(logits_BxTxV, targets_BxT[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits_BxTxV, axis=-1) - picked_BxT


def runs(layers: int, pattern: int, alone: list[int]) -> list[tuple[int, int]]:
    """(first layer, periods) of each stack: a period with a layer of `alone`, counted from 0, is one of its own."""
    found: list[tuple[int, int]] = []
    special = {layer // pattern for layer in alone}
    for period in range(layers // pattern):
        if found and not {period, period - 1} & special:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((period * pattern, 1))
    return found


def check(config) -> tuple[tuple[str, ...], list[int]]:
    """(the mixers of the layer pattern, the layers with n-grams counted from 0); UsageError for what cannot be."""
    for name in ("layers", "width", "norm_eps", "embed_std"):
        errors.positive(f"model.{name}", config[name])
    for group, name in (("moe", "shared"), ("moe", "balance"), ("qsa", "loss")):
        errors.not_negative(f"model.{group}.{name}", config[group][name])
    errors.not_negative("model.remat_block", config.remat_block)
    errors.one_of("model.remat", config.remat, remat.POLICIES)
    errors.one_of("model.compute_dtype", config.compute_dtype, ["float32", "bfloat16"])
    pattern = tuple(mixer.strip() for mixer in config.pattern.split(","))
    for mixer in pattern:
        errors.one_of("model.pattern", mixer, MIXERS)
        MIXERS[mixer].check(config)
    if config.layers % len(pattern):
        remedy = f"must be a multiple of the {len(pattern)} layers of model.pattern={config.pattern}"
        raise errors.UsageError("model.layers", config.layers, remedy)
    FEED_FORWARD[feed_forward(config)].check(config)
    return pattern, ngram.layers_of(config)


def feed_forward(config) -> str:
    """What follows the mixer in every layer."""
    return "moe" if config.moe.experts else "ffn"
