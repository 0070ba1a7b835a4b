"""What each library does when it is asked the questions of the table in `docs/differences.md`.

One module a library. In each, a function for each question runs that library and says in the words of the table what it
did; `asked` holds what the questions have in common. ``tests/test_peers.py`` has the table.
"""
