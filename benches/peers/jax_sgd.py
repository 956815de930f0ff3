"""Peer benchmark: online SGD of the single-location model, written the usual way in JAX.

    python -m venv venv && venv/bin/pip install -r requirements.txt
    venv/bin/python jax_sgd.py --dimension 1000,10000              # SGD steps
    venv/bin/python jax_sgd.py --dimension 1000,10000 --normals    # random numbers alone
    venv/bin/python jax_sgd.py --prng unsafe_rbg                   # XLA's own generator: slower on a CPU
    JAX_THREEFRY_PARTITIONABLE=0 venv/bin/python jax_sgd.py        # older threefry layout: somewhat faster

Measures wall time per SGD step (one fresh sample of L x D tokens a step, float32, `jit` + `lax.scan` +
`jax.grad`), on the CPU and on one core by default, compilation excluded. `--normals` times drawing the
L x D Gaussians alone in the same scan: the floor that any simulation of full tokens by this generator pays.

Model: L=6 tokens, H=4 softmax heads, mean aggregation, no bias; F=2 spikes along the first basis vectors,
theta_f = +-nu_f with nu=(1.8, 1.5); loss |X_eps - yhat|^2 / D; eta = 1/D; time tau = steps / D.
The start has overlaps m = M0 and r = M0 M0^T + 0.25 I exactly.

One JSON line per dimension. `us_per_step_best` and `us_per_step_median` are over the timed repetitions of
`steps` steps each. In SGD mode the same run then goes on to time `--tau`, or until `--limit` seconds have
passed, and `m` (heads x features) at the time `tau` reached shows whether the heads specialise.
"""

import argparse
import json
import os
import statistics
import time

L, H, F = 6, 4, 2
NU = (1.8, 1.5)
M0 = ((0.12, 0.02), (-0.05, 0.06), (0.03, -0.1), (-0.08, -0.02))
GAMMA = 1.0


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimension", action="append", help="D, or a comma list; repeatable (1000,10000)")
    parser.add_argument("--steps", type=int, default=2000, help="steps per timed repetition (2000)")
    parser.add_argument("--repetitions", type=int, default=7, help="timed repetitions (7)")
    parser.add_argument("--cores", type=int, default=1, help="cores the process may run on (1)")
    parser.add_argument("--prng", default="threefry2x32", choices=("threefry2x32", "rbg", "unsafe_rbg"))
    parser.add_argument("--normals", action="store_true", help="time the L x D normals alone")
    parser.add_argument("--tau", type=float, default=60.0, help="time to which the final m is run (60)")
    parser.add_argument("--limit", type=float, default=45.0, help="most seconds spent on reaching tau (45)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    lists = args.dimension or ["1000,10000"]
    args.dimension = [int(d) for item in lists for d in item.split(",")]
    if min(args.dimension) < F + H or min(args.steps, args.repetitions, args.cores) < 1:
        parser.error("dimensions must be at least 6; steps, repetitions and cores at least 1")
    return args


ARGS = arguments()
# Before jax is imported: its thread pools are sized by, and inherit, the affinity mask.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGS.cores])
os.environ["JAX_PLATFORMS"] = "cpu"
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

jax.config.update("jax_default_prng_impl", ARGS.prng)


def loss(keys, tokens, eps):
    attention = jax.nn.softmax(keys @ tokens.T, axis=-1)
    prediction = attention.mean(axis=0) @ tokens
    return jnp.sum((tokens[eps] - prediction) ** 2) / tokens.shape[1]


def sgd_step(keys, rng):
    rng_eps, rng_theta, rng_tokens = jax.random.split(rng, 3)
    eps = jax.random.randint(rng_eps, (), 0, L)
    theta = jax.random.rademacher(rng_theta, (F,), jnp.float32) * jnp.array(NU)
    tokens = jax.random.normal(rng_tokens, (L, keys.shape[1])).at[eps, :F].add(theta)
    return keys - GAMMA / keys.shape[1] * jax.grad(loss)(keys, tokens, eps)


def normals_step(tokens, rng):
    return jax.random.normal(rng, tokens.shape)


def make_run(step, steps):
    @jax.jit
    def run(state, rng, first):
        def body(state, i):
            return step(state, jax.random.fold_in(rng, i)), None
        return jax.lax.scan(body, state, first + jnp.arange(steps))[0]
    return run


def initial_keys(dimension):
    keys = jnp.zeros((H, dimension)).at[:, :F].set(jnp.array(M0))
    return keys.at[:, F:F + H].set(0.5 * jnp.eye(H))


def measure(dimension):
    rng = jax.random.key(ARGS.seed)
    state = jnp.zeros((L, dimension)) if ARGS.normals else initial_keys(dimension)
    run = make_run(normals_step if ARGS.normals else sgd_step, ARGS.steps)
    jax.block_until_ready(run(state, rng, 0))  # compiles
    done, times = 0, []
    for _ in range(ARGS.repetitions):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state, rng, done))
        times.append((time.perf_counter() - start) / ARGS.steps * 1e6)
        done += ARGS.steps
    row = {"mode": "normals" if ARGS.normals else "sgd", "D": dimension, "steps": ARGS.steps,
           "repetitions": ARGS.repetitions, "us_per_step_best": round(min(times), 2),
           "us_per_step_median": round(statistics.median(times), 2), "prng": ARGS.prng, "jax": jax.__version__,
           "platform": jax.default_backend(), "threads": len(os.sched_getaffinity(0))}
    if not ARGS.normals:
        deadline = time.perf_counter() + ARGS.limit
        while done * GAMMA / dimension < ARGS.tau and time.perf_counter() < deadline:
            state = jax.block_until_ready(run(state, rng, done))
            done += ARGS.steps
        row["tau"] = round(done * GAMMA / dimension, 3)
        row["m"] = [[round(float(x), 3) for x in head] for head in state[:, :F]]
    return row


for d in ARGS.dimension:
    print(json.dumps(measure(d)), flush=True)
