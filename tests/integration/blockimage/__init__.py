"""Block images as the kernel reads them."""
