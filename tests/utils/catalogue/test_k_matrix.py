"""K matrices and lenience: what is taken, and the one line in which anything else is refused."""

import math
from typing import Any

import pytest
import torch

from tests.support.refusals import refused
from utils.catalogue.specs import MOST, check_fit, check_lenience, check_shape

ROWS = "k_matrix must be rows of whole numbers like [[5,10],[0,10]], got "
NUMBERS = f"k_matrix must hold whole numbers from 0 to {MOST}, got "


@pytest.mark.parametrize(
    "matrix",
    [
        [[0]],
        [[13, 10], [0, 10]],
        [[5, 14, 10], [0, 1, 10], [0, 0, 10]],
        ((1, 0), (0, MOST)),
        torch.tensor([[1, 2], [0, 0]]),
    ],
)
def test_published_and_other_matrices_are_taken_as_tuples(matrix: Any) -> None:
    taken = check_shape(matrix)
    assert taken == tuple(tuple(map(int, row)) for row in matrix)
    assert check_fit(matrix, len(matrix)) == taken
    assert hash(taken) is not None


@pytest.mark.parametrize(
    ("matrix", "line"),
    [
        ([], ROWS + "[]"),
        (None, ROWS + "None"),
        ("5,10", ROWS + "'5,10'"),
        (["50", "05"], ROWS + "['50', '05']"),
        ([5, 10], ROWS + "[5, 10]"),
        ({"a": 1}, ROWS + "{'a': 1}"),
        ([[1] * 99, 5], ROWS + "[[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1…"),
        ([[5, 10]], "k_matrix must be square: 1 rows, but one of them has 2 numbers"),
        ([[5, 10], [10]], "k_matrix must be square: 2 rows, but one of them has 1 numbers"),
        ([[5, 10], []], "k_matrix must be square: 2 rows, but one of them has 0 numbers"),
        ([[]], "k_matrix must be square: 1 rows, but one of them has 0 numbers"),
        ([[5, -1], [0, 10]], NUMBERS + "-1 in row 1"),
        ([[5, 1], [0, 10.0]], NUMBERS + "10.0 in row 2"),
        ([[5, 1], [0, "10"]], NUMBERS + "'10' in row 2"),
        ([[5, 1], [0, None]], NUMBERS + "None in row 2"),
        ([[5, True], [0, 1]], NUMBERS + "True in row 1"),
        ([[MOST + 1]], NUMBERS + "1001 in row 1"),
        ([[5, 1], [3, 10]], "k_matrix must be upper triangular: row 2, column 1 must be 0, got 3"),
        ([[5, 1, 1], [0, 1, 1], [0, 2, 1]], "k_matrix must be upper triangular: row 3, column 2 must be 0, got 2"),
    ],
)
def test_what_is_no_matrix_is_refused_in_one_line(matrix: Any, line: str) -> None:
    assert refused(check_shape, matrix) == line


def test_a_matrix_for_another_number_of_drafters_is_refused() -> None:
    assert refused(check_fit, [[5, 10], [0, 10]], 3) == "k_matrix must have a row for each of the 3 drafters, got 2"
    refused(check_fit, [[5, 10]], 3, match=r"^k_matrix must be square: 1 rows")


@pytest.mark.parametrize("value", [1, 1.0, 2, 2.5, 1e6])
def test_leniences_from_1_on_are_taken(value: float) -> None:
    assert check_lenience(value) == value
    assert isinstance(check_lenience(value), float)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.99, "0.99"),
        (0, "0"),
        (-3, "-3"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (True, "True"),
        ("2", "'2'"),
        (None, "None"),
    ],
)
def test_other_leniences_are_refused_in_one_line(value: Any, shown: str) -> None:
    assert refused(check_lenience, value) == f"lenience must be a number, at least 1, got {shown}"
