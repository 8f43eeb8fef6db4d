"""Hot sets: made of traces, kept on the node, published, read ahead."""
