"""docs/models.md names what is compared, and not how many tests do it."""

from __future__ import annotations

from make_models_doc import make_page


def test_the_page_changes_with_what_is_compared_and_not_with_the_number_of_tests() -> None:
    page = make_page({"llama": {"alone": 1, "budgets": 2}, "llava": {"alone": 1}})
    assert page.endswith("| llama | ✓ | ✓ |\n| llava | ✓ |  |\n")
    assert make_page({"llama": {"alone": 7, "budgets": 1}, "llava": {"alone": 3}}) == page
    assert make_page({"llama": {"alone": 1, "budgets": 2}, "llava": {"budgets": 1}}) != page
