"""How far the memory of a process grows: `python -m tests.memory_child SCENARIO DIRECTORY ...`.

Prints, as JSON, what the function of that name returns. Peaks are the kernel's VmHWM, which writing
5 to `clear_refs` resets to what is resident then.
"""

import ctypes
import functools
import gc
import json
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import flaxckpt

MIB = 1 << 20
BUDGET = 16 * MIB
TIGHT = flaxckpt.Options(chunk_bytes=MIB, max_host_bytes=BUDGET, fsync=False)
LAYOUTS = {  # rows of 1 MiB, or of a part of it; about 256 MiB each
    "mixed": [(192, MIB // 4), *[(8, MIB // 4)] * 6, *[(8, MIB // 32)] * 16],
    "one": [(256, MIB // 4)],
    "many": [(56, 1024)] * 1024,  # what is below 256 KiB is read together with others
}


def resident(field="VmRSS"):
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def settled():
    """What is resident without what the allocator holds unused: its reuse would not be seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def peak(call):
    """How many bytes more than before the process had at most during `call`, and its result."""
    before = settled()
    Path("/proc/self/clear_refs").write_text("5")
    result = call()
    return resident("VmHWM") - before, result


def where(devices):
    """Rows over so many devices; for one, nothing in particular."""
    return NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec("x")) if devices > 1 else None


def make(kind, shape):
    """An array whose memory is all there: of `numpy`, or of `jax` on the devices there are."""
    if kind == "numpy":
        return np.ones(shape, np.float32)
    ones = np.ones(shape, np.float32)
    made = jax.device_put(ones, where(jax.device_count()), may_alias=False)
    return jax.block_until_ready(made)


def tree(layout, make):
    """A state, each leaf by `make(shape)`."""
    return [make(shape) for shape in LAYOUTS[layout]]


def save(directory):
    """The growth of a default save of a jax state, until it is committed."""
    manager = flaxckpt.CheckpointManager(directory)
    manager.save(0, [make("jax", (8, 8))], wait=True)
    state = tree("mixed", functools.partial(make, "jax"))
    return peak(lambda: manager.save(1, state, wait=True))[0]


@functools.partial(jax.jit, donate_argnums=0)
def donating(state):
    """A train step that takes the memory of its state for the new one."""
    return jax.tree.map(lambda x: x + 1, state)


def train(kind, state):
    """A step that leaves nothing of the state as it was, once it is done."""
    if kind == "jax":
        return jax.block_until_ready(donating(state))
    for values in state:
        values += 1
    return state


def loop(directory, kind, saves):
    """How much further saves let a loop grow that changes the state after each of them."""
    state = tree("mixed", functools.partial(make, kind))
    keep = flaxckpt.Keep(last=1)
    manager = flaxckpt.CheckpointManager(directory, keep=keep, options=TIGHT)
    manager.save(0, [make(kind, (8, 8))], wait=True)

    def run(numbers):
        nonlocal state
        for number in numbers:
            if number:
                manager.save(number, state)
            state = train(kind, state)
        manager.wait()

    run([0])
    alone = peak(lambda: run([0] * 3))[0]
    return peak(lambda: run(range(1, int(saves) + 1)))[0] - alone


def write(directory):
    """Writes a checkpoint of each layout, and a tiny one, for the scenarios that read."""
    for layout in LAYOUTS:
        state = tree(layout, functools.partial(make, "jax"))
        flaxckpt.save(f"{directory}/{layout}", state, options=TIGHT)
    flaxckpt.save(f"{directory}/tiny", [make("jax", (8, 8))])


def restore(directory, layout, how):
    """The growth of a restore beyond what it returns."""
    dtype = jnp.bfloat16 if how == "cast" else jnp.float32
    policy = {"dtype": "cast"} if how == "cast" else {"as_numpy": how == "numpy"}

    def target(shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where(jax.device_count()))

    def call(name, shapes):
        wanted = None if how == "numpy" else [target(shape) for shape in shapes]
        path = f"{directory}/{name}"
        return jax.block_until_ready(flaxckpt.restore(path, wanted, options=TIGHT, **policy))

    call("tiny", [(8, 8)])
    grown, result = peak(lambda: call(layout, LAYOUTS[layout]))
    return grown - sum(leaf.nbytes for leaf in result)


def verify(directory, layout):
    """The growth of a check of a checkpoint."""
    flaxckpt.verify(f"{directory}/tiny")
    return peak(lambda: flaxckpt.verify(f"{directory}/{layout}", strict=True, options=TIGHT))[0]


def leaks(directory):
    """What is there after 50 saves, after 250, and after 100 restores.

    Each time the resident bytes, the open files and the threads of Python.
    """
    options = flaxckpt.Options(fsync=False)
    state = [make("jax", (64, 1024)), np.ones(1000), *[make("jax", (8,)) for _ in range(20)]]
    keep = flaxckpt.Keep(last=2)
    manager = flaxckpt.CheckpointManager(directory, keep=keep, options=options)

    def there():
        manager.wait()
        return settled(), len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    found = []
    for count in (50, 200):
        for _ in range(count):
            manager.save(manager.next_step, state)
        found.append(there())
    for count in (10, 100):
        for _ in range(count):
            manager.restore(state)
        found.append(there())
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
