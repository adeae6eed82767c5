"""An option is a field with its help, bounds and choices."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest

from sensorium.types.errors import ModelError
from sensorium.types.options import (
    SERVE,
    check_names,
    check_options,
    list_options,
    make_group,
    option,
    takes_options,
)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    plain: int = 0  # no option
    num_edges: int = option(4, least=3, section="shapes", commands=SERVE, help="The edges.")
    side: float = option(1.0, above=0, most=9, help="The length of a side.")
    color: str | None = option(None, kind="text", choices=("red", "blue"), help="The color.")
    is_filled: bool = option(True, help="Fill the shape.", section="paint")
    names: tuple[str, ...] = option((), kind="texts", commands=SERVE, help="The names.")

    def __post_init__(self) -> None:
        check_options(self, label="shapes: ")


def test_options_have_the_names_and_defaults_of_their_fields() -> None:
    options = {each.name: each for each in list_options(Shapes)}
    assert list(options) == ["num_edges", "side", "color", "is_filled", "names"]
    assert (options["num_edges"].flag, options["side"].flag) == ("--num-edges", "")
    assert [each.section for each in options.values()] == ["shapes"] * 3 + ["paint"] * 2
    defaults = [each.describe_default() for each in options.values()]
    assert defaults == ["4", "1", "none", "on", "none"]


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("num_edges", 2, "num_edges must be an integer >= 3, not 2"),
        ("num_edges", 3.0, "num_edges must be an integer >= 3, not 3.0"),
        ("num_edges", True, "num_edges must be an integer >= 3, not True"),
        ("num_edges", None, "num_edges must be an integer >= 3, not None"),
        ("side", 0, "side must be a number above 0 and at most 9, not 0"),
        ("side", float("nan"), "side must be a number above 0 and at most 9, not nan"),
        ("color", "green", "color must be red or blue, not 'green'"),
        ("is_filled", 1, "is_filled must be true or false, not 1"),
        ("names", "abc", "names must be a list of text, not 'abc'"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_the_name_of_its_option(
    name: str, value: Any, reason: str
) -> None:
    with pytest.raises(ModelError) as refused:
        Shapes(**{name: value})
    assert str(refused.value) == f"shapes: {reason}"


def test_none_is_allowed_where_it_is_the_default() -> None:
    assert Shapes(color=None).color is None


def test_a_group_takes_the_values_that_are_its_own() -> None:
    made = make_group(Shapes, {"num_edges": 5, "plain": 1, "weight": 9})
    assert (made.num_edges, made.plain) == (5, 1)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    check_names(["plain", "side"], [Shapes], caller="draw()")
    with pytest.raises(TypeError, match=r"draw\(\) has no option 'colour'; did you mean 'color'\?"):
        check_names(["colour"], [Shapes], caller="draw()")
    with pytest.raises(TypeError, match=r"draw\(\) has no option 'zzz'$"):
        check_names(["zzz"], [Shapes], caller="draw()")


def test_a_function_shows_the_options_that_it_takes() -> None:
    @takes_options(Shapes)
    def draw(side: float, **options: Any) -> None:
        """Draw shapes on a page."""

    signature = inspect.signature(draw)
    assert list(signature.parameters) == [
        "side",
        "plain",
        "num_edges",
        "color",
        "is_filled",
        "names",
    ]
    assert signature.parameters["num_edges"].default == 4
    assert "num_edges: The edges. Default: 4." in (draw.__doc__ or "")
