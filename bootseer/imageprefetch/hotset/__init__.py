"""Hot sets: made of traces, kept on the node, published, carried over."""
