"""The loop of Flax's PPO example: actor, critic, environment and PRNG key in one dict.

Shows two TrainStates, the target of the critic, the carts with their poles and the PRNG key, saved
together and resumed in the middle of every episode. The two steps with the best return are kept in
addition to the last two. The environment is the well-known cart and pole, in jax. Interrupt and
repeat it: `python examples/ppo_style.py --workdir /tmp/ppo_style`.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import flaxckpt

CARTS, ACTOR_STEPS, EPOCHS, MINIBATCHES = 16, 128, 4, 4
GAMMA, LAMBDA, CLIP, TAU = 0.99, 0.95, 0.2, 0.5


class MLP(nn.Module):
    """Two dense layers."""

    outputs: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of the actions, or a value."""
        return nn.Dense(self.outputs)(nn.tanh(nn.Dense(64)(x)))


def new_carts(key: jax.Array) -> jax.Array:
    """Position, velocity, angle and angular velocity of each cart and its pole."""
    return jax.random.uniform(key, (CARTS, 4), minval=-0.05, maxval=0.05)


def env_step(env: dict, action: jax.Array, key: jax.Array) -> tuple[dict, jax.Array]:
    """Pushes the carts to the left or the right; begins anew, and says so, where a pole falls."""
    _, v, angle, spin = env["carts"].T
    push = (20 * action - 10 + 0.05 * spin**2 * jnp.sin(angle)) / 1.1
    turn = 9.8 * jnp.sin(angle) - jnp.cos(angle) * push
    turn = turn / (0.5 * (4 / 3 - 0.1 * jnp.cos(angle) ** 2 / 1.1))
    push = push - 0.05 * turn * jnp.cos(angle) / 1.1
    carts = env["carts"] + 0.02 * jnp.stack([v, push, spin, turn], axis=-1)
    done = (jnp.abs(carts[:, 0]) > 2.4) | (jnp.abs(carts[:, 2]) > 0.21) | (env["age"] >= 499)
    carts = jnp.where(done[:, None], new_carts(key), carts)
    return {"carts": carts, "age": jnp.where(done, 0, env["age"] + 1)}, done


def init(key: jax.Array, steps: int) -> dict:
    """Everything the next step depends on, before the first of `steps` steps."""
    keys = jax.random.split(key, 4)
    tx = optax.adam(optax.linear_schedule(3e-3, 0, steps * EPOCHS * MINIBATCHES))
    actor, critic = (
        TrainState.create(apply_fn=net.apply, params=net.init(k, jnp.zeros(4))["params"], tx=tx)
        for net, k in ((MLP(2), keys[0]), (MLP(1), keys[1]))
    )
    env = {"carts": new_carts(keys[2]), "age": jnp.zeros(CARTS, int)}
    return {"actor": actor, "critic": critic, "target": critic.params, "env": env, "key": keys[3]}


def play(agent: dict, key: jax.Array) -> tuple[dict, dict]:
    """Where the carts are after some steps, and what the actor saw and did on the way."""

    def act(env: dict, key: jax.Array) -> tuple[dict, dict]:
        choose, anew = jax.random.split(key)
        logits = agent["actor"].apply_fn({"params": agent["actor"].params}, env["carts"])
        action = jax.random.categorical(choose, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(CARTS), action]
        after, done = env_step(env, action, anew)
        return after, {"x": env["carts"], "action": action, "log_prob": log_prob, "done": done}

    return jax.lax.scan(act, agent["env"], jax.random.split(key, ACTOR_STEPS))


def gae_advantages(values: jax.Array, done: jax.Array) -> jax.Array:
    """Generalized advantage estimates; each step that a pole stays up is worth 1."""

    def back(advantage: jax.Array, at: tuple) -> tuple[jax.Array, jax.Array]:
        value, following, goes_on = at
        delta = 1 + GAMMA * following * goes_on - value
        return (advantage := delta + GAMMA * LAMBDA * goes_on * advantage), advantage

    steps = (values[:-1], values[1:], 1.0 - done)
    return jax.lax.scan(back, jnp.zeros(CARTS), steps, reverse=True)[1]


def loss_fn(params: dict, agent: dict, batch: dict) -> jax.Array:
    """The clipped surrogate, the error of the critic, and a bonus for variety."""
    logits = agent["actor"].apply_fn({"params": params["actor"]}, batch["x"])
    value = agent["critic"].apply_fn({"params": params["critic"]}, batch["x"])
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, batch["action"][:, None], axis=-1)[:, 0]
    ratio, advantage = jnp.exp(log_prob - batch["log_prob"]), batch["advantage"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
    error = ((value[:, 0] - batch["return"]) ** 2).mean()
    surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return 1e-3 * error - surrogate.mean() - 0.01 * entropy


@jax.jit
def train_step(agent: dict) -> tuple[dict, jax.Array]:
    """Plays, learns from that, and returns the next agent and the return of an episode."""
    key, play_key, order_key = jax.random.split(agent["key"], 3)
    env, seen = play(agent, play_key)
    everywhere = jnp.concatenate([seen["x"], env["carts"][None]])
    values = agent["critic"].apply_fn({"params": agent["target"]}, everywhere)[..., 0]
    advantage = gae_advantages(values, seen["done"])
    seen |= {"advantage": advantage, "return": advantage + values[:-1]}
    data = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), seen)
    orders = jax.vmap(jax.random.permutation, (0, None))

    def learn(agent: dict, rows: jax.Array) -> tuple[dict, None]:
        params = {name: agent[name].params for name in ("actor", "critic")}
        grads = jax.grad(loss_fn)(params, agent, jax.tree.map(lambda x: x[rows], data))
        return agent | {k: agent[k].apply_gradients(grads=grads[k]) for k in grads}, None

    rows = orders(jax.random.split(order_key, EPOCHS), CARTS * ACTOR_STEPS)
    agent, _ = jax.lax.scan(learn, agent, rows.reshape(EPOCHS * MINIBATCHES, -1))
    target = optax.incremental_update(agent["critic"].params, agent["target"], TAU)
    mean_return = jnp.minimum(seen["done"].size / seen["done"].sum(), 500)
    return agent | {"target": target, "env": env, "key": key}, mean_return


def main(workdir: str, steps: int = 60, save_every: int = 5) -> None:
    """Trains to the end, from the newest step in `workdir` if there is one."""
    every = flaxckpt.Every(steps=save_every, at=[steps - 1])
    keep = flaxckpt.Keep(last=2, best=2, metric="return", mode="max")
    with flaxckpt.CheckpointManager(workdir, save_every=every, keep=keep) as ckpt:
        agent = ckpt.restore_or_init(init, jax.random.key(0), steps)
        print("started" if ckpt.last_step is None else f"resumed from step {ckpt.last_step}")
        for step in range(ckpt.next_step, steps):
            agent, mean_return = train_step(agent)
            if ckpt(step, agent, metrics={"return": mean_return}):
                print(f"step {step}: return {mean_return:.2f}, saved", flush=True)
    print(f"kept steps {ckpt.steps()}, the best is {ckpt.best_step()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=5)
    main(**vars(parser.parse_args()))
