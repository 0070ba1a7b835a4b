"""The map from source files to tests is complete, and CONTRIBUTING.md contains the current map."""

from source_map import MAP, OF_ALL, PAGE, ROOT, is_below, with_table


def test_contributing_contains_the_map():
    """If this test fails, run ``python tools/source_map.py``."""
    assert PAGE.read_text() == with_table(PAGE.read_text())


def test_files_in_the_map_exist():
    paths = [ROOT / source for source in MAP] + [ROOT / "tests" / test for tests in MAP.values() for test in tests]
    assert [str(path) for path in paths if not path.exists()] == []


def test_map_contains_every_source_file_and_test():
    sources = [str(path.relative_to(ROOT)) for path in (ROOT / "jax_lossscale").rglob("*.py")]
    assert [name for name in sources if not any(is_below(name, source) for source in MAP)] == []
    listed = {*OF_ALL, *(test for tests in MAP.values() for test in tests)}
    tests = [str(path.relative_to(ROOT / "tests")) for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in tests if not any(is_below(name, test) for test in listed)] == []
