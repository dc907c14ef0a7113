#!/usr/bin/env bash
# From h5ad files to a training that is killed twice, and ends on three ranks: docs/two-ranks.md explains it.
#
#   examples/from_h5ad/run.sh [FOLDER]
#
# It needs annbatch-distributed[torch], makes the folder, and ends with another code than 0 if anything is wrong.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-first-job}
mkdir "$folder" # an error, if it is there
cd "$folder"
export OMP_NUM_THREADS=1 # as torchrun sets it, with a warning

# train RANKS [OPTION...]
train() {
  torchrun --standalone --nproc-per-node "$1" "$scripts/train.py" \
    --collection cells.zarr --checkpoint last.pt --hold-out d09 d10 "${@:2}"
}

# killed RANKS STEP
# The same, where the last rank is killed at a step. torchrun then ends the others, and fails.
killed() {
  if train "$1" --kill-at "$2" 2>torchrun.log; then
    echo "run.sh: nobody was killed at step $2" >&2 && exit 1
  fi
  grep -q SIGKILL torchrun.log || { cat torchrun.log >&2 && exit 1; }
  echo "killed at step $2"
}

python "$scripts/files.py" h5ad
annbatch-distributed collect h5ad/*.h5ad --out cells.zarr --obs cell_type donor 2>/dev/null
killed 2 50
killed 2 70 # resumes from step 40, the last checkpoint
train 3     # resumes from step 60, on one rank more
