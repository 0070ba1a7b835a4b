"""The libraries in the table "How it differs" of `docs/migrating.md`, with one module for each library.

Each function of a module runs the library in one situation and returns the table cell that describes the result. The
module `cases` contains common helper functions. `tests/test_peers.py` compares the results with the table.
"""
