"""A transformer with the shapes of GPT-2: the states M and B, and the model of the train loop."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Block(nn.Module):
    """Attention and a perceptron, each after a layer norm and added to what came in."""

    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The activations after this block."""
        width = x.shape[-1]
        qkv = nn.Dense(3 * width, name="qkv")(nn.LayerNorm()(x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, self.heads, -1), 2, 0)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += nn.Dense(width, name="proj")(attended.reshape(x.shape))
        hidden = nn.gelu(nn.Dense(4 * width, name="fc")(nn.LayerNorm()(x)))
        return x + nn.Dense(width, name="fc_proj")(hidden)


class Transformer(nn.Module):
    """A decoder; with its defaults the 124M parameters of the smallest GPT-2, in 148 leaves."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 50257
    positions: int = 1024

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The logits of the token after each of `tokens`."""
        embed = nn.Embed(self.vocab, self.width, name="wte")
        where = nn.Embed(self.positions, self.width, name="wpe")
        x = embed(tokens) + where(jnp.arange(tokens.shape[-1]))
        for _ in range(self.layers):
            x = Block(self.heads)(x)
        return embed.attend(nn.LayerNorm()(x))


# For `--quick`: 40 MB with its moments.
SMALL = Transformer(layers=1, width=288, heads=4, vocab=8192, positions=128)


def create(model: Transformer) -> TrainState:
    """The state before the first step."""
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-4))
