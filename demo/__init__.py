"""A real job to look at: a torch model learns cell types on several ranks, and every row that it reads is checked.

``python -m demo --help`` lists the options.

1. `__main__` reads the options, has `cells` check what they name, and runs `torch.distributed.run`, which starts ranks.
2. Every rank runs `train`: rank 0 writes the cells to a collection, then all train and validate on it.
3. The ranks leave the rows that they read in a folder; `report` checks and shows them.
4. With the cells that come with scanpy, every rank also runs `resume`: an epoch that is killed on two ranks, and
   resumed on three.

However the demo is ended, its ranks end too, and the folder goes: at a signal that can be noticed the demo sees to that
itself, and when it is killed the ranks do, as `train` says. Killed before there are ranks, it leaves an empty folder.
"""
