"""A demo: a PyTorch model learns cell types on several ranks, and every row that it reads is checked.

``python -m demo --help`` lists the options.

1. `__main__` parses the options, lets `cells` check the input, and runs torchrun, which starts the ranks.
2. Every rank runs `train`: rank 0 writes the cells to a collection, then all ranks train and validate on it.
3. The ranks write the rows that they read to a folder; `report` checks and shows them.
4. With scanpy's cells, every rank also runs `resume`: an epoch that is killed on two ranks and resumed on three.

However the demo ends, its ranks end too, and the folder is removed: by the demo itself after a signal that it can
handle, and by the ranks after SIGKILL (see `train`). A demo killed before it starts ranks leaves an empty folder.
"""
