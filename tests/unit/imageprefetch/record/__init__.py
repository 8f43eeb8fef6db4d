"""Recording a start, and the traces that a node keeps."""
