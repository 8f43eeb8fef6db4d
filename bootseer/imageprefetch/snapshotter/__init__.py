"""A containerd proxy snapshotter: containers of stock images over lazily mounted trees.

Terms: a *snapshot* is a tree with a name; *active* snapshots are written to, *views* only read,
*committed* ones are parents of others. A *remote* snapshot is a committed one that represents an
image's layer without holding it: nothing was fetched or unpacked. The *top* of an image is the
remote snapshot of its last layer, which represents the whole tree.
"""
