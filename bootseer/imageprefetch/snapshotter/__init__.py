"""A containerd proxy snapshotter: stock image names, containers over lazily mounted images.

Terms: a *snapshot* is a tree with a name; *active* ones are written to, *views* only read,
*committed* ones are parents of others. A *remote* snapshot is a committed one that stands for an
image's layer without holding it: nothing was fetched or unpacked. The *top* of an image is the
remote snapshot of its last layer, which stands for the whole tree.
"""
