"""Train under JAX on several processes with several devices each, with ``jit`` over a mesh instead of ``jax.pmap``.

Each process reads its own shard of the cells. Its batch is spread over its devices, and the batches of all processes
together are one global array. (For ``jax.pmap`` itself, reshape a batch instead:
``batch["X"].toarray().reshape(jax.local_device_count(), -1, loader.n_var)``.) Run it in two processes, each with two virtual CPU devices::

    python examples/jax_jit.py --process-id 0 --num-processes 2 --coordinator 127.0.0.1:9876 --collection cells.zarr &
    python examples/jax_jit.py --process-id 1 --num-processes 2 --coordinator 127.0.0.1:9876 --collection cells.zarr
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import pandas as pd
from annbatch import DatasetCollection
from jax.sharding import NamedSharding, PartitionSpec

from annbatch_distributed import StatefulLoader
from annbatch_distributed.integrations.jax import global_batch

type Weights = dict[str, jax.Array]


def main(collection: Path, label: str, epochs: int) -> None:
    """Run one process."""
    cells = DatasetCollection(collection, mode="r")
    labels = cells.obs([label])[label]
    classes = pd.Categorical(labels).categories
    loader = StatefulLoader.from_collection(
        cells,
        batch_size=32,  # of each process: a multiple of its devices
        dist_info="jax",  # each process is a rank, with any number of devices
        remainder="drop",  # jit needs batches of the same size
        mask=labels.notna(),
        seed=0,
    )
    # if the seed, mask or collection of a process differs, every process raises
    loader.check_ranks_agree()

    mesh = jax.make_mesh((jax.device_count(),), ("cells",))
    by_cells = NamedSharding(mesh, PartitionSpec("cells"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    weights: Weights = jax.device_put(
        {
            "matrix": jnp.zeros((loader.n_var, len(classes))),
            "bias": jnp.zeros(len(classes)),
        },
        everywhere,
    )

    for epoch in range(epochs):
        loader.set_epoch(epoch)  # each epoch has its own order and drops different rows
        for batch in loader:
            # the batch of each process becomes its part of global arrays
            types = classes.get_indexer(batch["obs"][label])
            whole = global_batch({"X": batch["X"], "types": types}, by_cells)
            weights, loss = step(weights, whole["X"], whole["types"])
        said = (
            loader.check_epoch_read()
        )  # raises unless all ranks read the planned rows
        if jax.process_index() == 0:
            print(
                f"{said}: loss {loss:.3f}, "
                f"batches of {len(whole['X'])} on {jax.device_count()} devices"
            )


@jax.jit
def step(
    weights: Weights, cells: jax.Array, types: jax.Array
) -> tuple[Weights, jax.Array]:
    """Take one step down the gradient of all processes' cells."""

    def loss_of(weights: Weights) -> jax.Array:
        scores = jax.nn.log_softmax(
            jnp.log1p(cells) @ weights["matrix"] + weights["bias"]
        )
        return -jnp.take_along_axis(scores, types[:, None], axis=1).mean()

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(
        lambda weight, slope: weight - 0.05 * slope, weights, gradient
    ), loss


def positive(text: str) -> int:
    """Parse a positive integer."""
    if (number := int(text)) < 1:
        msg = f"must be 1 or more, got {number}"
        raise argparse.ArgumentTypeError(msg)
    return number


def existing(text: str) -> Path:
    """Parse a path that exists."""
    if not (path := Path(text)).exists():
        msg = f"{text!r} doesn't exist"
        raise argparse.ArgumentTypeError(msg)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--process-id", type=int, required=True)
    parser.add_argument("--num-processes", type=positive, required=True)
    parser.add_argument(
        "--coordinator", required=True, help="address of process 0, as host:port"
    )
    parser.add_argument("--collection", type=existing, required=True)
    parser.add_argument("--label", default="cell_type", help="column of obs to learn")
    parser.add_argument("--epochs", type=positive, default=3)
    arguments = parser.parse_args()
    if not 0 <= arguments.process_id < arguments.num_processes:
        parser.error(
            f"argument --process-id: must be from 0 to {arguments.num_processes - 1}"
        )

    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(
        arguments.coordinator,
        arguments.num_processes,
        arguments.process_id,
        # otherwise it listens on every interface
        coordinator_bind_address=arguments.coordinator,
    )
    main(arguments.collection, arguments.label, arguments.epochs)
    jax.distributed.shutdown()
