"""Checks of the statements about other libraries in `docs/differences.md`: ``python -m pytest tools/peers``.

`test_table` checks the first table of the page, with one module for each library. Each function of such a module runs
the library in one situation and returns the table cell that describes the result. The module `cases` contains common
helper functions. `test_differences` checks the second table. `tests` contains the tests of jax_lossscale itself.

The page describes specific versions of the libraries, so the checks are needed only if the page changes. Checks of
libraries that are not installed are skipped. To run all checks, use ``pip install torch==2.15.0 keras==3.15.1
tensorflow-cpu==2.21.0``.
"""
