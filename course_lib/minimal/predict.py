"""A learner's prediction: kept when it is made, compared when the measurement is there."""

from dataclasses import dataclass

from course_lib.validate import Amount, checked


@dataclass(frozen=True)
class Prediction:
    """What a learner expects; `mine` is None where the question was left open."""

    question: str
    unit: str
    mine: float | None

    @checked
    def compare(self, measured: Amount) -> None:
        """Print how far the prediction was from the measurement; print nothing where none was made."""
        if self.mine is None:
            return
        if self.mine == measured:
            print(f"You predicted {self.mine:,} {self.unit}: right.")
            return
        print(f"You predicted {self.mine:,} {self.unit}; measured {measured:,} {self.unit}{self._far_from(measured)}.")

    def _far_from(self, measured: Amount) -> str:
        if self.unit == "%":  # no percent of percent
            return f", {round(abs(self.mine - measured), 2):g} percentage points {_side(self.mine, measured)}"
        return "" if measured == 0 else f", {abs(self.mine / measured - 1):.0%} {_side(self.mine, measured)}"


def _side(mine: float, measured: float) -> str:
    return "too high" if mine > measured else "too low"


def predict(question: str, unit: str, mine: float = ...) -> Prediction:
    """Keep a learner's number for a question; `...` leaves the question open.

    Raises   ValueError if `mine` is neither a number nor `...`
    """
    if mine is ...:
        return Prediction(question, unit, None)
    if isinstance(mine, bool) or not isinstance(mine, int | float):
        raise ValueError(f"mine is {mine!r}; give your prediction as a number, or leave ... to go on without one")
    return Prediction(question, unit, mine)
