"""The same bytes through every face; the suites of fsspec, zarr and CPython."""
