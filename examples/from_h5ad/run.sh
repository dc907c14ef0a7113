#!/usr/bin/env bash
# From h5ad files to a training that is killed twice, and ends on three ranks: docs/two-ranks.md explains it.
#
#   examples/from_h5ad/run.sh [FOLDER]
#
# It needs annbatch-distributed[torch], creates the folder, and exits with a nonzero code if anything fails.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-first-job}
mkdir "$folder" # fails if it exists
cd "$folder"
export CUDA_VISIBLE_DEVICES=  # on CPUs, since there may be fewer GPUs than ranks
export OMP_NUM_THREADS=1      # torchrun sets it too, but warns

# train RANKS [OPTION...]
train() {
  torchrun --standalone --nproc-per-node "$1" "$scripts/train.py" \
    --collection cells.zarr --checkpoint last.pt --hold-out d09 d10 "${@:2}"
}

# killed RANKS STEP
# Train, and kill the last rank at a step. torchrun then ends the other ranks, and fails.
killed() {
  if train "$1" --kill-at "$2" 2>torchrun.log; then
    echo "run.sh: no rank was killed at step $2" >&2 && exit 1
  fi
  grep -q SIGKILL torchrun.log || { cat torchrun.log >&2 && exit 1; }
  echo "killed at step $2"
}

python "$scripts/files.py" h5ad
annbatch-distributed collect h5ad/*.h5ad --out cells.zarr --obs cell_type donor 2>/dev/null
killed 2 50
killed 2 70 # resumes from step 40, the last checkpoint
train 3     # resumes from step 60, on three ranks
